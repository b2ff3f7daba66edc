"""Device times of the parts of a round, measured by CUDA events that the host reads one round later."""

from __future__ import annotations

import torch

from kvbench.decoding.round_times import Round

#: points in a round: before the cache is updated, before the drafts, before the verification, and after it
FLUSH, DRAFT, VERIFY, END = range(4)


class Marks:
    """Events at the points of one round; on a CPU nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(END + 1)] if cuda else []

    def set(self, point: int) -> None:
        """Record the event of a point on the current stream; a second call for the same point replaces the first."""
        if self._events:
            self._events[point].record()

    def fill(self, done: Round, flushed: bool) -> None:
        """Fill in the times of the parts of a round, which the device has completed.

        `flushed` is True if the cache was updated before the round, so that :data:`FLUSH` was set.
        """
        if self._events:
            done.draft_seconds = self._between(DRAFT, VERIFY)
            done.verify_seconds = self._between(VERIFY, END)
            done.flush_seconds = self._between(FLUSH, DRAFT) if flushed else 0.0

    def _between(self, first: int, second: int) -> float:
        return self._events[first].elapsed_time(self._events[second]) / 1e3
