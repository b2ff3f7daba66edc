"""Segments: runs of tokens that share a storage format, for every row of a batch and every KV head.

A store (:mod:`kvbench.cache.store`) is a list of segments. Rows of a batch may hold different numbers of tokens in a
segment; the rows that an operation is given (a slice of the batch) must agree, which :func:`uniform_rows` arranges.
Buffers are allocated ahead and grow by copying (amortised), never by concatenation; nothing quantized is dequantized
and quantized again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Literal

import torch
from torch import Tensor

Side = Literal["key", "value"]

#: chosen tokens of a prompt that are gathered at a time on their way to where they stay
GATHERED = 8192


class Segment(ABC):
    """Tokens of one format.

    Args:
        batch, heads, channels: B, H (KV heads) and D of the layer.
        dtype: full-precision dtype of the model's keys and values.
        device: where the buffers lie.
    """

    #: codes (True) or full precision (False)
    packed: bool

    def __init__(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.heads, self.channels, self.dtype, self.device = heads, channels, dtype, torch.device(device)
        self.lengths = [0] * batch

    def length(self, rows: slice) -> int:
        """Return the tokens held by each of `rows`, which agree."""
        return self.lengths[rows][0]

    @abstractmethod
    def append(self, rows: slice, x: Tensor) -> None:
        """Add ``x`` ``[rows, H, n, D]`` (full precision) at the end."""

    def append_chosen(self, rows: slice, x: Tensor, index: Tensor) -> None:
        """Add the tokens `index` (``[n]``, on the device of `x`) of ``x`` ``[rows, H, T, D]``, in this order."""
        for first in range(0, len(index), GATHERED):
            self.append(rows, x.index_select(2, index[first : first + GATHERED]))

    @abstractmethod
    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the values of tokens ``[start, stop)`` in `dtype`, ``[rows, H, stop - start, D]``."""

    def read_upper(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return what :meth:`read` does, from the upper nibbles alone where codes have two."""
        return self.read(rows, start, stop, dtype)

    def drop_back(self, row: int, count: int) -> None:
        """Forget the newest `count` tokens of one row (rollback)."""
        raise TypeError(f"tokens cannot leave a {type(self).__name__}")

    def drop_front(self, rows: slice, count: int) -> None:
        """Forget the oldest `count` tokens of `rows` (a sliding window has passed them)."""
        raise TypeError(f"tokens cannot leave a {type(self).__name__}")

    @abstractmethod
    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return every tensor with its part of the bill: ``codes``, ``scales``, ``window`` or ``index``."""

    @abstractmethod
    def used(self, row: int) -> dict[str, int]:
        """Return the bytes of the tokens of one row, by part."""

    @abstractmethod
    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every buffer by ``change(buffer)`` (beam reordering, cloning); dimension 0 is the batch."""

    def select(self, index: Tensor) -> None:
        """Make the rows ``index`` the batch, in that order, repeats allowed."""
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
    """Tokens in full precision: a linear buffer ``[B, H, capacity, D]`` with a start for each row.

    Dropping tokens at the front moves the start; the live part is moved back to the front of the buffer only when its
    end is reached, so a window of R tokens in a buffer of R + slack costs O(1) a token.

    Args:
        capacity: tokens to allocate at once (grows when passed).
        slack: room behind the live part that a growing buffer keeps.
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
        """Tokens that the buffer has room for."""
        return self.buffer.shape[2]

    def append(self, rows: slice, x: Tensor) -> None:
        count = x.shape[2]
        if count:
            first = self.reserve(rows, count)
            self.buffer[rows, :, first : first + count].copy_(x)

    def reserve(self, rows: slice, count: int) -> int:
        """Hold `count` tokens more, which the caller writes: the place in the buffer where the first of them goes."""
        if self.starts[rows][0] + self.lengths[rows][0] + count > self.capacity:
            self._make_room(rows, count)
        start, length = self.starts[rows][0], self.lengths[rows][0]
        self._set(rows, start, length + count)
        return start + length

    def append_chosen(self, rows: slice, x: Tensor, index: Tensor) -> None:
        if len(index) and self.starts[rows][0] + self.lengths[rows][0] + len(index) > self.capacity:
            self._make_room(rows, len(index))  # for all of them: the parts shall not grow the buffer one by one
        super().append_chosen(rows, x, index)

    def advance(self, count: int) -> list[int]:
        """Call :meth:`reserve` for all rows and return the place of each."""
        places = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        if max(places, default=0) + count > self.capacity:
            # room for every row before a place is named: a buffer that grows moves the rows that had room, too
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
        # Half as much again as is needed, so that a growing cache copies each token O(1) times.
        old, room = self.buffer, length + count + max(self.slack, (length + count) // 2 if length else 0)
        self.buffer = allocate((*old.shape[:2], room, self.channels), self.dtype, self.device)
        for row, (begin, tokens) in enumerate(zip(self.starts, self.lengths, strict=True)):
            self.buffer[row, :, :tokens].copy_(old[row, :, begin : begin + tokens])
            self.starts[row] = 0

    def _set(self, rows: slice, start: int, length: int) -> None:
        count = len(self.lengths[rows])
        self.starts[rows], self.lengths[rows] = [start] * count, [length] * count

    def view(self, rows: slice) -> Tensor:
        """Return the tokens of `rows`, ``[rows, H, length, D]``, without a copy."""
        start = self.starts[rows][0]
        return self.buffer[rows, :, start : start + self.lengths[rows][0]]

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self.view(rows)[:, :, start:stop].to(dtype)

    def drop_front(self, rows: slice, count: int) -> None:
        """Forget the oldest `count` tokens."""
        length = self.lengths[rows][0] - count
        self._set(rows, self.starts[rows][0] + count if length else 0, length)

    def drop_back(self, row: int, count: int) -> None:
        """Forget the newest `count` tokens of one row (rollback)."""
        self.lengths[row] -= count

    def keep(self, rows: slice, index: Tensor) -> None:
        """Keep only some tokens, in the given order.

        Args:
            index: token numbers within the segment, ``[n]`` for all heads or ``[H, n]`` / ``[rows, H, n]`` per head.
        """
        live = self.view(rows)
        index = index.to(self.device).expand(*live.shape[:2], index.shape[-1])
        chosen = live.gather(2, index[..., None].expand(*index.shape, self.channels))
        self._set(rows, 0, 0)
        self.append(rows, chosen)

    def buffers(self) -> list[tuple[str, Tensor]]:
        return [("window", self.buffer)]

    def used(self, row: int) -> dict[str, int]:
        return {"window": self.lengths[row] * self.heads * self.channels * self.buffer.element_size()}

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        self.buffer = change(self.buffer)

    def select(self, index: Tensor) -> None:
        self.starts = [self.starts[i] for i in index.tolist()]
        super().select(index)

    def clone(self) -> FullSegment:
        twin = super().clone()
        assert isinstance(twin, FullSegment)
        twin.starts = list(self.starts)
        return twin


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised buffer that may be written inside and outside of ``torch.inference_mode``."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def same(counts: Sequence[int]) -> bool:
    """Return True if all rows have the same count."""
    return not counts or counts.count(counts[0]) == len(counts)


def uniform_rows(signatures: Sequence[object]) -> Iterator[slice]:
    """Cut a batch into runs of rows with equal signatures: one slice where all rows agree."""
    if signatures and signatures.count(signatures[0]) == len(signatures):
        yield slice(0, len(signatures))
        return
    first = 0
    for row in range(1, len(signatures) + 1):
        if row == len(signatures) or signatures[row] != signatures[first]:
            yield slice(first, row)
            first = row
