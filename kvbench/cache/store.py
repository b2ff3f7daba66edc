"""A store: the keys, or the values, of one layer as a list of segments in slot order.

Slots number the tokens of a row through all segments of a store. **Keys and values of a layer agree on the slots**: a
token has the same slot in both stores. The borders between formats may differ (KIVI keeps n mod R keys but min(n, R)
values in full precision). So attention reads both stores in parallel and never needs a permutation. A method that moves
a key to another slot moves its value too; values are quantized per token, so their codes can be moved as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.packed import PackedSegment


class Store:
    """The keys or the values of a layer: segments in slot order, the last one in full precision for new tokens.

    Args:
        segments: the segments in slot order; the last one must be a :class:`FullSegment`.

    Raises:
        TypeError: the last segment is not a FullSegment.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not segments or not isinstance(segments[-1], FullSegment):
            raise TypeError(
                "the last segment of a store must be a FullSegment, because new tokens arrive in full precision"
            )
        self.segments = list(segments)

    @property
    def tail(self) -> FullSegment:
        """The full-precision segment that new tokens are appended to."""
        tail = self.segments[-1]
        assert isinstance(tail, FullSegment)
        return tail

    @property
    def packed(self) -> PackedSegment:
        """The packed segment just before the tail; only for stores that have one there."""
        packed = self.segments[-2]
        assert isinstance(packed, PackedSegment)
        return packed

    def length(self, rows: slice) -> int:
        """Return the number of slots of each of `rows`, which must have equally many."""
        return sum(segment.length(rows) for segment in self.segments)

    def fill_sinks(self, rows: slice, count: int, seen: int) -> None:
        """Move the tail's oldest tokens to the first segment, the sinks, until it holds `count` tokens.

        Needed after prompts of fewer than `count` tokens.

        Args:
            rows: rows of the batch.
            count: number of sinks that the method keeps.
            seen: number of tokens of each row so far. If the store holds fewer, some were dropped, the tail no longer
                has the first ones, and nothing is moved.
        """
        if self.length(rows) < seen:
            return
        missing = min(count - self.segments[0].length(rows), self.tail.length(rows))
        if missing > 0:
            self.segments[0].append(rows, self.tail.view(rows)[:, :, :missing])
            self.tail.drop_front(rows, missing)

    def cuts(self, rows: slice, start: int, stop: int) -> list[int]:
        """Return `start`, each slot between `start` and `stop` at which a segment begins, and `stop`."""
        borders, last = [start], 0
        for segment in self.segments:
            last += segment.length(rows)
            if start < last < stop and last != borders[-1]:
                borders.append(last)
        return [*borders, stop]

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype, upper: bool = False) -> Tensor:
        """Return the decoded slots ``[start, stop)``, ``[rows, H, stop - start, D]``; they must be in one segment.

        Args:
            rows: rows of the batch.
            start: first slot to read.
            stop: one past the last slot to read.
            dtype: dtype of the result.
            upper: decode only the upper nibbles of 8-bit codes that consist of two (QuantSpec's draft).

        Raises:
            IndexError: the store has no slot `start`.
        """
        first = 0
        for segment in self.segments:
            last = first + segment.length(rows)
            if start < last:
                read = segment.read_upper if upper else segment.read
                return read(rows, start - first, stop - first, dtype)
            first = last
        raise IndexError(f"slot {start} does not exist; the store has {first} slots")

    def only_full(self, rows: slice) -> Tensor | None:
        """Return a view ``[rows, H, n, D]`` of all tokens if a single full-precision segment holds them; else None."""
        filled = [segment for segment in self.segments if segment.length(rows)]
        if len(filled) == 1 and isinstance(filled[0], FullSegment):
            return filled[0].view(rows)
        return None

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest `count` tokens of one row.

        Raises:
            TypeError: some of them are in a segment that cannot drop single tokens.
        """
        for segment in reversed(self.segments):
            here = min(count, segment.lengths[row])
            if here:
                segment.drop_back(row, here)
            count -= here

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest `count` slots of `rows`; packed tokens only in whole groups."""
        for segment in self.segments:
            here = min(count, segment.length(rows))
            if here:
                segment.drop_front(rows, here)
            count -= here

    def signature(self, row: int) -> tuple[int, ...]:
        """Return the number of tokens of a row in each segment; rows with equal signatures are processed together."""
        return tuple(segment.lengths[row] for segment in self.segments)

    def clone(self) -> Store:
        """Return an independent copy."""
        return Store([segment.clone() for segment in self.segments])
