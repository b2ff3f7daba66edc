"""KVQuant's non-uniform quantization: a codebook of 2**bits levels in [-1, 1], a range and an offset, and outliers.

Source: Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization" (NeurIPS
2024), sec. 3, and SqueezeAILab/KVQuant, quant/kvquant/simquant_module_quantizer.py::

    x^ = level[argmin |(x - offset) / range - level|] * range + offset,   range = (high - low) / 2,  offset = their mean

Keys have one range and offset per channel, from thresholds calibrated offline: percentiles of the channel. Values have
one range and one offset per token, over all heads, from the largest and the smallest element that is not an outlier.
Outliers are elements of keys beyond the thresholds, and the largest and smallest elements of each token of values. They
are stored in full precision, in addition to the codes. Of two equally near levels, the one that comes first in the
codebook is used; the codebook need not be sorted. All arithmetic is fp32; the thresholds of keys are fp16, and so are
the range and the offset computed from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError
from kvbench.quantizers.affine import FP16_MAX, first_non_finite

#: elements passed to torch.quantile at a time (it refuses more than 2**24)
ELEMENTS = 1 << 23


def tail(share: float) -> float:
    """Return the quantile above which elements are outliers, if outliers are a share of all: 0.995 for 0.01.

    The share counts the outliers of both ends: elements below one minus the result are outliers too.
    """
    return 1 - share / 2


def key_params(thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the range (half the spread) and the offset (midpoint) that normalize each channel of keys to [-1, 1].

    Args:
        thresholds: upper and lower threshold of each channel, in this order, ``[..., 2, C]``, fp16.

    Returns:
        The range, ``(upper - lower) / 2``, and the offset, ``(upper + lower) / 2``: two fp32 tensors ``[..., C]`` whose
        elements are rounded to fp16.
    """
    upper, lower = thresholds.float().unbind(-2)
    return ((upper - lower) / 2).half().float(), ((upper + lower) / 2).half().float()


def key_outliers(x: Tensor, thresholds: Tensor, most: int | None = None) -> Tensor:
    """Return a mask of the outliers among keys, fp32 ``[..., n, C]``: elements outside the thresholds of their channel.

    Args:
        thresholds: as for :func:`key_params`.
        most: largest number of outliers of a token above the upper thresholds, and also below the lower ones. If there
            are more, only the elements farthest outside count, after each channel is normalized by its range and offset
            (:func:`key_params`; the authors' ``cap_outliers``). None: no limit.
    """
    upper, lower = thresholds.float().unsqueeze(-3).unbind(-2)
    mask = (x < lower) | (x > upper)
    if most is None or not mask.any():
        return mask
    distance = torch.where(mask, (x - (upper + lower) / 2) / ((upper - lower) / 2), 0.0)
    farthest = torch.zeros_like(mask)
    for largest in (True, False):
        farthest.scatter_(-1, distance.topk(min(most, x.shape[-1]), dim=-1, largest=largest).indices, True)
    return mask & farthest


def value_outliers(x: Tensor, share: float) -> Tensor:
    """Return a mask of the outliers among values: the largest and the smallest elements of each token.

    Args:
        x: fp32 ``[..., n, C]``, where C counts the channels of all heads.
        share: fraction of the elements of a token that are outliers, half of them at each end.
    """
    flat = x.reshape(-1, x.shape[-1])
    step = max(ELEMENTS // flat.shape[-1], 1)
    parts = []
    for first in range(0, len(flat), step):
        part = flat[first : first + step]
        ends = torch.stack([part.new_full((), share_) for share_ in (1 - tail(share), tail(share))])
        low, high = torch.quantile(part, ends, dim=-1, keepdim=True)  # together: it sorts the elements
        parts.append((part <= low) | (part >= high))
    return torch.cat(parts).view(x.shape) if parts else torch.zeros_like(x, dtype=torch.bool)


def value_params(x: Tensor, outliers: Tensor | None, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the range (half the spread) and the offset (midpoint) that normalize each token of values to [-1, 1].

    Outliers do not count.

    Returns:
        The range, ``(largest - smallest) / 2``, and the offset, ``(largest + smallest) / 2``: two tensors ``[..., n]``.
    """
    if outliers is not None:  # an outlier counts as the token's median, so that a token of outliers alone has an offset
        x = torch.where(outliers, x.median(-1, keepdim=True).values, x)
    low, high = torch.aminmax(x, dim=-1)
    params = ((high - low) / 2, (high + low) / 2)
    if store == torch.float16:
        return params[0].clamp(max=FP16_MAX).half(), params[1].clamp(-FP16_MAX, FP16_MAX).half()
    return params[0].to(store), params[1].to(store)


def encode_nuq(x: Tensor, scale: Tensor, offset: Tensor, levels: Tensor, outliers: Tensor | None) -> Tensor:
    """Quantize keys or values, fp32 ``[..., n, C]``, to the nearest level of a codebook; the codes are uint8.

    An element is first normalized: ``(x - offset) / scale``. An outlier, whose exact value is stored apart, is encoded
    as if it were equal to the offset.

    Args:
        scale: the range, fp32: of each channel for keys (:func:`key_params`), of each token for values
            (:func:`value_params`). Must broadcast over `x`. 0 means that all elements equal the offset.
        offset: the offset of each channel or token, likewise.
    """
    x = x - offset
    if outliers is not None:
        x = torch.where(outliers, 0.0, x)
    x = x / torch.where(scale == 0, 1.0, scale)
    best = (x - levels[0]).abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    distance, nearer = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    for code in range(1, len(levels)):  # in place: on a CPU, new memory costs more than the arithmetic
        torch.sub(x, levels[code], out=distance).abs_()
        codes.masked_fill_(torch.lt(distance, best, out=nearer), code)
        torch.minimum(best, distance, out=best)
    return codes


def decode_nuq(codes: Tensor, scale: Tensor, offset: Tensor, levels: Tensor) -> Tensor:
    """Dequantize codes: ``levels[code] * scale + offset``, fp32 ``[..., n, C]``; see :func:`encode_nuq`.

    Outliers are not restored.
    """
    return levels[codes.to(torch.int32)] * scale + offset


def check_finite(x: Tensor) -> None:
    """Raise NonFiniteError if `x` contains NaN or Inf."""
    if not torch.isfinite(x).all():
        raise NonFiniteError(f"a tensor to be quantized contains NaN or Inf at index {first_non_finite(x)}")
