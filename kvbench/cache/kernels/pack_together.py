"""Packing for all layers of a cache in one launch, so that values leaving a window do not cost a launch per layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.kernels.deferred import Deferred
from kvbench.cache.kernels.forms import Form, programs
from kvbench.cache.kernels.tables import addresses
from kvbench.cache.segments.base import Side
from kvbench.cache.watch import Watch
from kvbench.quantizers.affine import AffineQuantizer


class Packed(Protocol):
    """Interface of a packed segment for the code that launches packing kernels.

    :class:`kvbench.cache.segments.packed.PackedSegment` implements it.
    """

    dtype: torch.dtype
    quantizer: AffineQuantizer
    side: Side
    words: list[Tensor]
    params: list[Tensor]
    watch: tuple[Watch, int] | None
    packs: Deferred[Job] | None


@dataclass(frozen=True)
class Job:
    """Tokens that wait to be packed into a segment: the arguments of a call of ``kvbench.cache.kernels.pack.pack``.

    Args:
        segment: segment that stores the tokens.
        how: compile-time parameters of the kernel.
        first_row: row of the batch, in the segment, to which row 0 of `x` belongs.
        x: tokens in full precision, ``[rows, H, n, D]``.
        start: index of the first token to write within the segment.
    """

    segment: Packed
    how: Form
    first_row: int
    x: Tensor
    start: int

    def signature(self) -> Hashable:
        """Return a key that is equal for two jobs exactly if they can share a launch."""
        x, segment = self.x, self.segment
        assert segment.watch is not None
        where = (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, self.start, self.first_row)
        return (self.how, where, segment.side, segment.words[0].shape, segment.params[0].shape, id(segment.watch[0]))

    def addresses(self) -> tuple[int, ...]:
        """Return the job's buffer addresses and its segment's tag, as ``pack_layers`` expects them in its table."""
        segment = self.segment
        assert segment.watch is not None
        buffers = (segment.words[0], segment.words[-1], segment.params[0], segment.params[1])
        return (self.x.untyped_storage().data_ptr(), *(b.data_ptr() for b in buffers), segment.watch[1])


@contextmanager
def together(packs: Deferred[Job]) -> Iterator[None]:
    """Defer packing to the end of a ``with`` block, so that layers that pack tokens alike share a kernel launch.

    Within the block, nothing may read the packed tokens or overwrite the full-precision tokens that are to be packed.

    Args:
        packs: the cache's queue of packing jobs (``Progress.packs``).
    """
    with packs.collecting() as jobs:
        yield
    launch(jobs)


def defer(segment: Packed, how: Form, first_row: int, x: Tensor, start: int) -> bool:
    """Queue tokens that are to be packed into a segment, if this is possible.

    Nothing is queued outside a ``with`` block of :func:`together`, if `x` is empty, or if the segment belongs to no
    cache or has no record of NaN and Inf.

    Args:
        segment: segment that stores the tokens.
        how: compile-time parameters of the kernel.
        first_row: row of the batch, in the segment, to which row 0 of `x` belongs.
        x: tokens in full precision, ``[rows, H, n, D]``.
        start: index of the first token to write within the segment.

    Returns:
        True if the tokens are queued, False if the caller must pack them now.
    """
    if segment.packs is None or segment.packs.jobs is None or segment.watch is None or not x.numel():
        return False
    segment.packs.jobs.append(Job(segment, how, first_row, x, start))
    return True


def launch(jobs: list[Job]) -> None:
    """Pack the tokens of all jobs, with one kernel launch for all jobs of equal :meth:`Job.signature`."""
    alike: dict[Hashable, list[Job]] = {}
    for job in jobs:
        alike.setdefault(job.signature(), []).append(job)
    for group in alike.values():
        run(group)


def run(group: list[Job]) -> None:
    """Pack the tokens of several jobs in one launch.

    Args:
        group: jobs with equal signatures (:meth:`Job.signature`).
    """
    from kvbench.cache.kernels.pack_layers import pack_layers

    job = group[0]
    x, segment = job.x, job.segment
    assert segment.watch is not None
    rows, heads, count, channels = x.shape
    how, first, parts = programs(job.how, job.start, count)
    with torch.cuda.device_of(x):
        pack_layers[(rows * heads, parts, len(group))](
            addresses(tuple(member.addresses() for member in group), x.device),
            x,
            segment.watch[0].record,
            x.storage_offset(),
            *(stride // 2 for stride in x.stride()[:3]),
            job.start,
            count,
            job.first_row,
            first,
            heads,
            segment.words[0].shape[2],
            segment.params[0].shape[2],
            how.kind,
            how.bits,
            how.by_channel,
            how.group,
            channels,
            segment.side == "value",
            how.rows,
            how.channels,
            how.window,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )
