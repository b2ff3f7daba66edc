"""Times of the parts of a round, from events at its points."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from kvbench.decoding.round_times import Round
from kvbench.decoding.rounds import DRAFT, END, FLUSH, VERIFY, Marks

TICKS = count()


class Event:
    """An event of a device whose clock ticks 100 ms per event."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = 100.0 * next(TICKS)

    def elapsed_time(self, other: Any) -> float:
        return float(other.at - self.at)


def new_round() -> Round:
    return Round(1.0, [5], [2], [1], [2])


def test_a_cpu_is_not_timed() -> None:
    marks, done = Marks(torch.device("cpu")), new_round()
    for point in (FLUSH, DRAFT, VERIFY, END):
        marks.set(point)
    marks.fill(done, True)
    assert (done.draft_seconds, done.verify_seconds, done.flush_seconds) == (None, None, None)


@pytest.mark.parametrize("flushed", [True, False])
def test_parts_lie_between_their_points(flushed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    marks, done = Marks(torch.device("cuda")), new_round()
    for point in ([FLUSH] if flushed else []) + [DRAFT, DRAFT, VERIFY, END]:
        marks.set(point)  # the second mark of a point replaces the first
    marks.set(END)
    marks.set(END)
    marks.fill(done, flushed)
    assert done.draft_seconds == pytest.approx(0.1) and done.verify_seconds == pytest.approx(0.3)
    assert done.flush_seconds == pytest.approx(0.2 if flushed else 0.0)
