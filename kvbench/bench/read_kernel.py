"""A Triton kernel that only reads memory, to measure the bandwidth of reads."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_kernel(x, sink, count, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Reduce a buffer by OR; the result is stored only if it has one value that never occurs, so nothing is written."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    bits = tl.zeros((BLOCK,), tl.int32)
    place = tl.arange(0, BLOCK)
    for first in range(program * BLOCK * UNROLL, count, programs * BLOCK * UNROLL):
        for i in tl.static_range(UNROLL):
            bits |= tl.load(x + first + i * BLOCK + place)
    if tl.max(bits, 0) == 0x7F123456:
        tl.store(sink + tl.program_id(0), 1)


def read_buffer(x: Tensor, sink: Tensor) -> None:
    """Read every element of a buffer and discard it, to measure the bandwidth.

    Args:
        x: int32; its number of elements must be a multiple of 8192.
        sink: int32 buffer with an element for each program (at most 8 per multiprocessor). In practice nothing is
            written to it, but because a write is possible, the compiler cannot remove the reads.
    """
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(x.numel() // 8192, processors * 8)
    _read_kernel[(programs,)](x, sink, x.numel(), 2048, 4, num_warps=8)
