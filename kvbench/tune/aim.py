"""The aim of a search, and the outcome of one evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.tune.space import Recipe, Space

#: a recipe stops after some windows if it is worse by this many paired errors, seen on at least so many windows
ERRORS, WINDOWS = 3.0, 4


@dataclass(frozen=True)
class Scored:
    """KL divergence of a recipe on the windows of a search, in nats.

    Args:
        kl: mean of each window, in order; of the first ones alone if the recipe was stopped.
        p99: 99 % of all predictions; NaN if it was stopped.
    """

    recipe: Recipe
    kl: NDArray[np.float64]
    p99: float
    stopped: bool = False

    @property
    def mean(self) -> float:
        """Mean over the windows."""
        return float(self.kl.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean over windows; NaN for one window."""
        return standard_error(self.kl)


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of a mean; NaN for a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class Aim:
    """Aim of a search: the least KL divergence under a budget, or the fewest bits under a KL divergence.

    Args:
        space: the recipes.
        bits: most bits an element; None with `kl`.
        kl: largest mean KL divergence in nats; None with `bits`.
    """

    space: Space
    bits: float | None = None
    kl: float | None = None

    @property
    def capacity(self) -> int:
        """Largest cost of a recipe."""
        most = int(self.space.costs.max(1).sum())
        return most if self.bits is None else min(most, self.space.capacity(self.bits))

    def admits(self, recipe: Recipe) -> bool:
        """Return True if a recipe is within the budget of bits."""
        return self.space.cost(recipe) <= self.capacity

    def rank(self, scored: Scored) -> tuple[float, ...]:
        """Return a tuple that is smaller for the better of two recipes."""
        if self.kl is None:
            return (scored.mean,)
        cost = float(self.space.cost(scored.recipe))
        return (0.0, cost, scored.mean) if scored.mean <= self.kl else (1.0, scored.mean, cost)

    def hopeless(self, kl: NDArray[np.float64], best: Scored | None) -> bool:
        """Return True if the first windows of a recipe show it worse than `best`, or above the KL divergence sought.

        The errors beside `best` are paired by window; those beside the KL divergence sought are the recipe's own.
        """
        if len(kl) < WINDOWS:
            return False
        if self.kl is not None:
            return bool(kl.mean() - ERRORS * standard_error(kl) > self.kl)
        if best is None:
            return False
        worse = kl - best.kl[: len(kl)]
        return bool(worse.mean() > ERRORS * standard_error(worse))
