"""A store: the keys, or the values, of one layer as a list of segments in slot order.

Slots number the tokens of a row through the segments of a store, one after the other. **Keys and values of a layer
agree on the slots**: the same token has the same slot in both stores, while each store has borders of its own between
formats (KIVI keeps n mod R keys but min(n, R) values in full precision). So attention walks both stores side by side
and never needs a permutation. A method that moves a key moves its value's slot along: values are quantized per token,
so their codes move without being quantized again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.packed import PackedSegment


class Store:
    """Segments of one side of a layer, in slot order; the last one is in full precision and takes new tokens.

    Args:
        segments: in slot order, :class:`FullSegment` last.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not segments or not isinstance(segments[-1], FullSegment):
            raise TypeError("the last segment of a store must be a FullSegment: new tokens arrive in full precision")
        self.segments = list(segments)

    @property
    def tail(self) -> FullSegment:
        """The full-precision segment that new tokens are appended to."""
        tail = self.segments[-1]
        assert isinstance(tail, FullSegment)
        return tail

    @property
    def packed(self) -> PackedSegment:
        """The packed segment before the tail, where a store has one format for what has left full precision."""
        packed = self.segments[-2]
        assert isinstance(packed, PackedSegment)
        return packed

    def length(self, rows: slice) -> int:
        """Return the slots of `rows`, which agree."""
        return sum(segment.length(rows) for segment in self.segments)

    def fill_sinks(self, rows: slice, count: int, seen: int) -> None:
        """Move the tail's oldest tokens to the first segment until that holds `count` (prompts shorter than it).

        Args:
            seen: tokens of each row so far; where some were dropped already, the first ones came and went.
        """
        if self.length(rows) < seen:
            return
        missing = min(count - self.segments[0].length(rows), self.tail.length(rows))
        if missing > 0:
            self.segments[0].append(rows, self.tail.view(rows)[:, :, :missing])
            self.tail.drop_front(rows, missing)

    def cuts(self, rows: slice, start: int, stop: int) -> list[int]:
        """Return `start`, the borders between segments inside ``(start, stop)``, and `stop`."""
        borders, last = [start], 0
        for segment in self.segments:
            last += segment.length(rows)
            if start < last < stop and last != borders[-1]:
                borders.append(last)
        return [*borders, stop]

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype, upper: bool = False) -> Tensor:
        """Return the values of slots ``[start, stop)``, which lie in one segment: ``[rows, H, stop - start, D]``.

        Args:
            upper: read the upper nibbles alone of codes that have two (QuantSpec's draft).
        """
        first = 0
        for segment in self.segments:
            last = first + segment.length(rows)
            if start < last:
                read = segment.read_upper if upper else segment.read
                return read(rows, start - first, stop - first, dtype)
            first = last
        raise IndexError(f"slot {start} is past the {first} slots of the store")

    def only_full(self, rows: slice) -> Tensor | None:
        """Return the tokens ``[rows, H, n, D]``, uncopied, if one full-precision segment holds them all; else None."""
        filled = [segment for segment in self.segments if segment.length(rows)]
        if len(filled) == 1 and isinstance(filled[0], FullSegment):
            return filled[0].view(rows)
        return None

    def drop_back(self, row: int, count: int) -> None:
        """Forget the newest `count` tokens of one row; those before the tail must be able to leave their segment."""
        for segment in reversed(self.segments):
            here = min(count, segment.lengths[row])
            if here:
                segment.drop_back(row, here)
            count -= here

    def drop_front(self, rows: slice, count: int) -> None:
        """Forget the oldest `count` slots of `rows`; of packed tokens whole groups alone can go."""
        for segment in self.segments:
            here = min(count, segment.length(rows))
            if here:
                segment.drop_front(rows, here)
            count -= here

    def signature(self, row: int) -> tuple[int, ...]:
        """Return the tokens of a row in each segment: rows with equal signatures are handled together."""
        return tuple(segment.lengths[row] for segment in self.segments)

    def clone(self) -> Store:
        """Return an independent copy."""
        return Store([segment.clone() for segment in self.segments])
