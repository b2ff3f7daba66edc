"""Demotion times: after how many tokens a method packs or drops each token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache import policy
else:
    torch, policy = lazy("torch"), lazy("kvbench.cache.policy")


def untouched(count: int) -> torch.Tensor:
    """Return demotion times (:meth:`Method.demotions`) of `count` tokens that all stay in full precision."""
    return torch.full((count,), policy.NEVER)


def demoted_by(packed: Sequence[int], count: int, sinks: int = 0) -> torch.Tensor:
    """Return the demotion times (:meth:`Method.demotions`) of a rule that packs the oldest tokens first.

    Args:
        packed: for each number of tokens from 0 to `count`, without the `sinks` that stay in full precision, the number
            that are packed or dropped by then. It never falls.
    """
    times = untouched(count)
    if count > sinks:
        # token t is among the packed ones as soon as packed[n] > t: the first such n
        first = torch.searchsorted(torch.tensor(packed), torch.arange(count - sinks), right=True)
        times[sinks:] = torch.where(first <= count, first, times[sinks:])
    return times
