"""Parts shared by the launchers of packing kernels: segments as kernels see them, forms, jobs, grids, records of NaN.

A form is the compile-time parameters of a kernel and the division of a tile among its programs. Jobs of a cache's
layers wait in a queue, so that identical ones share a launch.

A tile is 128 tokens of one row of the batch and one KV head. Its int16 words form word rows. A word row holds one token
per code that fits into a word: 4 tokens with 4-bit codes, 8 with 2-bit codes (:mod:`kvbench.cache.segments.layout`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvbench.cache.kernels.reads import TILES, WINDOWS, format_refusal
from kvbench.cache.segments.base import Side
from kvbench.cache.segments.layout import TILE
from kvbench.cache.watch import Watch, uncached_message
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.packing import PLANES

T = TypeVar("T")


class Deferred(Generic[T]):
    """A queue in which the layers of a cache collect device work of one kind, so that several layers share a launch.

    The work is either the packing of tokens or the moves of rolling windows.

    Attributes:
        jobs: the jobs collected so far; None outside :meth:`collecting`, where a job must be run at once instead.
    """

    def __init__(self) -> None:
        self.jobs: list[T] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[T]]:
        """Within a ``with`` block, collect jobs in the list that it yields instead of running them.

        The caller must run them afterwards. Blocks must not be nested.
        """
        assert self.jobs is None
        jobs: list[T] = []
        self.jobs = jobs
        try:
            yield jobs
        finally:
            self.jobs = None


#: number of elements that a program processes, at most
ELEMENTS = 8192


@dataclass(frozen=True)
class Form:
    """Compile-time parameters of a packing kernel: the storage format, and the share of a tile that a program handles.

    Args:
        kind: arithmetic of the quantizer: ``affine``, ``hierarchical`` or ``atom``, or the rule of an engine's format.
        by_channel: True if a group consists of tokens of one channel, False if of channels of one token.
        group: number of elements in a group, or if `window` is not 0, the largest such number.
        rows: number of word rows of a tile that a program processes.
        channels: number of channels that a program processes.
        parts: number of programs among which a tile is divided.
        warps: number of warps of a program. Each thread computes the parameters of its group for itself, so fewer warps
            do less work in total, while more warps hide latency better.
        window: if groups may cross tile boundaries (LogQuant), the number of tokens per block that is divided into
            groups; else 0.
        scale: the one scale of all tokens, in engine formats that have one (:mod:`kvbench.cache.kernels.engine`).
        padding: number of unused parameters after those of a token, in engine formats that have them.
        table: for TurboQuant's keys, the midpoints between levels, then the levels, in ascending order.
        rank: index of the threshold of clipping among a token's sorted absolute values
            (:mod:`kvbench.cache.kernels.clipped`).
        balance: how KVarN's tiles are balanced (:mod:`kvbench.cache.kernels.kvarn`).
        iterations: number of rounds of this balancing.
    """

    kind: str
    bits: int
    by_channel: bool
    group: int
    rows: int
    channels: int
    parts: int
    warps: int = 2
    window: int = 0
    scale: float = 1.0
    padding: int = 0
    table: tuple[float, ...] = ()
    rank: int = 0
    balance: str = ""
    iterations: int = 0


@lru_cache(maxsize=256)
def packing_form(kind: str, bits: int, by_channel: bool, group: int, channels: int, half: bool) -> Form | str:
    """Choose the compile-time parameters of the kernel that packs tokens into a given storage format.

    If the kernel does not support the format, the result is the reason as text. The first arguments are those of
    :class:`Form`; `channels` are the channels of a head, and `half` is True for fp16 tokens, False for bf16.
    """
    reason = format_refusal(TILES, kind, bits, "channel" if by_channel else "token", group, channels)
    if reason:
        return reason
    all_rows = word_rows(bits)
    if by_channel:
        wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    else:
        wide = max((w for w in (group, 32, 64, 128) if w >= group and channels % w == 0), default=0)
    if not wide:
        return f"heads of {channels} channels"
    # with 3 bits, a word of the plane of 1 bit holds tokens of two word rows of the plane of 2 bits
    whole = by_channel or bits == 3
    rows = all_rows if whole else min(all_rows, max(ELEMENTS * all_rows // (TILE * wide), 1))
    # the fewest warps that compile for sm_90 without register spills
    if kind == "hierarchical" or bits == 3 or (not half and (group <= 32 or not by_channel)):
        warps = 4
    else:
        warps = 1 if by_channel and group <= rows and half else 2
    return Form(kind, bits, by_channel, group, rows, wide, all_rows // rows * (channels // wide), warps)


@lru_cache(maxsize=256)
def windows(bits: int, window: int, group: int, channels: int, half: bool) -> Form | str:
    """Choose the compile-time parameters of the kernel for groups of tokens that may cross tile boundaries (LogQuant).

    A block of `window` tokens (LogQuant's W) is divided into as few groups as `group`, the largest size, allows. `half`
    is ignored: the parameters are the same for fp16 and bf16. Other arguments and the result are as for
    :func:`packing_form`.
    """
    for size in (window // -(-window // group), group):  # the smallest group, and the largest
        reason = format_refusal(WINDOWS, "affine", bits, "channel", size, channels, window=window)
        if reason:
            return f"windows of {window} tokens in {reason}"
    wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    if not wide:
        return f"heads of {channels} channels"
    # on sm_90, two warps for 64 channels spill no registers for W = 42, and a few words for some other windows
    return Form("affine", bits, True, group, word_rows(bits), wide, channels // wide, 2, window)


def programs(how: Form, start: int, count: int) -> tuple[Form, int, int]:
    """Return which programs of a packing kernel to launch, per row and KV head, to write consecutive tokens.

    In general, these are all programs of every tile that contains one of the tokens. The exception is a single token
    that is quantized per token, such as the value that leaves the full-precision window at each step. It occupies one
    word row, and only programs for this word row are launched. This does not apply to 3-bit codes, whose bits lie in
    two planes.

    Returns:
        The compile-time parameters to use, how many programs of the tile of token `start` to skip, and how many to
        launch.
    """
    if count == 1 and not how.by_channel and how.bits != 3:
        one = alone_in_its_row(how)
        # programs that share a word row, each with some of the channels; token t of a tile is in row t % word_rows
        across = one.parts * one.rows // word_rows(how.bits)
        return one, start % TILE % word_rows(how.bits) * across, across
    tiles = -(-(start + count) // TILE) - start // TILE
    return how, 0, max(tiles, 1) * how.parts


@lru_cache(maxsize=256)
def alone_in_its_row(how: Form) -> Form:
    """Return a copy of compile-time parameters, changed so that each program processes a single word row."""
    return replace(how, rows=1, parts=how.parts * how.rows, warps=1)


def word_rows(bits: int) -> int:
    """Return the number of word rows in a tile of 128 tokens, for codes of `bits` bits."""
    return TILE * max(PLANES[bits]) // 16


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
