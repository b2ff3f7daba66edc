"""Packing of clipped tokens in 2 bits (OSCAR): the host code (Triton kernels: ``clipped_kernel``).

The kernels serve fp16 and bf16 tokens, 2-bit codes with evenly spaced levels (``levels=uniform``), parameters in fp16,
and heads whose size is a power of two. All else is packed with torch operations, with the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import Form, Job, Packed, address_table, alone, plan
from kvbench.cache.kernels.reads import CLIPPED, format_refusal
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.oscar import OscarQuantizer

KINDS = (CLIPPED[0].kind,)
#: word rows of a tile that a program processes, and its warps
ROWS, WARPS = 8, 4


def kernel_form(quantizer: AffineQuantizer, channels: int) -> Form | str | None:
    """Choose the compile-time parameters of the kernel that packs tokens as a quantizer does.

    Returns:
        The parameters; for OSCAR's quantizer in a format that the kernel does not support, the reason as text; None for
        all other quantizers.
    """
    if not isinstance(quantizer, OscarQuantizer):
        return None
    if quantizer.lloyd_max:
        return "codes by edges for a Gaussian"
    reason = format_refusal(CLIPPED, KINDS[0], quantizer.bits, "token", channels, channels, quantizer.scales)
    if reason:
        return reason
    rank = int(quantizer.clip * channels) if quantizer.clip < 1 else channels
    return Form(KINDS[0], 2, False, channels, ROWS, channels, 16 // ROWS, WARPS, rank=rank)


def launch_pack(
    segment: Packed, how: Form, first_row: int, x: Tensor, start: int, count: int, index: Tensor | None
) -> None:
    """Quantize tokens and write them into a segment; the arguments are those of ``kvbench.cache.kernels.pack.pack``."""
    from kvbench.cache.kernels.clipped_kernel import pack_clipped_tokens

    watch, tag = segment.watch or alone(x.device)
    how, grid, places = plan(segment, how, first_row, x, start, count)
    with torch.cuda.device_of(x):
        pack_clipped_tokens[grid](
            x,
            x if index is None else index,
            segment.words[0],
            *segment.params,
            watch.record,
            *places,
            tag,
            how.rank,
            x.shape[-1],
            segment.side == "value",
            how.rows,
            index is not None,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )


def pack_group(group: list[Job]) -> None:
    """Pack the tokens of several jobs with equal signatures in one launch."""
    from kvbench.cache.kernels.clipped_kernel import pack_clipped_layers

    job = group[0]
    how, grid, places = job.plan()
    with torch.cuda.device_of(job.x):
        pack_clipped_layers[(*grid, len(group))](
            address_table(group),
            job.x,
            job.record(),
            job.x.storage_offset(),
            *places,
            how.rank,
            job.x.shape[-1],
            job.segment.side == "value",
            how.rows,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )
