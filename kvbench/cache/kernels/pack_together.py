"""Packing, and thinning of windows, for all layers of a cache in one launch instead of a launch per layer.

A window is thinned only after the tokens that are to be dropped from it have been packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import Deferred, Form, address_table, addresses
from kvbench.cache.kernels.jobs import Job as Job
from kvbench.cache.kernels.jobs import Packed as Packed
from kvbench.cache.kernels.reads import uncopied

#: True to run the kernel in Triton's interpreter on a CPU (tests)
INTERPRET = False
#: number of elements that a program copies at a time
ELEMENTS = 8192


@dataclass(frozen=True)
class Thin:
    """A deferred job: to drop every second one of a window's oldest tokens.

    Args:
        buffer: the window's buffer, ``[B, H, capacity, D]``.
        rows: rows of the batch, first and last + 1.
        start: index of the first token in the buffer.
        length: number of tokens in the window before it is thinned.
        count: number of tokens to drop: the second, the fourth, ... of the first ``2 * count``.
    """

    buffer: Tensor
    rows: tuple[int, int]
    start: int
    length: int
    count: int

    def signature(self) -> Hashable:
        """Return a key that is equal for two jobs exactly if they can share a launch."""
        buffer = self.buffer
        return (buffer.shape, buffer.dtype, buffer.device, self.rows, self.start, self.length, self.count)


def thin_windows(group: Sequence[Thin]) -> None:
    """Thin several windows; on a GPU in one launch, unless the kernel does not take their dtype.

    The jobs have equal signatures (:meth:`Thin.signature`).
    """
    job = group[0]
    if not (job.buffer.is_cuda or INTERPRET) or uncopied(job.buffer.dtype):
        for member in group:
            plainly(member)
        return
    from kvbench.cache.kernels.exact_kernels import thin_windows_kernel

    _, heads, room, channels = job.buffer.shape
    block = 1 << (channels - 1).bit_length()
    with torch.cuda.device_of(job.buffer):
        thin_windows_kernel[((job.rows[1] - job.rows[0]) * heads, len(group))](
            addresses(tuple(member.buffer.data_ptr() for member in group), job.buffer.device),
            job.buffer,
            job.rows[0],
            heads,
            room,
            job.start,
            job.length,
            job.count,
            channels,
            block,
            max(ELEMENTS // block, 1),
        )


def plainly(job: Thin) -> None:
    """Thin one window by torch's operations."""
    live = job.buffer[slice(*job.rows), :, job.start : job.start + job.length]
    live[:, :, : job.length - job.count] = live.index_select(2, remaining(job.count, job.length, live.device))


@lru_cache(maxsize=16)
def remaining(count: int, length: int, device: torch.device) -> Tensor:
    """Return the indices of the tokens of a window that stay: 0, 2, 4, ... below ``2 * count``, then all others."""
    with torch.inference_mode(False):  # cached, so it outlives the mode in which it is made
        indices = [*range(0, 2 * count, 2), *range(2 * count, length)]
        return torch.tensor(indices, dtype=torch.long, device=device)


def families() -> tuple[ModuleType, ...]:
    """Return the launchers of formats that have packing kernels of their own: inference engines', OSCAR's, KVarN's.

    Each has ``KINDS``, ``kernel_form``, ``launch_pack`` and ``pack_group``. The function imports them, because runs on
    a CPU never need them.
    """
    from kvbench.cache.kernels import clipped, engine, kvarn

    return engine, clipped, kvarn


def family(kind: str) -> ModuleType | None:
    """Return the module of :func:`families` that packs a kind of codes; None if ``pack_kernel`` packs it."""
    return next((module for module in families() if kind in module.KINDS), None)


@contextmanager
def packing_together(packs: Deferred[Job | Thin]) -> Iterator[None]:
    """Defer packing to the end of a ``with`` block, so that layers that pack tokens alike share a kernel launch.

    Within the block, nothing may read the packed tokens or overwrite the full-precision tokens that are to be packed.
    `packs` is the cache's queue (``Progress.packs``).
    """
    with packs.collecting() as jobs:
        yield
    carry_out_jobs(jobs)


def thin_after_packing(segment: Packed, job: Thin) -> None:
    """Thin a window: at once or, if the tokens last packed from it are still queued, after they have been packed."""
    jobs = None if segment.packs is None else segment.packs.jobs
    if jobs and isinstance(jobs[-1], Job) and jobs[-1].segment is segment:
        jobs.append(job)
    else:
        thin_windows([job])


def defer(segment: Packed, how: Form, first_row: int, x: Tensor, start: int) -> bool:
    """Queue tokens that are to be packed into a segment; return False if the caller must pack them at once.

    Nothing is queued outside a ``with`` block of :func:`packing_together`, if `x` is empty, or if the segment belongs
    to no cache or has no record of NaN and Inf. The arguments are those of :func:`kvbench.cache.kernels.pack.pack`.
    """
    if segment.packs is None or segment.packs.jobs is None or segment.watch is None or not x.numel():
        return False
    segment.packs.jobs.append(Job(segment, how, first_row, x, start))
    return True


def carry_out_jobs(jobs: Sequence[Job | Thin]) -> None:
    """Carry out all jobs; jobs with equal signatures (:meth:`Job.signature`) share a kernel launch.

    Jobs on one window keep their order: tokens queued for packing before the window is thinned are packed before it,
    and those queued after it are packed after it.
    """
    alike: dict[Hashable, list[Any]] = {}
    thinned: Counter[int] = Counter()
    for job in jobs:
        buffer = job.buffer if isinstance(job, Thin) else job.x
        window = buffer.untyped_storage().data_ptr()  # tokens that leave a window are a view of its buffer
        # in rounds: first what is packed from a window that has not been thinned, then its thinning, and so on
        alike.setdefault((thinned[window], isinstance(job, Thin), job.signature()), []).append(job)
        thinned[window] += isinstance(job, Thin)
    # by number of the round, and within a round packing (False) before thinning (True)
    for key in sorted(alike, key=lambda key: key[:2]):  # type: ignore[index]
        (thin_windows if isinstance(alike[key][0], Thin) else pack_alike)(alike[key])


def pack_alike(group: list[Job]) -> None:
    """Pack the tokens of several jobs with equal signatures (:meth:`Job.signature`) in one launch."""
    own = family(group[0].how.kind)
    if own is not None:
        own.pack_group(group)
        return
    from kvbench.cache.kernels.pack_layers import pack_layers

    job = group[0]
    how, grid, places = job.plan(unit=2)  # the kernel reads pairs of elements, and counts strides in pairs
    with torch.cuda.device_of(job.x):
        pack_layers[(*grid, len(group))](
            address_table(group),
            job.x,
            job.record(),
            job.x.storage_offset(),
            *places,
            job.segment.params[0].shape[2],
            how.kind,
            how.bits,
            how.by_channel,
            how.group,
            job.x.shape[-1],
            job.segment.side == "value",
            how.rows,
            how.channels,
            how.window,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )
