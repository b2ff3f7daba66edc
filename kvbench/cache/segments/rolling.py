"""A window that rolls behind tokens which never leave it: the sinks of StreamingLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvbench.cache.kernels.deferred import Deferred
from kvbench.cache.kernels.roll_together import Move, Roll, roll
from kvbench.cache.segments.base import FullSegment, allocate

#: keys ``[rows, H, n, D]`` moved on by some positions, of all or of each row
#: (:meth:`kvbench.attention.rope.rotary.Rotary.turn`)
Turn = Callable[[Tensor, int | Sequence[int]], Tensor]


class RollingSegment(FullSegment):
    """Full-precision tokens of which the first few, the sinks, stay in front of a rolling window.

    Slots are contiguous (sinks, then the newest tokens), so attention reads them as one tensor. Rolling moves the start
    of the live part on and writes the sinks anew before it: O(sinks) a step, whatever the window.

    Args:
        sinks: first tokens that stay.
        turn: for keys whose positions are re-assigned inside the cache: the sinks are turned from the keys that came,
            never from ones that were turned before, so rounding does not add up. The keys that came are kept for it
            (reserved in addition to the window; the bill's used bytes count every token once).
        others: as :class:`FullSegment`.
    """

    def __init__(self, *others: Any, sinks: int, turn: Turn | None = None, **more: Any) -> None:
        super().__init__(*others, **more)
        self.sinks, self.turn = sinks, turn
        #: rolls of the cache's layers that share a launch; None: the segment belongs to no cache
        self.rolls: Deferred[Roll] | None = None
        #: positions by which the sinks in the window have been turned, for each row
        self.turned = [0] * len(self.lengths)
        shape = (len(self.lengths), self.heads, sinks, self.channels)
        self.originals = allocate(shape, self.dtype, self.device).zero_() if turn and sinks else None

    def roll(self, rows: slice, count: int, evicted: int) -> None:
        """Forget `count` tokens after the sinks; inside `roll_together.together` they move later.

        Args:
            rows: hold equally many tokens and have lost equally many before.
            evicted: tokens lost in all, these ones included: by so many positions the sinks move on.
        """
        if not evicted or not self.sinks:
            self.drop_front(rows, count)
            return
        first, last, _ = rows.indices(len(self.lengths))
        old = self.starts[first]
        self.drop_front(rows, count)
        new, length, back = self.starts[first], self.lengths[first], 0
        if self.deferring() and new and new + length + count > self.capacity >= length + count:
            # as many tokens as went will come, and for them the live part would be moved back layer by layer
            back = length
            self._set(rows, 0, length)
        move = Move(first, last, old, new, evicted, back)
        self.remember((move,))
        self.turned[first:last] = [evicted] * (last - first)
        roll(self, move)

    def deferring(self) -> bool:
        """Return True if rolls are deferred now."""
        return self.rolls is not None and self.rolls.jobs is not None

    def remember(self, moves: Sequence[Move]) -> None:
        """Keep the sinks' keys of rows that are about to move for the first time."""
        if self.originals is None or 0 not in self.turned:
            return
        for move in moves:
            for row in range(move.first, move.last):
                if not self.turned[row]:  # rows of one length may have begun to roll at different steps
                    self.originals[row].copy_(self.buffer[row, :, move.old : move.old + self.sinks])

    def state(self) -> tuple[Any, ...]:
        """Return what the host decides by: segments of equal states roll alike."""
        return self.capacity, self.sinks, list(self.starts), list(self.lengths), list(self.turned)

    def follow(self, other: RollingSegment, moves: Sequence[Move]) -> None:
        """Roll as `other` did, which was in the same state; the moves are the caller's."""
        self.remember(moves)
        self.starts[:], self.lengths[:], self.turned[:] = other.starts, other.lengths, other.turned

    def buffers(self) -> list[tuple[str, Tensor]]:
        originals = [] if self.originals is None else [("window", self.originals)]
        return [("window", self.buffer), *originals]

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_buffers(change)
        self.originals = None if self.originals is None else change(self.originals)

    def select(self, index: Tensor) -> None:
        self.turned = [self.turned[i] for i in index.tolist()]
        super().select(index)

    def clone(self) -> RollingSegment:
        twin = super().clone()
        assert isinstance(twin, RollingSegment)
        twin.turned = list(self.turned)
        return twin
