"""The scores in a row, which are computed again from the stored prediction when the scorer changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.metrics.text import loops
from kvbench.results import code as codes
from kvbench.results.samples import MEASURED, Row, unsealed
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import AskQuestions


def scored(task: Task, sample: Sample, prediction: str, finish: str | None = None) -> dict[str, Any]:
    """Score an answer, and return the entries ``scores`` and ``scorer_version`` of its row.

    A score that is NaN or infinite is recorded as None. The prediction for several questions has one line per question.
    If the task has long answers, ``cut`` is 1 for one that reached the limit of tokens (`finish`), and ``looping`` is 1
    for one that repeats itself at its end.
    """
    if isinstance(sample.work, AskQuestions):  # one answer per line
        scores = task.score_questions(sample, prediction.split("\n"))
    else:
        scores = task.score(sample, prediction)
    if task.long_answers and finish is not None:
        scores |= {"cut": float(finish == "length"), "looping": float(loops(prediction))}
    return {
        "scores": {name: finite(score) for name, score in scores.items()},
        "scorer_version": int(task.scorer_version),
    }


def rescored(task: Task, samples: Iterable[Sample], rows: Mapping[str, Row], code: str | None = None) -> list[Row]:
    """Score stored answers again if another version of the scorer has scored them, and return the changed rows.

    Samples without a row are skipped. A row that records another digest of the scorer's source than `code` is scored
    again even if the version is the same; None compares only versions.
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
        row = {**row, **scored(task, sample, unsealed(row["prediction"]), row.get("finish"))}
        if made_by is not None:
            row[MEASURED] = {**row[MEASURED], "code": {**made_by, codes.SCORER: code}}
        fresh.append(row)
    return fresh


def finite(value: Any) -> float | None:
    """Return a number as a float; None if it is NaN or infinite, which JSON cannot represent."""
    number = float(value)
    return number if math.isfinite(number) else None
