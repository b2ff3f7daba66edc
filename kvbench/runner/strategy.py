"""The interface of strategies: a session has one for each kind of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbench.results.samples import Row
from kvbench.tasks.base import Sample

#: called while a long batch runs, with the number of its samples done so far (a fraction) and a line to show
Report = Callable[[float, str], None]


class Strategy(Protocol):
    """A strategy, which turns batches of samples of one kind of work (:mod:`kvbench.tasks.work`) into rows."""

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Run a batch and return one row per sample.

        Args:
            samples: samples with the same kind of work, `max_new_tokens`, `stop`, `end_text` and `say_something`.
            first: True for the session's first batch, which warms up: its rows are marked, its times enter no figure,
                and on a CPU its live tensors are counted, which slows it.
            report: called with the progress of a long sample; None for no reports.

        Raises:
            CacheError: the model did not use the method's cache.
            DataError: a prompt is too long and its task refuses truncation.
            torch.OutOfMemoryError: memory ran out.
        """
        ...
