"""What the layers of a cache pack in one step, in one launch: values that leave a window cost no launch a layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache.kernels.tables import addresses

if TYPE_CHECKING:
    from kvbench.cache.kernels.pack import Form
    from kvbench.cache.segments.packed import PackedSegment


@dataclass(frozen=True)
class Job:
    """Arguments of :func:`kvbench.cache.kernels.pack.pack`, and the tag of what is noted of the segment."""

    segment: PackedSegment
    how: Form
    first_row: int
    x: Tensor
    start: int

    def signature(self) -> Hashable:
        """Jobs of one signature go into one launch."""
        x, held = self.x, self.segment
        assert held.watch is not None
        where = (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, self.start, self.first_row)
        return (self.how, where, held.side, held.words[0].shape, held.params[0].shape, id(held.watch[0]))

    def addresses(self) -> tuple[int, ...]:
        """A line of the table of :func:`kvbench.cache.kernels.pack_layers.pack_layers`."""
        held = self.segment
        assert held.watch is not None
        buffers = (held.words[0], held.words[-1], held.params[0], held.params[1])
        return (self.x.untyped_storage().data_ptr(), *(b.data_ptr() for b in buffers), held.watch[1])


_collecting: list[list[Job]] = []


@contextmanager
def together() -> Iterator[None]:
    """Put off what is packed inside, and do it at the end, the same of all layers in one launch.

    Only where nothing inside reads what was packed or writes to where the tokens came from.
    """
    jobs: list[Job] = []
    _collecting.append(jobs)
    try:
        yield
    finally:
        _collecting.pop()
    launch(jobs)


def collected(segment: PackedSegment, how: Form, first_row: int, x: Tensor, start: int) -> bool:
    """Whether a job was put off; those of segments without a watch of their own are not."""
    if not _collecting or segment.watch is None or not x.numel():
        return False
    _collecting[-1].append(Job(segment, how, first_row, x, start))
    return True


def launch(jobs: list[Job]) -> None:
    """Pack `jobs`, one launch for each signature."""
    alike: dict[Hashable, list[Job]] = {}
    for job in jobs:
        alike.setdefault(job.signature(), []).append(job)
    for group in alike.values():
        run(group)


def run(group: list[Job]) -> None:
    """One launch for jobs of one signature."""
    from kvbench.cache.kernels.pack import programs
    from kvbench.cache.kernels.pack_layers import pack_layers

    job = group[0]
    x, held = job.x, job.segment
    assert held.watch is not None
    rows, heads, count, channels = x.shape
    how, first, parts = programs(job.how, job.start, count)
    with torch.cuda.device_of(x):
        pack_layers[(rows * heads, parts, len(group))](
            addresses(tuple(each.addresses() for each in group), x.device),
            x,
            held.watch[0].record,
            x.storage_offset(),
            *(stride // 2 for stride in x.stride()[:3]),
            job.start,
            count,
            job.first_row,
            first,
            heads,
            held.words[0].shape[2],
            held.params[0].shape[2],
            how.kind,
            how.bits,
            how.by_channel,
            how.group,
            channels,
            held.side == "value",
            how.rows,
            how.channels,
            how.window,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )
