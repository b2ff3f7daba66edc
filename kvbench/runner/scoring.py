"""The scores in a row, which are computed again from the stored prediction when the scorer changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.metrics.reasoning import OPENED, cut_in_thinking
from kvbench.metrics.text import loops
from kvbench.results import code as codes
from kvbench.results.samples import MEASURED, Row, unsealed
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import AskQuestions


def scored(task: Task, sample: Sample, prediction: str, row: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Score an answer, and return the entries ``scores`` and ``scorer_version`` of its row.

    A score that is NaN or infinite is recorded as None. The prediction for several questions has one line per question.
    If the task has long answers, ``cut`` is 1 for one that reached the limit of tokens or never ended its thinking, and
    ``looping`` is 1 for one that repeats itself at its end. ``reasoning_cut`` is 1 for reasoning that reached its limit
    (:class:`kvbench.tasks.work.ReasonThenAnswer`).

    Args:
        row: the other entries of the row: ``finish``, ``thinking`` if the prompt itself has begun the answer's
            thinking, and ``reasoning``. None where no answer was generated.
    """
    if row and row.get("thinking") and task.removes_thinking:
        prediction = OPENED + prediction
    if isinstance(sample.work, AskQuestions):  # one answer per line
        scores = task.score_questions(sample, prediction.split("\n"))
    else:
        scores = task.score(sample, prediction)
    if task.long_answers and row and row.get("finish"):
        cut = row["finish"] == "length" or cut_in_thinking(prediction)
        scores = {**scores, "cut": float(cut), "looping": float(loops(prediction))}
        if "reasoning" in row:
            scores["reasoning_cut"] = float(row["reasoning"]["finish"] == "length")
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
        row = {**row, **scored(task, sample, unsealed(row["prediction"]), row)}
        if made_by is not None:
            row[MEASURED] = {**row[MEASURED], "code": {**made_by, codes.SCORER: code}}
        fresh.append(row)
    return fresh


def finite(value: Any) -> float | None:
    """Return a number as a float; None if it is NaN or infinite, which JSON cannot represent."""
    number = float(value)
    return number if math.isfinite(number) else None
