"""Balancing, quantizing and packing of KVarN's tiles in one launch: the host code (Triton kernel: ``kvarn_kernel``).

The kernel serves fp16 and bf16 tokens on CUDA devices of compute capability 8.0 or newer, in heads of 64 and 128
channels, without clipping to quantiles. Other tokens are packed with torch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.cache.kernels import pack as affine
from kvbench.cache.kernels.pack_together import Packed
from kvbench.quantizers.kvarn import KvarnQuantizer

#: channels of a head that the kernel serves
HEAD_DIMS = (64, 128)


def served(segment: Packed, x: Tensor) -> bool:
    """Return True if the kernel, rather than torch operations, packs given tokens into a segment.

    Args:
        segment: segment that is to store the tokens.
        x: the tokens, ``[rows, H, n, D]``.
    """
    quantizer = segment.quantizer
    if not isinstance(quantizer, KvarnQuantizer) or quantizer.quantile:
        return False
    runs = affine.compiled(x.device) or (affine.INTERPRET and affine._interpreted())
    shape = x.shape[-1] in HEAD_DIMS and quantizer.tile in (64, 128) and x.stride(-1) == 1
    return runs and shape and x.dtype in (torch.float16, torch.bfloat16)


def pack(segment: Packed, first_row: int, x: Tensor, start: int) -> None:
    """Quantize whole tiles and write their codes and parameters into a segment's buffers, which must have room.

    Args:
        segment: segment that stores the tokens, for which :func:`served` has returned True.
        first_row: row of the batch, in the segment, to which row 0 of `x` belongs.
        x: tokens in full precision, ``[rows, H, n, D]``; n is a multiple of the tile.
        start: index of the first token to write within the segment, a multiple of the tile.

    Raises:
        NonFiniteError: a token contains NaN or Inf, and the segment belongs to no cache. (In a cache, the error is
            raised later: :mod:`kvbench.cache.watch`.)
    """
    from kvbench.cache.kernels.kvarn_kernel import pack_balanced

    quantizer = segment.quantizer
    assert isinstance(quantizer, KvarnQuantizer)
    rows, heads, count, channels = x.shape
    if not x.numel():
        return
    watch, tag = segment.watch or affine.alone(x.device)
    with torch.cuda.device_of(x):
        pack_balanced[(rows * heads, count // quantizer.tile)](
            x,
            segment.words[0],
            segment.words[-1],
            *segment.params,
            watch.record,
            *x.stride()[:3],
            start,
            first_row,
            heads,
            segment.words[0].shape[2],
            tag,
            quantizer.iterations,
            quantizer.balance if quantizer.iterations or quantizer.balance == "norm" else "none",
            quantizer.bits,
            quantizer.tile,
            channels,
            segment.side == "value",
            num_warps=quantizer.tile * channels // 2048,
        )
    if segment.watch is None:
        watch.check()
