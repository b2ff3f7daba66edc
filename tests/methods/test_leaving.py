"""Demotion times against the rules themselves: after n tokens, exactly those with a time of at most n are packed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache.policy import NEVER
from kvbench.methods import Method, load_method
from kvbench.methods.kivi import Kivi
from kvbench.methods.leaving import demoted_by, untouched
from kvbench.methods.logquant import indices

N = 300


def layer(index: int = 0, window: int | None = None) -> Any:
    progress = SimpleNamespace(plans={})
    return SimpleNamespace(index=index, window=window, progress=progress)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kivi", {"quantizer": "int4", "residual": 64, "sinks": 3}),
        ("kivi", {"residual": 64, "evict": True}),
        ("atom", {}),
        ("quantspec", {"gamma": 0}),
    ],
)
def test_times_of_a_window_of_the_newest(name, options) -> None:
    method = load_method(name, **options)
    times = method.demotions(layer(), N)
    for n in range(N + 1):
        for side, exact in enumerate(method.windows(n)):
            packed = {token for token in range(n) if times[side][token] <= n}
            assert packed == set(range(method.sinks, n - exact)), (n, side)
    assert all(time.dtype == torch.int64 and len(time) == N for time in times)


def test_layers_that_pack_nothing_have_no_times() -> None:
    method = load_method("quantspec", gamma=0, sensitive_layers=1)
    for time in method.demotions(layer(0), N):
        assert (time == NEVER).all()
    assert (method.demotions(layer(1), N)[0] < NEVER).any()
    short = load_method("logquant", window=16).demotions(layer(window=30), N)
    assert (short[0] == NEVER).all() and (short[1] == NEVER).all()


@pytest.mark.parametrize("sinks", [0, 5])
@pytest.mark.parametrize("W", [16, 21])
def test_times_of_logquants_flushes(W, sinks) -> None:
    method = load_method("logquant", window=W, sinks=sinks)
    keys, values = method.demotions(layer(), N)
    assert torch.equal(keys, values)
    for n in range(N + 1):
        exact = {*range(min(sinks, n)), *(sinks + token for token in indices(max(n - sinks, 0), W))}
        assert {token for token in range(n) if keys[token] > n} == exact, n


@pytest.mark.parametrize("value_window", ["recent", "released"])
def test_times_of_partial_logquant(value_window) -> None:
    method = load_method("partial_logquant", window=16, sinks=2, value_window=value_window)
    keys, values = method.demotions(layer(), N)
    assert torch.equal(keys, load_method("logquant", window=16, sinks=2).demotions(layer(), N)[0])
    for n in range(N + 1):
        rest = max(n - 2, 0)
        assert {token for token in range(n) if values[token] <= n} == set(
            range(2, 2 + rest - method.exact_values(rest))
        )


def test_methods_whose_tokens_stay_and_those_of_which_nothing_is_known() -> None:
    for name in ("fp16", "cocktail", "snapkv"):
        for time in load_method(name).demotions(layer(), 9):
            assert time.tolist() == [NEVER] * 9
    for name in ("h2o", "streamingllm", "hf_quantized"):
        assert load_method(name).demotions(layer(), 9) is None


@dataclass(kw_only=True)
class Own(Kivi):
    """Settles in a way of its own."""

    def settle(self, layer: Any, rows: slice) -> None:
        """Do nothing."""


@dataclass(kw_only=True)
class Both(Own):
    """Says when."""

    def settle(self, layer: Any, rows: slice) -> None:
        """Do nothing."""

    def demotions(self, layer: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return that no token is packed."""
        return untouched(count), untouched(count)


class Heir(Both):
    """Has both from its base."""


def test_a_settle_of_its_own_makes_inherited_times_void() -> None:
    """They would be those of another rule."""
    assert Own.demotions is Method.demotions and Kivi.demotions is not Method.demotions
    own = Own(takes=("none",))
    assert own.demotions(layer(), 5) is None
    for kind in (Both, Heir):
        times = kind(takes=("none",)).demotions(layer(), 5)
        assert times is not None and times[0].tolist() == [NEVER] * 5


def test_times_from_counts() -> None:
    assert demoted_by([0, 0, 0, 2, 2, 3], 5).tolist() == [3, 3, 5, NEVER, NEVER]
    assert demoted_by([0, 0, 0, 1, 2, 3], 5, sinks=2).tolist() == [NEVER, NEVER, 3, 4, 5]
    assert demoted_by([0], 0).tolist() == []
