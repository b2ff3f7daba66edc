"""The best recipe where the losses of layers add up, and a belief about these losses that evaluations correct.

The belief is Gaussian: each cell (position, keys or values, format) loses its estimate times an unknown factor near 1.
Factors of one position and side, and of one format and side, are related. A recipe's KL divergence is the sum of its
cells, so recipes that were evaluated correct all factors by Bayesian linear regression; a draw from what is left
uncertain proposes the next recipe (Thompson 1933).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.methods.layer_map import EXACT
from kvbench.tune.space import Recipe, Space, sides_of

Floats = NDArray[np.float64]
SIDES = ("keys", "values")
#: standard deviations of a factor that the cells of a position and side, those of a format and side, and each cell has
BY_POSITION, BY_FORMAT, BY_CELL = 0.35, 0.15, 0.25
#: error of a sum of cells as the KL divergence of a recipe, relative to it: losses do not quite add up
MISFIT = 0.05
#: smallest factor of a draw
LEAST = 0.05


def least_loss(costs: NDArray[np.int64], losses: Floats, capacity: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return for each capacity the least sum of losses, ``[capacity + 1]``, and the choices that have it.

    One form is chosen at each position. The result is exact: dynamic programming over the capacity. Where a capacity
    is too small, the loss is infinite.

    Args:
        costs: of each form at each position, ``[positions, forms]``.
        losses: likewise.

    Returns:
        The losses, and for each position and capacity the index of the form, ``[positions, capacity + 1]``.
    """
    best = np.zeros(capacity + 1)
    taken = np.zeros((len(costs), capacity + 1), dtype=np.int64)
    for position, (cost, loss) in enumerate(zip(costs, losses, strict=True)):
        tried = np.full((len(cost), capacity + 1), np.inf)
        for form, (c, x) in enumerate(zip(cost, loss, strict=True)):
            if c <= capacity:
                tried[form, c:] = best[: capacity + 1 - c] + x
        taken[position] = tried.argmin(0)
        best = tried.min(0)
    return best, taken


def chosen_forms(space: Space, taken: NDArray[np.int64], capacity: int) -> Recipe:
    """Return the recipe whose choices :func:`least_loss` has made for a capacity."""
    recipe = []
    for position in reversed(range(space.positions)):
        form = int(taken[position, capacity])
        recipe.append(space.forms[form])
        capacity -= int(space.costs[position, form])
    return tuple(reversed(recipe))


def best_recipe(space: Space, losses: Floats, capacity: int) -> Recipe:
    """Return the recipe of at most this cost whose losses ``[positions, forms]`` have the least sum."""
    return chosen_forms(space, least_loss(space.costs, losses, capacity)[1], capacity)


def smallest_recipe(space: Space, losses: Floats, most: float) -> Recipe:
    """Return the recipe of the least cost whose losses have at most this sum; if none has, that of the least sum."""
    capacity = int(space.costs.max(1).sum())
    best, taken = least_loss(space.costs, losses, capacity)
    fitting = np.flatnonzero(best <= most)
    return chosen_forms(space, taken, int(fitting[0]) if len(fitting) else capacity)


@dataclass
class Belief:
    """Losses of cells, as estimated and as corrected by evaluated recipes.

    Args:
        estimates: KL divergence of each position's keys and values in each format of :attr:`packed`,
            ``[2, positions, formats]``.
    """

    space: Space
    estimates: Floats

    def __post_init__(self) -> None:
        self.packed = tuple(name for name in self.space.formats if name != EXACT)
        side, position, form = (x.ravel() for x in np.indices(self.estimates.shape))
        same_side = side[:, None] == side
        covariance = same_side * (
            BY_POSITION**2 * (position[:, None] == position)
            + BY_FORMAT**2 * (form[:, None] == form)
            + BY_CELL**2 * ((position[:, None] == position) & (form[:, None] == form))
        )
        self._prior: Floats = covariance.astype(np.float64)
        self._mean, self._root = np.ones(len(side)), np.linalg.cholesky(self._prior + 1e-9 * np.eye(len(side)))

    def _cells(self, recipe: Recipe) -> list[int]:
        """Return the indices of a recipe's cells; exact layers have none."""
        shape = self.estimates.shape
        return [
            int(np.ravel_multi_index((side, position, self.packed.index(name)), shape))
            for position, form in enumerate(recipe)
            for side, name in enumerate(sides_of(form))
            if name != EXACT
        ]

    def learn(self, measured: Mapping[Recipe, float]) -> None:
        """Correct the factors by the KL divergences of recipes."""
        if not measured:
            return
        rows = np.zeros((len(measured), self.estimates.size))
        for row, recipe in zip(rows, measured, strict=True):
            cells = self._cells(recipe)
            row[cells] = self.estimates.ravel()[cells]
        divergences = np.array([*measured.values()])
        # a recipe of exact layers alone loses nothing, and says nothing of any cell
        noise = (MISFIT * np.maximum(divergences, 1e-9)) ** 2
        gain = np.linalg.solve(rows @ self._prior @ rows.T + np.diag(noise), rows @ self._prior).T
        self._mean = 1 + gain @ (divergences - rows.sum(1))
        left = self._prior - gain @ rows @ self._prior
        values, vectors = np.linalg.eigh((left + left.T) / 2)
        self._root = vectors * np.sqrt(np.clip(values, 0, None))

    def losses(self, draw: Floats | None = None) -> Floats:
        """Return the loss of each form at each position, ``[positions, forms]``.

        `draw` has a standard normal number for each cell, for a draw from the belief; None: its mean.
        """
        factors = self._mean if draw is None else self._mean + self._root @ draw
        cells = (self.estimates.ravel() * np.maximum(factors, LEAST)).reshape(self.estimates.shape)
        losses = np.zeros((self.space.positions, len(self.space.forms)))
        for number, form in enumerate(self.space.forms):
            for side, name in enumerate(sides_of(form)):
                if name != EXACT:
                    losses[:, number] += cells[side, :, self.packed.index(name)]
        return losses

    def expected(self, recipe: Recipe) -> float:
        """Return the expected KL divergence of a recipe."""
        losses = self.losses()
        return float(sum(losses[i, self.space.forms.index(form)] for i, form in enumerate(recipe)))


def divided(groups: Sequence[int], values: Sequence[float]) -> Floats:
    """Return the value of each position, where groups of consecutive positions share what was measured together."""
    return np.concatenate([np.full(count, value / count) for count, value in zip(groups, values, strict=True)])
