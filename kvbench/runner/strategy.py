"""The interface of strategies: a session has one for each kind of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbench.results.samples import Row
from kvbench.tasks.base import Sample

#: called while a long batch runs, with the number of its samples done so far (a fraction) and a line to show
Report = Callable[[float, str], None]


class Strategy(Protocol):
    """Interface of the classes that run samples; there is one class per kind of work (:mod:`kvbench.tasks.work`).

    In all of them, `task` scores the answers, `machine` names the device and the dtypes, which are copied into each
    row, and `options` are the kernels and back ends that caches use.
    """

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Run a batch and return one row per sample.

        Args:
            samples: samples with the same kind of work, `max_new_tokens`, `stop`, `end_text` and `say_something`.
            first: True for the first batch of the session, which is a warm-up: its rows are marked, and their times are
                left out of all results. On a CPU, the peak memory of this batch is measured by counting live tensors,
                which slows it down.
            report: function called with the progress of a long batch; None for no reports.

        Raises:
            CacheError: the model did not use the cache of the method.
            DataError: a prompt is too long and the task does not allow truncation.
            torch.OutOfMemoryError: memory ran out.
        """
        ...
