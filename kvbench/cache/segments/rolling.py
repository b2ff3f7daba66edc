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
    """Full-precision tokens: the first few, the sinks, stay in front of a rolling window of the newest ones.

    The sinks and the window are contiguous, so attention reads them as one tensor. To roll, the segment advances the
    start of its tokens in the buffer and rewrites the sinks there, which takes O(sinks) per step for any window size.

    Args:
        sinks: number of first tokens that stay.
        turn: rotates the sinks' keys to the positions that they get within the cache; None for values, and for keys
            that keep their positions. It is applied to the original keys, never to rotated ones, so rounding errors do
            not accumulate. The originals are kept for this (they count as reserved bytes, not as used ones).
        others, more: as for :class:`FullSegment`.
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
        """Drop the `count` tokens after the sinks, and rewrite the sinks in front of the rest.

        Within :func:`kvbench.cache.kernels.roll_together.together` the sinks are rewritten later.

        Args:
            rows: must have equally many tokens, and have lost equally many before.
            count: number of tokens to drop.
            evicted: number of tokens dropped so far, these included; the sinks' keys are rotated by as many positions.
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
        """Return True if rolls are being deferred."""
        return self.rolls is not None and self.rolls.jobs is not None

    def remember(self, moves: Sequence[Move]) -> None:
        """Keep the original keys of the sinks in rows that are about to roll for the first time."""
        if self.originals is None or 0 not in self.turned:
            return
        for move in moves:
            for row in range(move.first, move.last):
                if not self.turned[row]:  # rows of one length may have begun to roll at different steps
                    self.originals[row].copy_(self.buffer[row, :, move.old : move.old + self.sinks])

    def state(self) -> tuple[Any, ...]:
        """Return everything that determines how the segment rolls: segments with equal states roll identically."""
        return self.capacity, self.sinks, list(self.starts), list(self.lengths), list(self.turned)

    def follow(self, other: RollingSegment, moves: Sequence[Move]) -> None:
        """Repeat the roll of `other`, which was in the same state, on the host; the caller launches `moves`."""
        self.remember(moves)
        self.starts[:], self.lengths[:], self.turned[:] = other.starts, other.lengths, other.turned

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffer of tokens and, if the sinks' keys are rotated, that of their original keys."""
        originals = [] if self.originals is None else [("window", self.originals)]
        return [("window", self.buffer), *originals]

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffers, that of the sinks' original keys included, by what `change` returns for them."""
        super().map_buffers(change)
        self.originals = None if self.originals is None else change(self.originals)

    def select(self, index: Tensor) -> None:
        """Reorder the rows, and how far the sinks of each have been rotated, by `index` ``[B]``."""
        self.turned = [self.turned[i] for i in index.tolist()]
        super().select(index)

    def clone(self) -> RollingSegment:
        """Return an independent copy, the state of the sinks included."""
        twin = super().clone()
        assert isinstance(twin, RollingSegment)
        twin.turned = list(self.turned)
        return twin
