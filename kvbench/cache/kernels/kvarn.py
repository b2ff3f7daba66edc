"""Balancing, quantizing and packing of KVarN's tiles in one launch: the host code (Triton kernels: ``kvarn_kernel``).

The kernels serve fp16 and bf16 tokens in heads of 64 and 128 channels, without clipping to quantiles. All else is
packed with torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import Form, Job, Packed, addresses, alone, programs
from kvbench.cache.kernels.reads import BALANCED, format_refusal
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.kvarn import KvarnQuantizer

KINDS = (BALANCED[0].kind,)
#: elements of a tile that a warp holds, and most warps: the largest tile spills with so few, but two programs then run
#: on a multiprocessor at once, which is 1.5 times as fast as one of 8 warps without spills (H200)
OF_A_WARP, WARPS = 2048, 4


def kernel_form(quantizer: AffineQuantizer, channels: int) -> Form | str | None:
    """Choose the compile-time parameters of the kernel that packs tiles as a quantizer does.

    Returns:
        The parameters; for KVarN's quantizer in a format that the kernel does not support, the reason as text; None for
        all other quantizers.
    """
    if not isinstance(quantizer, KvarnQuantizer):
        return None
    if quantizer.quantile:
        return "tiles that are clipped to quantiles"
    reason = format_refusal(BALANCED, KINDS[0], quantizer.bits, "channel", quantizer.tile, channels)
    if reason:
        return reason
    balance = "none" if quantizer.balance == "kvarn" and not quantizer.iterations else quantizer.balance
    warps = min(quantizer.tile * channels // OF_A_WARP, WARPS)
    return Form(
        KINDS[0],
        quantizer.bits,
        True,
        quantizer.tile,
        0,
        channels,
        1,
        warps,
        balance=balance,
        iterations=quantizer.iterations,
    )


def launch_pack(
    segment: Packed, how: Form, first_row: int, x: Tensor, start: int, count: int, index: Tensor | None
) -> None:
    """Quantize tiles and write them into a segment; the arguments are those of ``kvbench.cache.kernels.pack.pack``."""
    from kvbench.cache.kernels.kvarn_kernel import pack_balanced

    x = x if index is None else x.index_select(2, index)
    rows, heads = x.shape[:2]
    watch, tag = segment.watch or alone(x.device)
    with torch.cuda.device_of(x):
        pack_balanced[(rows * heads, programs(how, start, count)[2])](
            x,
            segment.words[0],
            segment.words[-1],
            *segment.params,
            watch.record,
            *x.stride()[:3],
            start,
            count,
            first_row,
            heads,
            segment.words[0].shape[2],
            tag,
            *kvarn_constants(how, segment),
            num_warps=how.warps,
        )


def pack_group(group: list[Job]) -> None:
    """Pack the tiles of several jobs with equal signatures in one launch."""
    from kvbench.cache.kernels.kvarn_kernel import pack_balanced_of_layers

    job = group[0]
    x, segment, how = job.x, job.segment, job.how
    assert segment.watch is not None
    rows, heads, count, _ = x.shape
    with torch.cuda.device_of(x):
        pack_balanced_of_layers[(rows * heads, programs(how, job.start, count)[2], len(group))](
            addresses(tuple(address_line(member) for member in group), x.device),
            x,
            segment.watch[0].record,
            x.storage_offset(),
            *x.stride()[:3],
            job.start,
            count,
            job.first_row,
            heads,
            segment.words[0].shape[2],
            *kvarn_constants(how, segment),
            num_warps=how.warps,
        )


def address_line(job: Job) -> tuple[int, ...]:
    """Return a job's line of the table of addresses: of tokens, words and parameters (A, Z, C); then the tag."""
    segment = job.segment
    assert segment.watch is not None
    buffers = (segment.words[0], segment.words[-1], *segment.params)
    return (job.x.untyped_storage().data_ptr(), *(buffer.data_ptr() for buffer in buffers), segment.watch[1])


def kvarn_constants(how: Form, segment: Packed) -> tuple[Any, ...]:
    """Return the values of a kernel's last arguments, from ``iterations`` to ``VALUE``, in their order."""
    return how.iterations, how.balance, how.bits, how.group, how.channels, segment.side == "value"
