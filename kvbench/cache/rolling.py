"""A window that rolls behind tokens which never leave it: the sinks of StreamingLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvbench.cache.segments import FullSegment, allocate

#: keys ``[rows, H, n, D]`` moved on by some positions (:meth:`kvbench.attention.rotary.Rotary.turn`)
Turn = Callable[[Tensor, int], Tensor]


class RollingSegment(FullSegment):
    """Full-precision tokens of which the first few, the sinks, stay in front of a rolling window.

    Slots are contiguous (sinks, then the newest tokens), so attention reads them as one tensor. Rolling moves the start
    of the live part on and writes the sinks anew before it: O(sinks) a step, whatever the window.

    Args:
        sinks: first tokens that stay.
        turn: for keys whose positions are re-assigned inside the cache: the sinks are turned from the keys that came,
            never from ones that were turned before, so rounding does not add up. The keys that came are kept for it
            (reserved beside the window; the bill's used bytes count every token once).
        others: as :class:`FullSegment`.
    """

    def __init__(self, *others: Any, sinks: int, turn: Turn | None = None, **more: Any) -> None:
        super().__init__(*others, **more)
        self.sinks, self.turn = sinks, turn
        #: positions by which the sinks in the window have been turned, for each row
        self.turned = [0] * len(self.lengths)
        shape = (len(self.lengths), self.heads, sinks, self.channels)
        self.originals = allocate(shape, self.dtype, self.device).zero_() if turn and sinks else None

    def roll(self, rows: slice, count: int, evicted: int) -> None:
        """Forget `count` tokens after the sinks.

        Args:
            rows: hold equally many tokens and have lost equally many before.
            evicted: tokens lost in all, these ones included: by so many positions the sinks move on.
        """
        if not evicted or not self.sinks:
            self.drop_front(rows, count)
            return
        front = self.view(rows)[:, :, : self.sinks].clone()
        if self.originals is not None and self.turn is not None:
            first = rows.indices(len(self.lengths))[0]
            for number in range(len(front)):
                if not self.turned[first + number]:  # rows of one length may have begun to roll at different steps
                    self.originals[first + number].copy_(front[number])
            front = self.turn(self.originals[rows], evicted)
        self.drop_front(rows, count)
        self.view(rows)[:, :, : self.sinks].copy_(front)
        for row in range(*rows.indices(len(self.lengths))):
            self.turned[row] = evicted

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
