"""Intervals of means and percentiles, by drawing whole prompts with replacement."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def bootstrap(
    groups: Sequence[ArrayLike], level: float | None = None, *, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return a 95 % interval of a mean or a percentile over positions, drawing whole prompts with replacement.

    Positions of one prompt depend on each other, so prompts are drawn, not positions. Calls with the same seed and
    number of groups draw the same prompts. For the paired interval of two methods, pass the differences of their values
    at each position.

    Args:
        groups: the values of each prompt, one array per prompt.
        level: percentile in 0..100; None for the mean.
    """
    low, high = np.percentile(drawn(groups, level, draws=draws, seed=seed), (2.5, 97.5))
    return float(low), float(high)


def drawn(groups: Sequence[ArrayLike], level: float | None = None, *, draws: int = 10_000, seed: int = 0) -> Floats:
    """Return the mean, or a percentile, over the positions of prompts that are drawn with replacement, ``[draws]``.

    The arguments are those of :func:`bootstrap`, which returns the interval that contains 95 % of these values. The
    difference of two methods' values draw by draw gives the paired interval of a percentile.
    """
    arrays = [np.asarray(group, dtype=np.float64).ravel() for group in groups]
    picks = picked(len(arrays), draws, seed)
    if level is None:
        sums = np.array([array.sum() for array in arrays])
        counts = np.array([len(array) for array in arrays])
        return np.asarray(sums[picks].sum(-1) / counts[picks].sum(-1))
    values = np.concatenate(arrays)
    order = values.argsort(kind="stable")
    ordered, owner = values[order], np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])[order]
    percentiles = np.empty(draws)
    for number, pick in enumerate(picks):
        # how often each prompt was drawn is how often each of its values counts
        ends = np.bincount(pick, minlength=len(arrays))[owner].cumsum()
        rank = level / 100 * (ends[-1] - 1)
        below = math.floor(rank)
        low, high = ordered[np.searchsorted(ends, (below, min(below + 1, ends[-1] - 1)), side="right")]
        percentiles[number] = low + (high - low) * (rank - below)
    return percentiles


def picked(groups: int, draws: int, seed: int) -> NDArray[np.int64]:
    """Return the indices of the groups in each draw, ``[draws, groups]``; equal arguments give equal draws."""
    return np.random.default_rng(seed).integers(0, groups, size=(draws, groups))
