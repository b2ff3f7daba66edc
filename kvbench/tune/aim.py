"""The aim of a search, the outcome of one evaluation, and the rule by which an evaluation ends early.

A recipe is scored on some windows at a time, and there is a look after each of these batches but the last. A recipe
that would become the best is stopped with a probability of at most :data:`ERROR` over all its looks, as each look may
err by an equal share of it (Bonferroni). The windows are in random order, so those that are missing are predicted
from those that were scored: the mean over all of them, less what decides, is a Student's t with a correction for a
finite number of windows (Cochran 1977, Sampling Techniques, section 2.8), if the windows' differences are normal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.tune.space import Recipe, Space

#: probability of stopping a recipe that would become the best, over all looks; and fewest windows of a look: of fewer,
#: t relies on a normal distribution too much
ERROR, WINDOWS = 0.01, 4


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

    def hopeless(self, recipe: Recipe, kl: NDArray[np.float64], best: Scored | None, looks: int) -> bool:
        """Return True if the first windows of a recipe show that it will not become the best.

        Under a budget of bits it would have to lose less than `best`, by windows in pairs. Under a KL divergence the
        same is asked as long as `best` is above it; then it would have to stay below, and to have no more bits.

        Args:
            kl: of its first windows.
            looks: number of looks at a recipe, this one among them.
        """
        if best is None or len(kl) < WINDOWS:
            return False
        windows, share = len(best.kl), ERROR / looks
        worse = tail(kl - best.kl[: len(kl)], windows)
        if self.kl is None or best.mean > self.kl:
            return worse < share
        above, more = tail(kl - self.kl, windows), self.space.cost(recipe) - self.space.cost(best.recipe)
        return more > 0 or (above < share if more else min(above, worse) < share / 2)


def tail(first: NDArray[np.float64], windows: int) -> float:
    """Return the probability that the mean over all windows is not positive, given their first differences."""
    if len(first) >= windows:
        return float(first.mean() <= 0)
    error = standard_error(first) * math.sqrt((windows - len(first)) / windows)
    if not error > 0:
        return 0.0 if not error and first.mean() > 0 else 1.0
    return student_tail(float(first.mean()) / error, len(first) - 1)


def student_tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t is above `t` (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd, square = freedom % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= square * power / (power + 1)
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return max((1 - inside) / 2, 0.0)
