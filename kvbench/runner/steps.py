"""A run as a generator that asks its caller for the rows of one batch after another, so that runs can share batches."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.results.samples import Row
from kvbench.runner import ranks
from kvbench.tasks.base import Sample

if TYPE_CHECKING:
    from kvbench.parallel.team import Team
    from kvbench.runner.session import Session


@dataclass(frozen=True)
class Batch:
    """A batch of samples whose rows a run asks for; `left` is the number of batches of the run that follow it.

    The session can compute the rows; `team` is None for a single process.
    """

    team: Team | None
    session: Session
    samples: list[Sample]
    left: int

    def rows(self) -> list[Row]:
        """Compute the rows with the run's own session (:func:`kvbench.runner.ranks.batch`)."""
        return ranks.batch(self.team, self.session, self.samples)


#: a run under way: it yields batches, is sent their rows or the error that they raised, and returns its metrics
Steps = Generator[Batch, list[Row], dict[str, Any]]


def alone(steps: Steps) -> dict[str, Any]:
    """Carry out a run by itself, batch by batch, and return its metrics, or raise the error with which it ends."""
    try:
        batch = next(steps)
        while True:
            try:
                rows = batch.rows()
            except BaseException as error:
                batch = steps.throw(error)
            else:
                batch = steps.send(rows)
    except StopIteration as end:
        metrics: dict[str, Any] = end.value
        return metrics
