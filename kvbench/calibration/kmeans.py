"""Codebooks by weighted k-means in one dimension, without random numbers.

KVQuant (Hooper et al. 2024, sec. 3, nuqX) minimises ``sum_i F_i (x_i - Q(x_i))**2`` with the Fisher information F_i
as weight; its code uses scikit-learn's KMeans with a random start. Here the values, all in [-1, 1], are counted in two
histograms. Dynamic programming finds the best codebook for the coarse one, and Lloyd's iterations refine it on the fine
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: bins of [-1, 1]; a border between levels is off by at most half a bin, 2**-16
BINS = 1 << 16
#: bins of the dynamic programme
COARSE = 1 << 9
#: upper limit of iterations; convergence comes long before
ITERATIONS = 500
#: largest movement of a level at convergence
CONVERGED = 1e-7


@dataclass
class Histogram:
    """A weighted histogram of numbers in [-1, 1], with enough per bin to compute means and squared errors.

    Args:
        weight: for each bin, the sum of the weights, float64 ``[BINS]``.
        first: the sum of weight times number.
        second: the sum of weight times number squared.
    """

    weight: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def empty(cls) -> Histogram:
        """Return a histogram of no numbers."""
        return cls(*(torch.zeros(BINS, dtype=torch.float64) for _ in range(3)))

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Count more numbers, in [-1, 1] and of any shape.

        Args:
            weights: in the shape of `values`; None for a weight of 1 each.
        """
        x = values.reshape(-1).double().cpu()
        w = torch.ones_like(x) if weights is None else weights.reshape(-1).double().cpu()
        index = ((x + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
        for total, part in ((self.weight, w), (self.first, w * x), (self.second, w * x * x)):
            total += torch.bincount(index, part, minlength=BINS)

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.weight.sum())

    def moments(self) -> tuple[float, float]:
        """Return the weighted mean and the weighted standard deviation of all numbers."""
        mean = float(self.first.sum()) / self.total
        return mean, max(float(self.second.sum()) / self.total - mean * mean, 0.0) ** 0.5

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return running totals of the three sums, each ``[BINS + 1]``: entry i adds up the first i bins."""
        zero = torch.zeros(1, dtype=torch.float64)
        return tuple(torch.cat([zero, part.cumsum(0)]) for part in (self.weight, self.first, self.second))  # type: ignore[return-value]


def levels(histogram: Histogram, count: int) -> Tensor:
    """Fit a codebook, ascending and fp32 ``[count]``, to the numbers of a histogram by k-means.

    Args:
        count: number of levels. If there are fewer distinct numbers, the last level is repeated.
    """
    occupied = histogram.weight > 0
    if int(occupied.sum()) <= count:
        means = (histogram.first[occupied] / histogram.weight[occupied]).float()
        return torch.cat([means, means[-1:].expand(count - len(means))]) if len(means) else torch.zeros(count)
    sums = histogram.sums()
    means = _best_of_coarse(sums, count)
    for _ in range(ITERATIONS):
        borders = ((means[1:] + means[:-1]) / 2 + 1) * (BINS / 2)
        cuts = torch.cat([torch.tensor([0]), borders.round().long().clamp(0, BINS), torch.tensor([BINS])])
        weight, first = (part[cuts[1:]] - part[cuts[:-1]] for part in sums[:2])
        new = torch.where(weight > 0, first / weight.clamp(min=1e-300), means).sort().values
        moved = float((new - means).abs().max())
        means = new
        if moved < CONVERGED:
            break
    return means.float()


def distortion(histogram: Histogram, codebook: Tensor) -> float:
    """Return the weighted mean squared error of rounding the numbers of a histogram to the nearest level of a codebook.

    All numbers of a bin go to the level that is nearest to the bin's centre.
    """
    ordered = codebook.double().sort().values
    centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 / BINS) - 1
    nearest = ordered[torch.searchsorted((ordered[1:] + ordered[:-1]) / 2, centres)]
    error = histogram.second - 2 * nearest * histogram.first + nearest**2 * histogram.weight
    return float(error.sum()) / histogram.total


def _best_of_coarse(sums: tuple[Tensor, Tensor, Tensor], count: int) -> Tensor:
    """Return the means of the best `count` runs of coarse bins (dynamic programming over the end of each run)."""
    weight, first, second = (part[:: BINS // COARSE] for part in sums)
    # cost[i, j]: error of one level for the bins i..j-1
    span_weight, span_first, span_second = (part[None, :] - part[:, None] for part in (weight, first, second))
    cost = span_second - torch.where(span_weight > 0, span_first**2 / span_weight.clamp(min=1e-300), 0.0)
    cost = cost.clamp(min=0.0).masked_fill(torch.ones_like(cost, dtype=torch.bool).tril(-1), float("inf"))
    best, choices = cost[0], []
    for _ in range(count - 1):
        best, choice = (best[:, None] + cost).min(0)
        choices.append(choice)
    ends = [COARSE]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    cuts = torch.tensor([0, *reversed(ends)])
    total, moment = weight[cuts[1:]] - weight[cuts[:-1]], first[cuts[1:]] - first[cuts[:-1]]
    centre = cuts[1:].double() * (2 / COARSE) - 1  # of a run without values: its end
    return torch.where(total > 0, moment / total.clamp(min=1e-300), centre).sort().values
