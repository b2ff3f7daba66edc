"""Tokens that leave a sliding window or full precision: how many, in whole groups, and when. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.cache.policy import NEVER
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

#: number of hidden tokens dropped at a time where dropping one by one would move codes or positions at every step
CHUNK = 32
#: limits of KVQuant's blocks of outliers, whose indices have 16 bits: elements and tokens per block
INDICES, TILE = 1 << 16, 128


def hidden(count: int, window: int | None) -> int:
    """Return the number of oldest tokens that have left a sliding window, so that no later token can attend to them.

    The window counts the tokens that a query sees, its own included; without one (None) the result is 0.
    """
    return 0 if window is None else max(count - (window - 1), 0)


def whole_groups(hidden: int, unit: int, first: int = 0) -> int:
    """Return how many of the `hidden` oldest tokens can be dropped without splitting a group.

    The first `first` tokens (sinks), before the first group of `unit` tokens, are dropped together or not at all.
    """
    return first + (hidden - first) // unit * unit if hidden >= first else 0


def outlier_block(width: int) -> int:
    """Return the number of tokens in each block into which KVQuant divides its tokens to store their outliers.

    The index of an outlier within its block has 16 bits. The block is as large as this allows for `width` channels over
    all heads, rounded down to a power of two, but has at most 128 tokens (:data:`TILE`).
    """
    return min(1 << ((INDICES // width).bit_length() - 1), TILE)


def untouched(count: int) -> torch.Tensor:
    """Return demotion times (:meth:`Method.demotions`) of `count` tokens that all stay in full precision."""
    return torch.full((count,), NEVER)


def demoted_by(packed: Sequence[int], count: int, sinks: int = 0) -> torch.Tensor:
    """Return the demotion times (:meth:`Method.demotions`) of a rule that packs the oldest tokens first.

    Args:
        packed: for each number of tokens from 0 to `count`, without the `sinks` that stay in full precision, how many
            have been packed or dropped by then. The numbers never decrease.
    """
    times = untouched(count)
    if count > sinks:
        # token t is among the packed ones as soon as packed[n] > t: the first such n
        first = torch.searchsorted(torch.tensor(packed), torch.arange(count - sinks), right=True)
        times[sinks:] = torch.where(first <= count, first, times[sinks:])
    return times
