"""Copies, reorders and resets of caches: nothing of the original, or of the prompt before, is left in force."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.segments.base import FullSegment
from kvbench.cache.segments.codebook import NuqFormat, NuqSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.segments.rolling import RollingSegment
from kvbench.cache.segments.scored import ScoredSegment
from kvbench.errors import CacheError
from kvbench.methods import load_method
from kvbench.quantizers import AffineQuantizer
from tests import zoo

ALL = slice(None)


def test_a_clone_has_windows_of_its_own():
    segment = FullSegment(2, 2, 32, torch.float32, "cpu", capacity=8)
    x = zoo.random_kv(6, batch=2)[0]
    segment.append(ALL, x)
    twin = segment.clone()
    twin.drop_front(ALL, 4)
    assert torch.equal(segment.view(ALL), x)
    assert torch.equal(twin.view(ALL), x[:, :, 4:])
    segment.drop_front(ALL, 1)
    assert torch.equal(twin.view(ALL), x[:, :, 4:])


def kinds() -> list:
    """A segment of each kind, for two rows."""
    shape = (2, 2, 32, torch.float32, "cpu")
    levels, ends = torch.tensor([-0.75, -0.25, 0.25, 0.75]), torch.tensor([[1.5], [-1.5]]).expand(2, 64).half()
    keys, values = (NuqFormat(2, levels, outliers=0.05, thresholds=limits) for limits in (ends, None))
    return [
        FullSegment(*shape),
        ScoredSegment(*shape),
        RollingSegment(*shape, sinks=2, turn=lambda keys, by: keys),
        PackedSegment(*shape, quantizer=AffineQuantizer(4, 32, "token"), side="key"),
        NuqSegment(*shape, form=keys, side="key"),
        NuqSegment(*shape, form=values, side="value"),
    ]


@torch.no_grad()
def test_what_inference_mode_has_seen_may_be_written_outside_of_it():
    x = zoo.random_kv(5, batch=2)[0]
    with torch.inference_mode():
        segments = kinds()
        for segment in segments:
            segment.append(ALL, x)
        twins = [segment.clone() for segment in segments]
        for segment in segments:
            segment.select(torch.tensor([1, 0]))
    for segment, twin in zip(segments, twins, strict=True):
        for either in (segment, twin):
            assert not any(buffer.is_inference() for _, buffer in either.buffers())
            either.append(ALL, x)
        assert torch.equal(segment.read(ALL, 0, 5, torch.float32), twin.read(ALL, 0, 5, torch.float32)[[1, 0]])
        assert torch.equal(segment.read(ALL, 5, 10, torch.float32), twin.read(ALL, 5, 10, torch.float32))


def after_a_flush() -> tuple:
    """Two rows, of which the first has 5 columns of padding, after the step in which the second alone has flushed."""
    layer = zoo.new_layer(load_method("logquant", quantizer="int8", window=8), [5, 0])
    keys, values = zoo.random_kv(26, batch=2)
    zoo.feed(layer, keys[:, :, :22], values[:, :, :22])
    for column in range(22, 24):
        zoo.feed(layer, keys[:, :, column : column + 1], values[:, :, column : column + 1])
    layer.settle()
    return layer, [sum(store.signature(row)[-1] for store in layer.stores()) for row in (0, 1)]


@pytest.mark.parametrize(("rows", "gives"), [([0, 0, 0], True), ([1, 0], False), ([0, 1, 1], False)])
def test_rows_take_along_what_they_may_give_back(rows, gives):
    layer, exact = after_a_flush()
    assert exact[0] > exact[1]  # the second row has flushed, the first has not
    layer.batch_select_indices(torch.tensor(rows))
    if gives:
        layer.crop(-1)
        assert layer.get_seq_length() == 23
    else:
        with pytest.raises(CacheError, match=f"in row {rows.index(1)} of layer 0"):
            layer.crop(-1)


def test_a_cache_that_is_reset_learns_the_padding_anew():
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int8", residual=32)

    def answered(cache, lengths: list[int]) -> torch.Tensor:
        ids, mask = zoo.padded_batch(lengths, seed=2)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            return model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True).logits

    cache = method.new_cache(model)
    try:
        answered(cache, [60, 41])
        cache.reset()
        again = answered(cache, [33, 70])
        assert torch.equal(again, answered(method.new_cache(model), [33, 70]))
    finally:
        method.detach(model)


def test_a_clone_between_two_chunks_of_a_prompt_goes_on_by_itself():
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int8", residual=32)
    ids = torch.randint(3, 90, (1, 80), generator=torch.Generator().manual_seed(5))
    start, one, other = ids[:, :30], ids[:, 30:55], ids[:, 55:]

    def begun():
        cache = method.new_cache(model)
        cache.open_prefill()
        model(input_ids=start, past_key_values=cache, use_cache=True)
        return cache

    def gone_on(cache, chunk) -> torch.Tensor:
        model(input_ids=chunk, past_key_values=cache, use_cache=True)
        cache.finalize()
        return model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits

    try:
        with torch.no_grad():
            cache = begun()
            twin = cache.clone()
            logits = gone_on(cache, one), gone_on(twin, other)
            assert torch.equal(logits[0], gone_on(begun(), one))
            assert torch.equal(logits[1], gone_on(begun(), other))
    finally:
        method.detach(model)
