"""A rolling window behind attention sinks, tokens that are never dropped (StreamingLLM)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvbench.cache.kernels.deferred import Deferred
from kvbench.cache.kernels.roll_together import Move, Roll, roll
from kvbench.cache.segments.base import FullSegment, allocate

#: rotates keys ``[rows, H, n, D]`` by a number of positions, the same for all rows or one for each
#: (:meth:`kvbench.attention.rope.rotary.Rotary.turn`)
Turn = Callable[[Tensor, int | Sequence[int]], Tensor]


class RollingSegment(FullSegment):
    """Full-precision tokens: the first few (sinks), which always stay, then a rolling window of the newest ones.

    Sinks and window are contiguous, so attention reads them as one tensor. To roll, the segment advances the beginning
    of its tokens in the buffer and rewrites the sinks there, which takes O(sinks) per step for a window of any size.

    Args:
        *others: positional arguments of :class:`FullSegment`.
        sinks: number of first tokens that stay.
        turn: function that rotates the keys of the sinks to new positions within the cache. None for values, and for
            keys that keep their positions. It is always applied to the original keys, so that rounding errors do not
            accumulate. The originals are kept for this purpose; they count as reserved bytes, not as used ones.
        **more: keyword arguments of :class:`FullSegment`.
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
        """Drop the tokens just after the sinks, and rewrite the sinks in front of the remaining tokens.

        In a ``with`` block of :func:`kvbench.cache.kernels.roll_together.together`, the work of the device is deferred
        until the block exits.

        Args:
            rows: rows with equal numbers of tokens, which have also dropped equal numbers before.
            count: number of tokens to drop.
            evicted: number of tokens dropped so far, including these. The keys of the sinks are rotated by this number
                of positions.
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
        """Return True if moves of the window are being deferred on the device, to share a launch with other layers."""
        return self.rolls is not None and self.rolls.jobs is not None

    def remember(self, moves: Sequence[Move]) -> None:
        """Save the original keys of the sinks in rows that are about to roll for the first time.

        Args:
            moves: the rolls that are about to happen.
        """
        if self.originals is None or 0 not in self.turned:
            return
        for move in moves:
            for row in range(move.first, move.last):
                if not self.turned[row]:  # rows of one length may have begun to roll at different steps
                    self.originals[row].copy_(self.buffer[row, :, move.old : move.old + self.sinks])

    def state(self) -> tuple[Any, ...]:
        """Return everything that determines how the segment rolls. Segments with equal states roll identically."""
        return self.capacity, self.sinks, list(self.starts), list(self.lengths), list(self.turned)

    def follow(self, other: RollingSegment, moves: Sequence[Move]) -> None:
        """Repeat on the host what another segment in the same state has done; the caller launches the device's work.

        Args:
            other: the other segment, after it has rolled.
            moves: the rolls of the other segment.
        """
        self.remember(moves)
        self.starts[:], self.lengths[:], self.turned[:] = other.starts, other.lengths, other.turned

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffer of tokens and, if the keys of the sinks are rotated, the buffer of their original keys.

        The bytes of both are counted as ``window``.
        """
        originals = [] if self.originals is None else [("window", self.originals)]
        return [("window", self.buffer), *originals]

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer of tokens, and that of the sinks' original keys, by ``change(buffer)``."""
        super().map_buffers(change)
        self.originals = None if self.originals is None else change(self.originals)

    def select(self, index: Tensor) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        Args:
            index: for each row of the new batch, the index of its row in the old batch, ``[new batch]``.
        """
        self.turned = [self.turned[i] for i in index.tolist()]
        super().select(index)

    def clone(self) -> RollingSegment:
        """Return an independent copy, including the state of the sinks."""
        twin = super().clone()
        assert isinstance(twin, RollingSegment)
        twin.turned = list(self.turned)
        return twin
