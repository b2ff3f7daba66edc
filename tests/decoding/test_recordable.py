"""Which caches a recorded pass can serve: a method that packs the tokens of a step before they attend needs kernels."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.attention import fused, phases
from kvbench.attention.phases import NotServed
from kvbench.cache.kernels import at_once
from kvbench.decoding.recordable import STATES, check_eager, check_recordable, expected


def layer(**changes: Any) -> Any:
    """A layer of two rows with 6 and 5 tokens behind full sinks, which packs at once."""
    lengths = changes.pop("lengths", ((4, 2), (4, 1)))
    store = SimpleNamespace(segments=[0, 1], signature=lambda row: (*lengths[row], 0, 0))
    return SimpleNamespace(**{
        "stores": lambda: [store, store],
        "packed_at_once": lambda: "segments",
        "window": None,
        "method": SimpleNamespace(sinks=4),
        "batch": 2,
        **changes,
    })  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "packing_refusal", lambda packed: None)


def test_new_tokens_of_a_step_are_packed_by_a_kernel() -> None:
    check_eager(layer(), 1)
    check_eager(layer(method=SimpleNamespace()), 1)  # a method without sinks
    check_eager(layer(lengths=((4, 0), (3, 1))), 1)  # four tokens in a row, wherever they are


@pytest.mark.parametrize(
    ("changes", "count", "said"),
    [
        ({}, 2, "are packed before they attend$"),
        ({"packed_at_once": lambda: None}, 1, "are packed before they attend$"),
        ({"window": 40}, 1, "a sliding window hides some"),
        ({"lengths": ((4, 0), (3, 0))}, 1, "fewer than 4 yet"),
    ],
)
def test_what_a_kernel_cannot_pack_is_refused(changes: dict[str, Any], count: int, said: str) -> None:
    with pytest.raises(NotServed, match=said):
        check_eager(layer(**changes), count)
    empty = SimpleNamespace(segments=[0])
    check_eager(layer(**{**changes, "stores": lambda: [empty, empty]}), count)  # nothing to pack


def test_a_format_without_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "packing_refusal", lambda packed: f"{packed} have no kernel")
    with pytest.raises(NotServed, match="before they attend, and segments have no kernel"):
        check_eager(layer(), 1)


def cache(monkeypatch: pytest.MonkeyPatch, seen: list[Any], **traits: Any) -> Any:
    method = SimpleNamespace(**{"observe_steps": False, "eager": False, **traits})
    stores = [SimpleNamespace(segments=[side, "tail"]) for side in ("keys", "values")]
    one = SimpleNamespace(
        method=method, stores=lambda: stores, key_dim=64, value_dim=32, progress=SimpleNamespace(max_length=90)
    )
    monkeypatch.setattr(fused, "check_plain_causal", lambda *asked: seen.append(asked[1:]))
    monkeypatch.setattr(phases, "describe_part", lambda *asked: seen.append(asked))
    return SimpleNamespace(state_layers=[], method=method, kv_layers=[one])


@pytest.mark.parametrize("upper", [False, True])
def test_every_segment_of_every_layer_is_looked_at(upper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    check_recordable(cache(monkeypatch, seen), 3, upper=upper, observed=False)
    parts = [("keys", 64, upper), ("tail", 64, upper), ("values", 32, upper), ("tail", 32, upper)]
    assert seen == [(None, 3, 93), *parts]


def test_states_and_unseen_attention_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    observing = cache(monkeypatch, [], observe_steps=True)
    check_recordable(observing, 1, upper=False, observed=True)
    with pytest.raises(NotServed, match="needs attention weights to be added after every step"):
        check_recordable(observing, 1, upper=False, observed=False)
    hybrid = cache(monkeypatch, [])
    hybrid.state_layers = [torch.zeros(1)]
    with pytest.raises(NotServed) as raised:
        check_recordable(hybrid, 1, upper=False, observed=True)
    assert str(raised.value) == STATES


def test_a_pass_serves_as_many_tokens_as_the_cache_is_made_for() -> None:
    assert expected(SimpleNamespace(progress=SimpleNamespace(max_length=90))) == 90  # type: ignore[arg-type]
    for unknown in (None, 0):
        assert expected(SimpleNamespace(progress=SimpleNamespace(max_length=unknown))) == sys.maxsize  # type: ignore[arg-type]
