"""The part of a row that the scorer decides, and that another scorer version replaces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.results import code as codes
from kvbench.results.samples import MEASURED, Row
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


def rescored(task: Task, samples: Iterable[Sample], rows: Mapping[str, Row], code: str | None = None) -> list[Row]:
    """Return the stored rows of `samples` that an older scorer scored, scored anew from their predictions.

    Args:
        code: digest of the scorer's sources; rows that record another one are scored anew too. None: not compared.
    """
    version = int(task.scorer_version)
    fresh = []
    for sample in samples:
        row = rows.get(sample.id)
        if row is None:
            continue
        made_by = codes.of(row)
        edited = made_by is not None and code is not None and made_by.get(codes.SCORER, code) != code
        if row["scorer_version"] == version and not edited:
            continue
        row = {**row, **scored(task, sample, row["prediction"])}
        if made_by is not None:
            row[MEASURED] = {**row[MEASURED], "code": {**made_by, codes.SCORER: code}}
        fresh.append(row)
    return fresh


def finite(value: Any) -> float | None:
    """Return a float that JSON can hold; None for NaN and infinities."""
    number = float(value)
    return number if math.isfinite(number) else None
