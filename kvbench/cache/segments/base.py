"""Segments: runs of tokens that share a storage format, for every row of a batch and every KV head.

A store (:mod:`kvbench.cache.store`) is a list of segments. The rows of a batch may have different numbers of tokens in
a segment, but all rows that one call works on (a slice of the batch) must have equally many; :func:`uniform_rows` cuts
a batch accordingly. Buffers are allocated in advance and grow by copying, at amortised constant cost per token.
Quantized tokens are never dequantized to be quantized again (except in :mod:`kvbench.cache.segments.foreign`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Literal

import torch
from torch import Tensor

Side = Literal["key", "value"]

#: number of tokens that :meth:`Segment.append_chosen` gathers at a time; bounds the temporary copy
GATHERED = 8192


class Segment(ABC):
    """A run of tokens in one storage format.

    Args:
        batch: number of rows, B.
        heads: number of KV heads, H.
        channels: channels per head, D.
        dtype: dtype of the model's keys and values.
        device: device of the buffers.
    """

    #: True if tokens are held as codes, False if in full precision
    packed: bool

    def __init__(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.heads, self.channels, self.dtype, self.device = heads, channels, dtype, torch.device(device)
        self.lengths = [0] * batch

    def length(self, rows: slice) -> int:
        """Return the number of tokens of each of `rows`, which must have equally many."""
        return self.lengths[rows][0]

    @abstractmethod
    def append(self, rows: slice, x: Tensor) -> None:
        """Append full-precision tokens `x` ``[rows, H, n, D]``, in the format of the segment."""

    def append_chosen(self, rows: slice, x: Tensor, index: Tensor) -> None:
        """Append the tokens `index` ``[n]`` of `x` ``[rows, H, T, D]``, in this order; both are on one device."""
        for first in range(0, len(index), GATHERED):
            self.append(rows, x.index_select(2, index[first : first + GATHERED]))

    @abstractmethod
    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return tokens ``[start, stop)``, decoded, ``[rows, H, stop - start, D]`` in `dtype`."""

    def read_upper(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return tokens as :meth:`read` does, decoded from the upper nibbles only if codes consist of two."""
        return self.read(rows, start, stop, dtype)

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest `count` tokens of one row (rollback)."""
        raise TypeError(f"tokens cannot be removed from a {type(self).__name__}")

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest `count` tokens of `rows` (a sliding window has passed them)."""
        raise TypeError(f"tokens cannot be removed from a {type(self).__name__}")

    @abstractmethod
    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return (part of the bill, buffer) pairs; parts are ``codes``, ``scales``, ``window`` and ``index``."""

    @abstractmethod
    def used(self, row: int) -> dict[str, int]:
        """Return the bytes that the tokens of one row need, by part of the bill."""

    @abstractmethod
    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each buffer, whose dimension 0 is the batch, by ``change(buffer)`` (beam search, cloning)."""

    def select(self, index: Tensor) -> None:
        """Replace the batch by its rows `index`, in that order; a row may occur more than once."""
        self.lengths = [self.lengths[i] for i in index.tolist()]
        with torch.inference_mode(False), torch.no_grad():
            self.map_buffers(lambda buffer: buffer.index_select(0, index.to(buffer.device).clone()))

    def clone(self) -> Segment:
        """Return an independent copy."""
        twin = copy(self)
        twin.lengths = list(self.lengths)
        with torch.inference_mode(False), torch.no_grad():
            twin.map_buffers(torch.clone)
        return twin


class FullSegment(Segment):
    """Tokens in full precision, contiguous in a buffer ``[B, H, capacity, D]`` from an offset for each row.

    Dropping tokens at the front only increases the offset. The tokens are moved back to the front of the buffer when
    they reach its end, so a window of R tokens in a buffer of R + slack costs O(1) per token.

    Args:
        batch: number of rows, B.
        heads: number of KV heads, H.
        channels: channels per head, D.
        dtype: dtype of the model's keys and values.
        device: device of the buffer.
        capacity: number of tokens to allocate for; the buffer grows when it is exceeded.
        slack: minimum room, in tokens, that a buffer has behind its tokens after growing.
    """

    packed = False

    def __init__(
        self,
        batch: int,
        heads: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        capacity: int = 0,
        slack: int = 64,
    ) -> None:
        super().__init__(batch, heads, channels, dtype, device)
        self.slack = slack
        self.starts = [0] * batch
        self.buffer = allocate((batch, heads, capacity, channels), dtype, self.device)

    @property
    def capacity(self) -> int:
        """Number of tokens that the buffer has room for."""
        return self.buffer.shape[2]

    def append(self, rows: slice, x: Tensor) -> None:
        """Copy tokens ``[rows, H, n, D]`` behind those of `rows`; the buffer grows if there is no room."""
        count = x.shape[2]
        if count:
            first = self.reserve(rows, count)
            self.buffer[rows, :, first : first + count].copy_(x)

    def reserve(self, rows: slice, count: int) -> int:
        """Add `count` tokens, which the caller will write, and return the buffer index of the first of them."""
        if self.starts[rows][0] + self.lengths[rows][0] + count > self.capacity:
            self._make_room(rows, count)
        start, length = self.starts[rows][0], self.lengths[rows][0]
        self._set(rows, start, length + count)
        return start + length

    def append_chosen(self, rows: slice, x: Tensor, index: Tensor) -> None:
        """Copy the tokens `index` of `x`, in that order, behind those of `rows`."""
        if len(index) and self.starts[rows][0] + self.lengths[rows][0] + len(index) > self.capacity:
            self._make_room(rows, len(index))  # for all tokens at once, so that the buffer grows only once
        super().append_chosen(rows, x, index)

    def advance(self, count: int) -> list[int]:
        """Add `count` tokens to every row, to be written later, and return each row's buffer index of the first."""
        places = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        if max(places, default=0) + count > self.capacity:
            # make room for all rows before computing places: a growing buffer also moves the rows that had room
            for rows in uniform_rows(list(zip(self.starts, self.lengths, strict=True))):
                if self.starts[rows][0] + self.lengths[rows][0] + count > self.capacity:
                    self._make_room(rows, count)
            places = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        self.lengths[:] = [length + count for length in self.lengths]
        return places

    def _make_room(self, rows: slice, count: int) -> None:
        start, length = self.starts[rows][0], self.lengths[rows][0]
        if length + count <= self.capacity:
            live = self.view(rows)
            self.buffer[rows, :, :length].copy_(live.clone() if start < length else live)  # clone: they overlap
            self._set(rows, 0, length)
            return
        # 1.5 times what is needed, so that a growing cache copies each token O(1) times
        old, room = self.buffer, length + count + max(self.slack, (length + count) // 2 if length else 0)
        self.buffer = allocate((*old.shape[:2], room, self.channels), self.dtype, self.device)
        for row, (begin, tokens) in enumerate(zip(self.starts, self.lengths, strict=True)):
            self.buffer[row, :, :tokens].copy_(old[row, :, begin : begin + tokens])
            self.starts[row] = 0

    def _set(self, rows: slice, start: int, length: int) -> None:
        count = len(self.lengths[rows])
        self.starts[rows], self.lengths[rows] = [start] * count, [length] * count

    def view(self, rows: slice) -> Tensor:
        """Return a view of the tokens of `rows`, ``[rows, H, length, D]``."""
        start = self.starts[rows][0]
        return self.buffer[rows, :, start : start + self.lengths[rows][0]]

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the tokens ``[start, stop)`` of `rows` in `dtype`, ``[rows, H, stop - start, D]``."""
        return self.view(rows)[:, :, start:stop].to(dtype)

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest `count` tokens of `rows`."""
        length = self.lengths[rows][0] - count
        self._set(rows, self.starts[rows][0] + count if length else 0, length)

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest `count` tokens of one row (rollback)."""
        self.lengths[row] -= count

    def keep(self, rows: slice, index: Tensor) -> None:
        """Keep only the tokens `index` of `rows`, in that order.

        Args:
            rows: rows of the batch.
            index: numbers of the tokens within the segment: ``[n]``, or ``[H, n]`` or ``[rows, H, n]`` if they differ
                by head or by row.
        """
        live = self.view(rows)
        index = index.to(self.device).expand(*live.shape[:2], index.shape[-1])
        chosen = live.gather(2, index[..., None].expand(*index.shape, self.channels))
        self._set(rows, 0, 0)
        self.append(rows, chosen)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffer of tokens; the bill counts it as ``window``."""
        return [("window", self.buffer)]

    def used(self, row: int) -> dict[str, int]:
        """Return the bytes of the tokens of `row`; room that is free does not count."""
        return {"window": self.lengths[row] * self.heads * self.channels * self.buffer.element_size()}

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer by what `change` returns for it."""
        self.buffer = change(self.buffer)

    def select(self, index: Tensor) -> None:
        """Reorder the rows, and the offset at which each begins, by `index` ``[B]``."""
        self.starts = [self.starts[i] for i in index.tolist()]
        super().select(index)

    def clone(self) -> FullSegment:
        """Return an independent copy with offsets of its own."""
        twin = super().clone()
        assert isinstance(twin, FullSegment)
        twin.starts = list(self.starts)
        return twin


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor that can be written inside and outside of ``torch.inference_mode``."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def same(counts: Sequence[int]) -> bool:
    """Return True if all elements are equal, or there are none."""
    return not counts or counts.count(counts[0]) == len(counts)


def uniform_rows(signatures: Sequence[object]) -> Iterator[slice]:
    """Yield slices of the batch, each a run of adjacent rows with equal signatures; nothing for an empty batch."""
    if signatures and signatures.count(signatures[0]) == len(signatures):
        yield slice(0, len(signatures))
        return
    first = 0
    for row in range(1, len(signatures) + 1):
        if row == len(signatures) or signatures[row] != signatures[first]:
            yield slice(first, row)
            first = row
