"""Packing of clipped tokens in 2 bits (OSCAR): the host code (Triton kernels: ``clipped_kernel``).

The kernels serve fp16 and bf16 tokens, codes of 2 bits by a token's range (``levels=uniform``), parameters in fp16, and
heads whose size is a power of two. All else is packed with torch operations, with the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.cache.kernels.forms import Form, programs
from kvbench.cache.kernels.jobs import Job, Packed, alone
from kvbench.cache.kernels.tables import addresses
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.oscar import OscarQuantizer

KIND = "clipped"
#: word rows of a tile that a program processes, and its warps
ROWS, WARPS = 8, 4


def form(quantizer: AffineQuantizer, channels: int) -> Form | None:
    """Return the compile-time parameters of the kernel that packs tokens as a quantizer does; None if there is none.

    Args:
        quantizer: any quantizer of a packed segment.
        channels: channels of a head.
    """
    if not isinstance(quantizer, OscarQuantizer) or quantizer.lloyd_max:
        return None
    if quantizer.bits != 2 or quantizer.scales != "fp16" or not 16 <= channels <= 256 or channels & (channels - 1):
        return None
    rank = int(quantizer.clip * channels) if quantizer.clip < 1 else channels
    return Form(KIND, 2, False, channels, ROWS, channels, 16 // ROWS, WARPS, rank=rank)


def launch(segment: Packed, how: Form, first_row: int, x: Tensor, start: int, count: int, index: Tensor | None) -> None:
    """Quantize tokens and write them into a segment; the arguments are those of ``kvbench.cache.kernels.pack.pack``."""
    from kvbench.cache.kernels.clipped_kernel import pack_tokens

    rows, heads, _, channels = x.shape
    watch, tag = segment.watch or alone(x.device)
    how, first, parts = programs(how, start, count)
    with torch.cuda.device_of(x):
        pack_tokens[(rows * heads, parts)](
            x,
            x if index is None else index,
            segment.words[0],
            *segment.params,
            watch.record,
            *x.stride()[:3],
            start,
            count,
            first_row,
            first,
            heads,
            segment.words[0].shape[2],
            tag,
            how.rank,
            channels,
            segment.side == "value",
            how.rows,
            index is not None,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )


def run(group: list[Job]) -> None:
    """Pack the tokens of several jobs with equal signatures in one launch."""
    from kvbench.cache.kernels.clipped_kernel import pack_tokens_of_layers

    job = group[0]
    x, segment = job.x, job.segment
    assert segment.watch is not None
    rows, heads, count, channels = x.shape
    how, first, parts = programs(job.how, job.start, count)
    with torch.cuda.device_of(x):
        pack_tokens_of_layers[(rows * heads, parts, len(group))](
            addresses(tuple(member.addresses() for member in group), x.device),
            x,
            segment.watch[0].record,
            x.storage_offset(),
            *x.stride()[:3],
            job.start,
            count,
            job.first_row,
            first,
            heads,
            segment.words[0].shape[2],
            how.rank,
            channels,
            segment.side == "value",
            how.rows,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )
