"""The interface between a session and its strategies: one strategy serves one kind of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbench.results.samples import Row
from kvbench.tasks.base import Sample

#: called while a long sample runs, with how many samples' worth of its batch is done, and with a line to show
Report = Callable[[float, str], None]


class Strategy(Protocol):
    """Turns batches of samples of one kind of work (:mod:`kvbench.tasks.work`) into rows."""

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Return a row for each sample of a batch.

        Args:
            samples: of the same kind of work, and with the same `max_new_tokens`, `stop` and end.
            first: True for the session's first batch, which warms up: its times are left out of every figure (its rows
                say so), and on a CPU the live tensors are counted while it runs, which slows it.
            report: called with the progress of a long sample; None: not reported.

        Raises:
            CacheError: the model did not use the method's cache.
            DataError: a prompt is too long and its task refuses truncation.
            torch.OutOfMemoryError: memory ran out.
        """
        ...
