"""Parts shared by the launchers of packing kernels: segments as kernels see them, jobs, grids, a record of NaN."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.cache.kernels.deferred import Deferred
from kvbench.cache.kernels.forms import Form, programs
from kvbench.cache.segments.base import Side
from kvbench.cache.watch import Watch, uncached_message
from kvbench.quantizers.affine import AffineQuantizer


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers, a list that may be nested, to a device without making the host wait until the copy has finished."""
    with torch.inference_mode(False):
        on_host = torch.tensor(numbers, dtype=dtype)
        return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


@lru_cache(maxsize=1024)
def addresses(numbers: tuple[object, ...], device: torch.device) -> Tensor:
    """Return buffer addresses as an int64 tensor on a device; equal arguments return the same, cached tensor.

    `numbers` are addresses and other integers, a tuple that may be nested.
    """
    return upload(numbers, torch.int64, device)


class Packed(Protocol):
    """Interface of a packed segment for the code that launches packing kernels.

    :class:`kvbench.cache.segments.packed.PackedSegment` implements it.
    """

    dtype: torch.dtype
    quantizer: AffineQuantizer
    side: Side
    words: list[Tensor]
    params: list[Tensor]
    heads: int
    channels: int
    tiles: int
    watch: tuple[Watch, int] | None
    packs: Deferred[Any] | None


class Plan(NamedTuple):
    """Grid of a kernel that packs consecutive tokens, and the arguments that all such kernels have in common.

    Attributes:
        how: compile-time parameters of the kernel.
        grid: number of programs: rows times KV heads, and parts of tiles.
        places: strides of `x` for rows, heads and tokens; index of the first token, and number of tokens; first row;
            programs to skip; KV heads; tiles of the segment.
    """

    how: Form
    grid: tuple[int, int]
    places: tuple[int, ...]


def plan(segment: Packed, how: Form, first_row: int, x: Tensor, start: int, count: int, unit: int = 1) -> Plan:
    """Return the grid and the common arguments with which to pack consecutive tokens.

    Args:
        first_row: row of the batch, in the segment, to which row 0 of `x` belongs.
        x: tokens in full precision, ``[rows, H, n, D]``.
        start: index of the first token to write within the segment.
        count: number of tokens to write.
        unit: number of elements in which the kernel counts strides.
    """
    rows, heads = x.shape[:2]
    how, first, parts = programs(how, start, count)
    strides = [stride // unit for stride in x.stride()[:3]]
    places = (*strides, start, count, first_row, first, heads, segment.words[0].shape[2])
    return Plan(how, (rows * heads, parts), places)


@dataclass(frozen=True)
class Job:
    """Tokens that wait to be packed into a segment: the arguments of a call of ``kvbench.cache.kernels.pack.pack``."""

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
        shapes = (segment.words[0].shape, *(param.shape for param in segment.params))
        return (self.how, where, segment.side, shapes, id(segment.watch[0]))

    def plan(self, unit: int = 1) -> Plan:
        """Return the grid and the arguments with which to pack the tokens; `unit` as for :func:`plan`."""
        return plan(self.segment, self.how, self.first_row, self.x, self.start, self.x.shape[2], unit)

    def record(self) -> Tensor:
        """Return the record in which the kernel notes NaN and Inf."""
        assert self.segment.watch is not None
        return self.segment.watch[0].record

    def addresses(self) -> tuple[int, ...]:
        """Return the job's buffer addresses and its segment's tag, as ``pack_layers`` expects them in its table."""
        segment = self.segment
        assert segment.watch is not None
        params = segment.params or segment.words  # without parameters, the kernel ignores these addresses
        buffers = (segment.words[0], segment.words[-1], params[0], params[-1])
        return (self.x.untyped_storage().data_ptr(), *(b.data_ptr() for b in buffers), segment.watch[1])


def address_table(group: Sequence[Job]) -> Tensor:
    """Return the table of addresses of jobs that share a launch (:meth:`Job.addresses`), on their device."""
    return addresses(tuple(job.addresses() for job in group), group[0].x.device)


@lru_cache(maxsize=16)
def alone(device: torch.device) -> tuple[Watch, int]:
    """Return the record in which kernels note a NaN or Inf that they pack into a segment without a cache, and its tag.

    All such segments of a device share one record, which the caller must check after every launch. The tag identifies
    them in it (:meth:`kvbench.cache.watch.Watch.tag`).
    """
    watch = Watch(device)
    return watch, watch.tag(uncached_message)
