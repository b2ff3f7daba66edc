"""The full-precision segment, and what segments of all formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvbench.cache.segments.interface import Segment
from kvbench.quantizers.spec import Side as Side

__all__ = ["FullSegment", "Segment", "Side", "all_equal", "allocate", "overwrite", "uniform_rows"]


class FullSegment(Segment):
    """Tokens in full precision, in a buffer ``[B, H, capacity, D]``.

    The tokens of a row are contiguous and begin at that row's own offset. Dropping tokens at the front only increases
    the offset. When new tokens would not fit behind the last one, the tokens are first moved back to the front of the
    buffer. So a rolling window of R tokens costs O(1) per new token if the buffer has room for a fixed multiple of R.

    The first arguments are those of :class:`~kvbench.cache.segments.interface.Segment`.

    Args:
        capacity: number of tokens per row to allocate for; the buffer grows if it is exceeded.
        slack: least number of tokens for which the buffer has spare room after it had to grow.
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
        """Number of tokens per row for which the buffer has room."""
        return self.buffer.shape[2]

    def append(self, rows: slice, x: Tensor) -> None:
        """Append tokens, ``[rows, H, n, D]``, to some rows. The buffer grows if it has no room."""
        count = x.shape[2]
        if count:
            first = self.reserve(rows, count)
            self.buffer[rows, :, first : first + count].copy_(x)

    def reserve(self, rows: slice, count: int) -> int:
        """Make room for `count` new tokens of some rows, which count as stored at once; the caller writes them next.

        Returns:
            The index along the buffer's dimension 2 of the first new token.
        """
        if self.starts[rows][0] + self.lengths[rows][0] + count > self.capacity:
            self._make_room(rows, count)
        start, length = self.starts[rows][0], self.lengths[rows][0]
        self._set(rows, start, length + count)
        return start + length

    def append_chosen(self, rows: slice, x: Tensor, index: Tensor) -> None:
        """See :meth:`Segment.append_chosen`. The buffer grows at most once."""
        if len(index) and self.starts[rows][0] + self.lengths[rows][0] + len(index) > self.capacity:
            self._make_room(rows, len(index))  # for all tokens at once, so that the buffer grows only once
        super().append_chosen(rows, x, index)

    def advance(self, count: int) -> list[int]:
        """Make room for `count` new tokens of every row, which count as stored at once; a decode step writes them.

        Returns:
            For each row, the index along the buffer's dimension 2 of its first new token.
        """
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

    def trim(self, capacity: int) -> None:
        """Free the buffer's room beyond `capacity` tokens per row, or beyond the longest row if that holds more."""
        room = max(capacity, *self.lengths, 0)
        if room >= self.capacity:
            return
        old, self.buffer = self.buffer, allocate((*self.buffer.shape[:2], room, self.channels), self.dtype, self.device)
        for rows in uniform_rows(list(zip(self.starts, self.lengths, strict=True))):
            start, length = self.starts[rows][0], self.lengths[rows][0]
            self.buffer[rows, :, :length].copy_(old[rows, :, start : start + length])
            self._set(rows, 0, length)

    def _set(self, rows: slice, start: int, length: int) -> None:
        count = len(self.lengths[rows])
        self.starts[rows], self.lengths[rows] = [start] * count, [length] * count

    def view(self, rows: slice) -> Tensor:
        """Return a view of the tokens of some rows, ``[rows, H, length, D]``."""
        start = self.starts[rows][0]
        return self.buffer[rows, :, start : start + self.lengths[rows][0]]

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Segment.read`."""
        return self.view(rows)[:, :, start:stop].to(dtype)

    def drop_front(self, rows: slice, count: int) -> None:
        """See :meth:`Segment.drop_front`."""
        length = self.lengths[rows][0] - count
        self._set(rows, self.starts[rows][0] + count if length else 0, length)

    def drop_back(self, row: int, count: int) -> None:
        """See :meth:`Segment.drop_back`."""
        self.lengths[row] -= count

    def keep(self, rows: slice, index: Tensor) -> None:
        """Keep only the chosen tokens of some rows, in the given order, and drop all others.

        `index` holds their indices within the segment in their new order: ``[n]``, or ``[H, n]`` or ``[rows, H, n]`` if
        they differ by head or by row.
        """
        live = self.view(rows)
        index = index.to(self.device).expand(*live.shape[:2], index.shape[-1])
        chosen = live.gather(2, index[..., None].expand(*index.shape, self.channels))
        self._set(rows, 0, 0)
        self.append(rows, chosen)

    def replace(self, rows: slice, index: Tensor) -> None:
        """Drop one token per head, `index` ``[rows, H]``, from some rows; the first token of each head takes its slot.

        This copies one token per head, where :meth:`keep` copies all of them, but tokens lose their order.
        """
        overwrite(self, rows, index)
        self.drop_front(rows, 1)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """See :meth:`Segment.buffers`."""
        return [("window", self.buffer)]

    def used(self, row: int) -> dict[str, int]:
        """See :meth:`Segment.used`."""
        return {"window": self.lengths[row] * self.heads * self.channels * self.buffer.element_size()}

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """See :meth:`Segment.map_buffers`."""
        self.buffer = change(self.buffer)

    def select(self, index: Tensor) -> None:
        """See :meth:`Segment.select`."""
        self.starts = [self.starts[i] for i in index.tolist()]
        super().select(index)

    def clone(self) -> FullSegment:
        """Return an independent copy, with its own buffer and its own offsets."""
        twin = super().clone()
        assert isinstance(twin, FullSegment)
        twin.starts = list(self.starts)
        return twin


def overwrite(segment: FullSegment, rows: slice, index: Tensor) -> None:
    """Copy the first token of each head over the one with the index `index` ``[rows, H]`` within the segment."""
    live = segment.view(rows)
    target = index.to(live.device)[..., None, None].expand(*index.shape, 1, segment.channels)
    live.scatter_(2, target, live[:, :, :1].clone())


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor that can be written both inside and outside ``torch.inference_mode``."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def all_equal(counts: Sequence[int]) -> bool:
    """Return True if all elements are equal, or if there are no elements."""
    return not counts or counts.count(counts[0]) == len(counts)


def uniform_rows(signatures: Sequence[object]) -> Iterator[slice]:
    """Divide a batch into runs of adjacent rows that are alike, as slices, so that one call can process a run.

    Rows are alike if their `signatures` are equal. Often a signature is the number of tokens in each segment.
    """
    if signatures and signatures.count(signatures[0]) == len(signatures):
        yield slice(0, len(signatures))
        return
    first = 0
    for row in range(1, len(signatures) + 1):
        if row == len(signatures) or signatures[row] != signatures[first]:
            yield slice(first, row)
            first = row
