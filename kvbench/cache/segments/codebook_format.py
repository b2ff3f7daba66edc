"""KVQuant's format of a layer's keys or values, and the tables by which kernels look up its codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.quantizers import nuq


@dataclass(frozen=True)
class NuqFormat:
    """KVQuant's format for the keys or the values of a layer: a non-uniform codebook, and outliers in full precision.

    Args:
        bits: bits of a code: 2, 3 or 4.
        levels: codebook used for encoding, fp32 ``[2**bits]``.
        outliers: fraction of the elements that stay in full precision; 0 for none.
        thresholds: for keys, the upper and the lower threshold of each channel, over all heads, fp16 ``[2, C]``. None
            for values, each token of which is scaled by its own range.
        restored: codebook used for decoding if Q-Norm makes it differ from `levels`, fp32 ``[2**bits]``; else None.
        most: for keys, the largest number of outliers of a token above the upper thresholds, and also the largest
            number below the lower ones; None for no limit.
        heads: with tensor parallelism, the first KV head of this process and how many it has; None if it has all.
        gather: with tensor parallelism, a function that takes this process's channels ``[..., channels]`` and returns
            those of all processes, side by side. It is needed because the range of a value token spans all heads. Else
            None.
    """

    bits: int
    levels: Tensor
    outliers: float = 0.0
    thresholds: Tensor | None = None
    restored: Tensor | None = None
    most: int | None = None
    heads: tuple[int, int] | None = None
    gather: Callable[[Tensor], Tensor] | None = None


def lookup_tables(codebook: Tensor, thresholds: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tables of a format by which kernels look up codes.

    They are among those of :meth:`kvbench.cache.segments.codebook.NuqSegment.lookup`, which gives their shapes.

    Args:
        codebook: levels for encoding and, if they differ, for decoding, fp32 ``[B, 1 or 2, 2**bits]``.
        thresholds: upper and lower thresholds of keys, fp16 ``[B, 2, C]``; None for values.

    Returns:
        For keys the levels, ranges, offsets and stand-ins of outliers; for values the levels and the level of outliers.
    """
    with torch.inference_mode(False), torch.no_grad():
        levels = codebook[:, -1].contiguous()
        level = levels.gather(1, codebook[:, 0].abs().argmin(-1, keepdim=True))  # an outlier counts as 0
        if thresholds is None:
            return levels, level[:, 0].contiguous()
        scale, offset = nuq.key_params(thresholds)
        return levels, scale.half(), offset.half(), level * scale + offset
