"""Fitting of thresholds, codebooks and Q-Norm of one layer to its keys and values on a text.

Source: KVQuant (Hooper et al. 2024), sec. 3. The steps are those of SqueezeAILab/KVQuant,
quant/kvquant/simquant_module_quantizer.py: the thresholds are percentiles, elements are normalised by them into
[-1, 1], outliers are left out, and weighted k-means runs over all channels of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.calibration.kmeans import Histogram, levels
from kvbench.quantizers.nuq import ELEMENTS, tail


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

    There are no thresholds to fit, because at run time each token again gets its own.

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
