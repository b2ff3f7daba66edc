"""Quantizing one new token per row to non-uniform levels (KVQuant), entirely on the device.

An eager step quantizes by torch (:class:`kvbench.cache.segments.codebook.NuqSegment`), which waits for the number of
outliers. A captured step calls :func:`pack_nuq_tokens`, which stores the same bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache.kernels.reads import HALVES, LOOKED_UP, format_refusal
from kvbench.quantizers.nuq import tail

if TYPE_CHECKING:
    from kvbench.cache.segments.codebook import NuqSegment

#: warps of a program, which takes a whole token
WARPS = 16
#: number of older outliers that are moved at a time
ENTRIES = 512


def nuq_refusal(keys: NuqSegment, values: NuqSegment) -> str | None:
    """Return why the kernel cannot quantize tokens for two segments, or None if it can."""
    for segment in (keys, values):
        if segment.gather is not None:
            return "the heads of a token are divided between processes"
        if segment.most is not None:
            return "the number of outliers of a token is limited"
        if segment.dtype not in HALVES:
            return f"tokens are {str(segment.dtype).removeprefix('torch.')}"
        axis = "token" if segment.thresholds is None else "channel"
        reason = format_refusal(LOOKED_UP, "codebook", segment.bits, axis, 0, segment.channels)
        if reason:
            return reason
    if bool(keys.share) != bool(values.share) or keys.bits != values.bits:
        return "keys and values of different formats"
    return None


def rank(share: float, width: int, *, high: bool) -> tuple[int, float]:
    """Return the rank at which ``torch.quantile`` reads a threshold of outliers, and the weight of the next rank.

    `share` is the share of a token's `width` elements that are outliers; `high` is True for the largest, False for the
    smallest elements.
    """
    quantile = torch.tensor(tail(share) if high else 1 - tail(share), dtype=torch.float32)
    # in fp32, as torch.quantile does: in fp64 the rank may be another one
    position = quantile * (width - 1)
    return int(position.floor()), float(position - position.floor())


def pack_nuq_tokens(keys: NuqSegment, values: NuqSegment, key: Tensor, value: Tensor, places: Tensor) -> None:
    """See :func:`kvbench.cache.kernels.at_once.pack_new_tokens`."""
    from kvbench.cache.kernels.nuq_kernel import quantize_token

    key = key if key.stride(-1) == 1 else key.contiguous()
    value = value if value.stride(-1) == 1 else value.contiguous()
    _, scale, offset, _ = keys.lookup()
    assert keys.thresholds is not None
    low, low_weight = rank(values.share, values.width, high=False)
    high, high_weight = rank(values.share, values.width, high=True)
    sparse = [(s.exact.values, s.exact.indices, s.exact.table) if s.exact else () for s in (keys, values)]
    record = values.watch[0].record if values.watch is not None else places
    heads = 1 << math.ceil(math.log2(keys.heads))
    with torch.cuda.device_of(key):
        quantize_token[(len(places), 2)](
            key,
            value,
            places,
            tuple(keys.words),
            tuple(values.words),
            keys.codebook,
            values.codebook,
            scale,
            offset,
            keys.thresholds,
            values.params[0],
            values.params[1],
            *sparse,
            record,
            keys.watch[1] if keys.watch is not None else 0,
            values.watch[1] if values.watch is not None else 0,
            (*key.stride()[:2], *value.stride()[:2]),
            keys.heads,
            keys.tiles,
            values.tiles,
            *(s[0].shape[1] if s else 0 for s in sparse),
            *(s[2].shape[1] if s else 0 for s in sparse),
            low,
            high,
            low_weight,
            high_weight,
            keys.bits,
            values.bits,
            keys.codebook.shape[1],
            keys.channels,
            values.channels,
            heads,
            bool(keys.share),
            values.watch is not None,
            keys.exact.block if keys.exact else 1,
            values.exact.block if values.exact else 1,
            ENTRIES,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
