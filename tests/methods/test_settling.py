"""Rows that settle together, and the steps after which nothing is due."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.cache.policy import NEVER
from kvbench.cache.segments.packed import PackedSegment
from kvbench.methods import load_method
from kvbench.methods.base import ALWAYS
from tests import zoo
from tests.zoo import feed, new_layer, random_kv

ROWS = slice(None)
KEYS, VALUES = random_kv(160, batch=2, channels=64, seed=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "kivi": {"quantizer": "int4", "residual": 32, "sinks": 3},
    "atom": {"window": 8},
    "oscar": {"basis": "rotation", "window": 16, "sinks": 0},
}


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing of a block of all rows, as kernels do it on a GPU."""
    monkeypatch.setattr(PackedSegment, "appends_each", lambda self, tokens: True)
    monkeypatch.setattr(PackedSegment, "append_each", lambda self, tokens: self.append(ROWS, tokens))


def fed(name: str, tokens: int, starts: list[int] | None = None) -> Any:
    """A layer of two rows that got a prompt of 40 tokens and then one more at a time, and has not settled."""
    layer = new_layer(load_method(name, **SETTINGS[name]), starts)
    feed(layer, KEYS[:, :, :40], VALUES[:, :, :40])
    layer.settle()
    for at in range(40, tokens):
        feed(layer, KEYS[:, :, at : at + 1], VALUES[:, :, at : at + 1])
    return layer


def stored(layer: Any) -> list[list[Any]]:
    return [
        [segment.read(ROWS, 0, segment.length(slice(0, 1)), torch.float32) for segment in store.segments]
        for store in layer.stores()
    ]


@pytest.mark.parametrize("tokens", [40, 71, 100])
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_of_one_length_are_packed_as_a_block_and_alike(name: str, tokens: int, together: None) -> None:
    alone, block = fed(name, tokens), fed(name, tokens)
    alone.method.settle(alone, ROWS)
    assert block.method.settle_each(block)
    for store, other in zip(block.stores(), alone.stores(), strict=True):
        assert [segment.lengths for segment in store.segments] == [segment.lengths for segment in other.segments]
    for mine, its in zip(stored(block), stored(alone), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, its, strict=True))


def test_rows_whose_windows_differ_settle_one_by_one(together: None) -> None:
    layer = fed("kivi", 100, starts=[0, 5])
    before = [segment.lengths[:] for segment in layer.segments()]
    assert not layer.method.settle_each(layer)
    assert [segment.lengths for segment in layer.segments()] == before


@pytest.mark.parametrize("name", ["atom", "oscar"])
def test_rows_of_different_lengths_with_equal_windows_are_packed_as_a_block(name: str, together: None) -> None:
    block, alone = fed(name, 100, starts=[0, 5]), fed(name, 100, starts=[0, 5])
    assert block.method.settle_each(block)
    for row in range(2):
        alone.method.settle(alone, slice(row, row + 1))
        for mine, its in zip(block.segments(), alone.segments(), strict=True):
            one, count = slice(row, row + 1), its.lengths[row]
            assert mine.lengths[row] == count
            assert torch.equal(mine.read(one, 0, count, torch.float32), its.read(one, 0, count, torch.float32))


def test_rows_whose_sinks_are_not_full_settle_one_by_one(together: None) -> None:
    layer = new_layer(load_method("kivi", quantizer="int4", residual=32, sinks=9))
    feed(layer, KEYS[:, :, :6], VALUES[:, :, :6])
    assert not layer.method.settle_each(layer)
    feed(layer, KEYS[:, :, 6:12], VALUES[:, :, 6:12])
    layer.settle()
    assert layer.method.settle_each(layer)


def test_a_block_is_packed_only_where_segments_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fed("kivi", 100)
    monkeypatch.setattr(PackedSegment, "appends_each", lambda self, tokens: self.side == "key")
    before = [segment.lengths[:] for segment in layer.segments()]
    assert not layer.method.settle_each(layer)
    assert [segment.lengths for segment in layer.segments()] == before


def test_what_is_dropped_or_stays_is_not_packed_as_a_block(together: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = new_layer(load_method("kivi", evict=True, residual=32))
    feed(layer, KEYS[:, :, :40], VALUES[:, :, :40])
    assert not layer.method.settle_each(layer)
    layer = fed("kivi", 100)
    monkeypatch.setattr(type(layer.method), "exact_layers", 1)
    assert not layer.method.settle_each(layer)


def test_a_layer_is_idle_for_ever_if_it_packs_nothing_and_never_while_sinks_are_missing() -> None:
    method = load_method("quantspec", gamma=0, sensitive_layers=1)
    assert method.idle(new_layer(method), 0) == ALWAYS
    layer = new_layer(load_method("kivi", quantizer="int4", residual=32, sinks=9))
    feed(layer, KEYS[:, :, :8], VALUES[:, :, :8])
    assert layer.method.idle(layer, 0) == 0
    feed(layer, KEYS[:, :, 8:9], VALUES[:, :, 8:9])
    layer.settle()
    assert layer.method.idle(layer, 0) == 31
    layer.window = 64
    assert layer.method.idle(layer, 0) == 0


@pytest.mark.parametrize("name", ["logquant", "partial_logquant"])
def test_a_short_sliding_window_leaves_logquant_nothing_to_pack(name: str) -> None:
    layer = new_layer(load_method(name, window=20))
    layer.window = 40
    assert all(times.tolist() == [NEVER] * 100 for times in layer.method.demotions(layer, 100))


def test_h2o_has_no_gaps_before_it_drops_a_token() -> None:
    model, (ids, _) = zoo.model("llama"), zoo.padded_batch([30])
    cache = load_method("h2o", budget=31, recent=8).new_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert cache.layers[0].positions(0).tolist() == list(range(30))
        assert cache.layers[0].method.positions(cache.layers[0], 0) is None
        for token in (5, 6, 7):
            model(torch.tensor([[token]]), past_key_values=cache)
    cache.settle()
    places = cache.layers[0].positions(0)
    assert places.shape == (2, 31)
    assert all(sorted(head.tolist())[-8:] == list(range(25, 33)) for head in places)
