"""Fitting of thresholds, codebooks and Q-Norm of one layer to its keys and values on a text.

Codebooks are fitted by weighted k-means in one dimension, without random numbers.

KVQuant (Hooper et al. 2024, sec. 3, nuqX) minimises ``sum_i F_i (x_i - Q(x_i))**2`` with the Fisher information F_i
as weight; its code uses scikit-learn's KMeans with a random start. Here the values, all in [-1, 1], are counted in two
histograms. Dynamic programming finds the best codebook for the coarse one, and Lloyd's iterations refine it on the fine
one.

Source: KVQuant (Hooper et al. 2024), sec. 3. The steps are those of SqueezeAILab/KVQuant,
quant/kvquant/simquant_module_quantizer.py: the thresholds are percentiles, elements are normalised by them into
[-1, 1], outliers are left out, and weighted k-means runs over all channels of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.quantizers.nuq import ELEMENTS, tail

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
    """Divide the coarse bins into the `count` runs with the least squared error, and return the mean of each run."""
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


@dataclass
class Codebook:
    """A codebook for one code size, fitted to elements that have been normalised to [-1, 1].

    Args:
        levels: the values that codes stand for, fp32 ``[2**bits]``, ascending.
        norm: Q-Norm's scale and offset for the levels, with which the dequantized elements have the mean and the
            standard deviation of the original ones.
    """

    levels: Tensor
    norm: tuple[float, float]


@dataclass
class SideFit:
    """Parameters fitted to the keys or to the values of a layer.

    Args:
        thresholds: upper and lower outlier threshold of each key channel, fp16 ``[2, C]``; None for values.
        codebooks: for each number of bits per code, the codebook.
    """

    thresholds: Tensor | None
    codebooks: dict[int, Codebook]


def fit_keys(
    x: Tensor, weights: Tensor | None, bits: Sequence[int], share: float, skip: Tensor | None = None
) -> SideFit:
    """Fit KVQuant to the keys of a layer: outlier thresholds for each channel, and codebooks for all channels together.

    Args:
        x: keys of N tokens before RoPE, fp32 ``[N, C]``.
        weights: weight of the quantization error of each element, ``[N, C]``; None for equal weights.
        share: fraction of the elements that are outliers, half of them above the upper threshold and half below the
            lower one. With 0 there are no outliers, and the thresholds are the minimum and the maximum.
        skip: bool ``[N]``, True for tokens that the codebooks are not fitted to; None to use all tokens.
    """
    upper, lower = quantiles(x, tail(share), 0), quantiles(x, 1 - tail(share), 0)
    books = _codebooks(x, (upper - lower) / 2, (upper + lower) / 2, weights, bits, skip)
    return SideFit(torch.stack([upper, lower]).clamp(-65504.0, 65504.0).half(), books)


def fit_values(
    x: Tensor, weights: Tensor | None, bits: Sequence[int], share: float, skip: Tensor | None = None
) -> SideFit:
    """Fit KVQuant's codebooks to the values of a layer, each token normalised by the quantiles of its own elements.

    There are no thresholds to fit, because each token gets its own at run time.

    Args:
        x: values of N tokens, fp32 ``[N, C]``.
        share: fraction of the elements of each token that are outliers; the other arguments are those of
            :func:`fit_keys`.
    """
    upper, lower = (quantiles(x, q, 1).unsqueeze(1) for q in (tail(share), 1 - tail(share)))
    return SideFit(None, _codebooks(x, (upper - lower) / 2, (upper + lower) / 2, weights, bits, skip))


def quantiles(x: Tensor, q: float, dim: int) -> Tensor:
    """Return a quantile of ``[N, C]`` along `dim`, for matrices too large for ``torch.quantile``."""
    rows = x.t() if dim == 0 else x
    step = max(ELEMENTS // rows.shape[1], 1)
    return torch.cat([torch.quantile(rows[i : i + step], q, dim=1) for i in range(0, len(rows), step)])


def _codebooks(
    x: Tensor, scale: Tensor, offset: Tensor, weights: Tensor | None, bits: Sequence[int], skip: Tensor | None
) -> dict[int, Codebook]:
    weighted, plain = Histogram.empty(), Histogram.empty()
    if weights is not None and not bool((weights > 0).any()):
        weights = None
    step = max(ELEMENTS // x.shape[1], 1)
    for i in range(0, len(x), step):
        part = slice(i, i + step)
        rows = scale.shape[0] == len(x) and scale.ndim == 2  # values: one scale per token
        by, base = (scale[part], offset[part]) if rows else (scale, offset)
        z = (x[part] - base) / torch.where(by == 0, 1.0, by)
        counted = z.abs() <= 1
        if skip is not None:
            counted &= ~skip[part, None]
        plain.add(z[counted])
        weighted.add(z[counted], None if weights is None else weights[part][counted])
    codebooks = {}
    for width in bits:
        book = levels(weighted, 1 << width)
        codebooks[width] = Codebook(book, _norm(plain, book))
    return codebooks


def _norm(plain: Histogram, book: Tensor) -> tuple[float, float]:
    """Return the scale and offset that give the quantized values the mean and deviation of the original ones."""
    if not plain.total:
        return 1.0, 0.0
    mean, deviation = plain.moments()
    ordered = book.double()
    occupied = plain.weight > 0
    at = plain.first[occupied] / plain.weight[occupied]
    nearest = ordered[torch.searchsorted((ordered[1:] + ordered[:-1]) / 2, at)]
    weight = plain.weight[occupied] / plain.total
    own_mean = float((weight * nearest).sum())
    own_deviation = float((weight * (nearest - own_mean) ** 2).sum()) ** 0.5
    scale = deviation / own_deviation if own_deviation > 0 else 1.0
    return scale, mean - own_mean * scale
