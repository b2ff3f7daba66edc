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
    """The fields of a packed segment (:class:`kvbench.cache.segments.packed.PackedSegment`) that kernels read."""

    dtype: torch.dtype
    quantizer: AffineQuantizer
    side: Side
    words: list[Tensor]
    params: list[Tensor]
    watch: tuple[Watch, int] | None
    packs: Deferred[Job] | None


@dataclass(frozen=True)
class Job:
    """Arguments of :func:`kvbench.cache.kernels.pack.pack`, and the tag of what is noted of the segment."""

    segment: Packed
    how: Form
    first_row: int
    x: Tensor
    start: int

    def signature(self) -> Hashable:
        """Return what jobs of one launch have in common."""
        x, segment = self.x, self.segment
        assert segment.watch is not None
        where = (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, self.start, self.first_row)
        return (self.how, where, segment.side, segment.words[0].shape, segment.params[0].shape, id(segment.watch[0]))

    def addresses(self) -> tuple[int, ...]:
        """Return a line of the table of :func:`kvbench.cache.kernels.pack_layers.pack_layers`."""
        segment = self.segment
        assert segment.watch is not None
        buffers = (segment.words[0], segment.words[-1], segment.params[0], segment.params[1])
        return (self.x.untyped_storage().data_ptr(), *(b.data_ptr() for b in buffers), segment.watch[1])


@contextmanager
def together(packs: Deferred[Job]) -> Iterator[None]:
    """Defer the packing of a cache's layers inside, and launch one kernel for each group of identical jobs at the end.

    Only where nothing inside reads what was packed or writes to where the tokens came from.
    """
    with packs.collecting() as jobs:
        yield
    launch(jobs)


def defer(segment: Packed, how: Form, first_row: int, x: Tensor, start: int) -> bool:
    """Return True if a job was deferred; a segment that belongs to no cache, or has no watch, packs at once."""
    if segment.packs is None or segment.packs.jobs is None or segment.watch is None or not x.numel():
        return False
    segment.packs.jobs.append(Job(segment, how, first_row, x, start))
    return True


def launch(jobs: list[Job]) -> None:
    """Pack `jobs`, one launch for each signature."""
    alike: dict[Hashable, list[Job]] = {}
    for job in jobs:
        alike.setdefault(job.signature(), []).append(job)
    for group in alike.values():
        run(group)


def run(group: list[Job]) -> None:
    """Launch one kernel for jobs of one signature."""
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
