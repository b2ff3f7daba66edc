"""A store: the keys, or the values, of one layer as a list of segments in slot order.

:func:`extended` appends the positions of new tokens to a tensor of slot positions.

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


def extended(positions: Tensor, new: Tensor) -> Tensor:
    """Return positions ``[..., n]`` followed by new ones ``[..., q]``.

    Positions of one dimension are extended in amortised O(q) like ``list.extend``: the new ones are written into spare
    room behind `positions`, whose memory the result shares. Shorter tensors in the same memory, such as those of a
    cloned cache, stay valid, because nothing before their end changes. Positions of more dimensions are copied. The
    caller must observe two rules; otherwise this function overwrites positions that another tensor still uses:

    * If the same tensor is extended more than once, the appended positions must be the same each time.
    * A tensor that was shortened must be copied before it is extended.
    """
    length, count = positions.shape[-1], new.shape[-1]
    if positions.ndim > 1 or positions.dtype != new.dtype:
        return torch.cat([positions, new], -1)
    room = positions.untyped_storage().nbytes() // positions.element_size() - positions.storage_offset()
    if length + count > room or positions.stride() != (1,):
        with torch.inference_mode(False):  # steps may run inside and outside of inference mode
            buffer = positions.new_empty(length + count + max(length // 2, 256))
        buffer[:length] = positions
        positions = buffer[:length]
    grown = positions.as_strided((length + count,), (1,))
    grown[length:] = new
    return grown


class Store:
    """The keys or the values of one layer, as a list of segments. New tokens are appended to the last segment.

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
        """The last segment: it is in full precision, and new tokens are appended to it."""
        tail = self.segments[-1]
        assert isinstance(tail, FullSegment)
        return tail

    @property
    def packed(self) -> PackedSegment:
        """The last segment but one, which must be packed: the one that takes tokens from the tail."""
        packed = self.segments[-2]
        assert isinstance(packed, PackedSegment)
        return packed

    def length(self, rows: slice) -> int:
        """Return the number of slots of each row, which must be the same for all of `rows`."""
        return sum(segment.length(rows) for segment in self.segments)

    def fill_sinks(self, rows: slice, count: int, seen: int) -> None:
        """Move the oldest tokens of the tail to the first segment until it holds all the `count` sinks.

        This is needed after a prompt that was shorter than the number of sinks. `seen` is the number of real tokens
        that each row has seen. If the store holds fewer, the true first tokens may be gone, so nothing is moved.
        """
        if self.length(rows) < seen:
            return
        missing = min(count - self.segments[0].length(rows), self.tail.length(rows))
        if missing > 0:
            self.segments[0].append(rows, self.tail.view(rows)[:, :, :missing])
            self.tail.drop_front(rows, missing)

    def cuts(self, rows: slice, start: int, stop: int) -> list[int]:
        """Return where to cut the slot range ``[start, stop)`` so that each part lies in one segment.

        Returns:
            The ascending borders of the parts: `start`, the first slot of each further segment inside the range, and
            `stop`.
        """
        borders, last = [start], 0
        for segment in self.segments:
            last += segment.length(rows)
            if start < last < stop and last != borders[-1]:
                borders.append(last)
        return [*borders, stop]

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype, upper: bool = False) -> Tensor:
        """Return the decoded tokens of consecutive slots of one segment, ``[rows, H, stop - start, D]``.

        `upper` selects :meth:`Segment.read_upper`, as QuantSpec's draft does.

        Raises:
            IndexError: the store does not have slot `start`.
        """
        segment, first = self.holding(rows, start)
        read = segment.read_upper if upper else segment.read
        return read(rows, start - first, stop - first, dtype)

    def holding(self, rows: slice, slot: int) -> tuple[Segment, int]:
        """Return the segment that holds a slot, and that segment's first slot.

        Raises:
            IndexError: the store does not have the slot.
        """
        first = 0
        for segment in self.segments:
            last = first + segment.length(rows)
            if slot < last:
                return segment, first
            first = last
        raise IndexError(f"slot {slot} does not exist; the store has {first} slots")

    def only_full(self, rows: slice) -> Tensor | None:
        """Return all tokens as a view, ``[rows, H, n, D]``, if one full-precision segment holds them all; else None."""
        filled = [segment for segment in self.segments if segment.length(rows)]
        if len(filled) == 1 and isinstance(filled[0], FullSegment):
            return filled[0].view(rows)
        return None

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest tokens of one row.

        Raises:
            TypeError: some of these tokens are in a segment that cannot drop single tokens.
        """
        for segment in reversed(self.segments):
            here = min(count, segment.lengths[row])
            if here:
                segment.drop_back(row, here)
            count -= here

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the first `count` slots of some rows, which contain their oldest tokens.

        Raises:
            TypeError: some of these slots are in a segment that cannot drop tokens.
            ValueError: some of these slots are packed and are not whole groups.
        """
        for segment in self.segments:
            here = min(count, segment.length(rows))
            if here:
                segment.drop_front(rows, here)
            count -= here

    def signature(self, row: int) -> tuple[int, ...]:
        """Return the number of tokens of a row in each segment; rows that agree can be processed together."""
        return tuple(segment.lengths[row] for segment in self.segments)

    def clone(self) -> Store:
        """Return an independent copy of the store and its segments."""
        return Store([segment.clone() for segment in self.segments])
