"""A rolling window behind attention sinks, tokens that are never dropped (StreamingLLM)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvbench.cache.kernels.jobs import Deferred
from kvbench.cache.kernels.roll_together import Move, Roll, roll
from kvbench.cache.segments.base import FullSegment, allocate

#: rotates keys ``[rows, H, n, D]`` by a number of positions, the same for all rows or one for each
#: (:meth:`kvbench.attention.rope.rotary.Rotary.turn`)
Turn = Callable[[Tensor, int | Sequence[int]], Tensor]


class RollingSegment(FullSegment):
    """The full-precision tokens of StreamingLLM: the first few (sinks), which stay, and a window of the newest ones.

    Sinks and window are contiguous, so attention reads them as one tensor. When old tokens are dropped from the window,
    only the sinks are copied, to just before the rest of the window. So a step costs O(sinks), for a window of any
    size.

    The other arguments are those of :class:`FullSegment`.

    Args:
        sinks: number of first tokens that stay.
        turn: function that rotates keys (after RoPE) to later positions, so that those of the sinks stay adjacent to
            the window. None for values, and for keys that keep their positions. Each rotation starts from a saved copy
            of the original keys, so that rounding errors do not add up; the copy counts as reserved bytes, not as used
            ones.
    """

    def __init__(self, *others: Any, sinks: int, turn: Turn | None = None, **more: Any) -> None:
        super().__init__(*others, **more)
        self.sinks, self.turn = sinks, turn
        #: the cache's queue of deferred rolls, which share kernel launches; None if the segment belongs to no cache
        self.rolls: Deferred[Roll] | None = None
        #: for each row the number of positions by which its sinks are rotated now
        self.turned = [0] * len(self.lengths)
        shape = (len(self.lengths), self.heads, sinks, self.channels)
        self.originals = allocate(shape, self.dtype, self.device).zero_() if turn and sinks else None

    def roll(self, rows: slice, count: int, evicted: int) -> None:
        """Drop the tokens just after the sinks, and move the sinks up to the remaining tokens.

        In a ``with`` block of :func:`kvbench.cache.kernels.roll_together.rolling_together`, the bookkeeping is done at
        once and the copying on the device when the block exits.

        Args:
            rows: rows of the batch that hold, and have dropped before, the same number of tokens.
            count: number of tokens to drop.
            evicted: number of tokens that each row has dropped since the prompt began, including the `count` tokens of
                this call. The keys of the sinks are rotated by this number of positions.
        """
        if not evicted or not self.sinks:
            self.drop_front(rows, count)
            return
        first, last, _ = rows.indices(len(self.lengths))
        old = self.starts[first]
        self.drop_front(rows, count)
        new, length, back = self.starts[first], self.lengths[first], 0
        if self.deferring() and new and new + length + count > self.capacity >= length + count:
            # the next `count` tokens would overrun the buffer: move the live ones to its front in the shared launch
            back = length
            self._set(rows, 0, length)
        move = Move(first, last, old, new, evicted, back)
        self.remember((move,))
        self.turned[first:last] = [evicted] * (last - first)
        roll(self, move)

    def deferring(self) -> bool:
        """Return True if :meth:`roll` now defers its copying, to share a kernel launch with other layers."""
        return self.rolls is not None and self.rolls.jobs is not None

    def remember(self, moves: Sequence[Move]) -> None:
        """Save the original keys of the sinks of those rows that the given moves are about to roll for the first time.

        Without rotation of keys, nothing is saved.
        """
        if self.originals is None or 0 not in self.turned:
            return
        for move in moves:
            for row in range(move.first, move.last):
                if not self.turned[row]:  # rows of one length may have begun to roll at different steps
                    self.originals[row].copy_(self.buffer[row, :, move.old : move.old + self.sinks])

    def state(self) -> tuple[Any, ...]:
        """Return what determines how the segment rolls; segments with equal results roll identically."""
        return self.capacity, self.sinks, list(self.starts), list(self.lengths), list(self.turned)

    def follow(self, other: RollingSegment, moves: Sequence[Move]) -> None:
        """Update the bookkeeping as if this segment had made the moves of another one, usually that of another layer.

        Both segments must have been in the same state (:meth:`state`) before. The tokens of this segment are not moved:
        the caller moves them on the device.
        """
        self.remember(moves)
        self.starts[:], self.lengths[:], self.turned[:] = other.starts, other.lengths, other.turned

    def buffers(self) -> list[tuple[str, Tensor]]:
        """See :meth:`Segment.buffers`; the original keys of the sinks, if they are rotated, count as ``window`` too."""
        originals = [] if self.originals is None else [("window", self.originals)]
        return [("window", self.buffer), *originals]

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """See :meth:`Segment.map_buffers`."""
        super().map_buffers(change)
        self.originals = None if self.originals is None else change(self.originals)

    def select(self, index: Tensor) -> None:
        """See :meth:`Segment.select`."""
        self.turned = [self.turned[i] for i in index.tolist()]
        super().select(index)

    def clone(self) -> RollingSegment:
        """Return an independent copy, including the rotation of its sinks."""
        twin = super().clone()
        assert isinstance(twin, RollingSegment)
        twin.turned = list(self.turned)
        return twin
