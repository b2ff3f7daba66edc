"""The part of a row that the scorer decides, and that another scorer version replaces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.results.samples import Row
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import AskQuestions


def scored(task: Task, sample: Sample, prediction: str) -> dict[str, Any]:
    """Return ``{"scores": {name: number or None}, "scorer_version": int}`` of one prediction."""
    if isinstance(sample.work, AskQuestions):  # a line each
        scores = task.score_questions(sample, prediction.split("\n"))
    else:
        scores = task.score(sample, prediction)
    return {
        "scores": {name: finite(score) for name, score in scores.items()},
        "scorer_version": int(task.scorer_version),
    }


def rescored(task: Task, samples: Iterable[Sample], rows: Mapping[str, Row]) -> list[Row]:
    """Return the stored rows of `samples` that an older scorer scored, scored anew from their predictions."""
    version = int(task.scorer_version)
    stale = [(rows[s.id], s) for s in samples if s.id in rows and rows[s.id]["scorer_version"] != version]
    return [{**row, **scored(task, sample, row["prediction"])} for row, sample in stale]


def finite(value: Any) -> float | None:
    """Return a float that JSON can hold; None for NaN and infinities."""
    number = float(value)
    return number if math.isfinite(number) else None
