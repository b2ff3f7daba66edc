"""The part of a row that the scorer decides, and that another scorer version replaces."""

from __future__ import annotations

import math
from typing import Any

from kvbench.tasks.base import Sample, Task


def scored(task: Task, sample: Sample, prediction: str) -> dict[str, Any]:
    """``{"scores": {name: value or None}, "scorer_version": int}`` of one prediction."""
    if "questions" in sample.meta:  # several questions on one cache: a line each
        found = task.score_questions(sample, prediction.split("\n"))
    else:
        found = task.score(sample, prediction)
    scores = {name: finite(value) for name, value in found.items()}
    return {"scores": scores, "scorer_version": int(task.scorer_version)}


def finite(value: Any) -> float | None:
    """A float that JSON can hold; None for NaN and infinities."""
    number = float(value)
    return number if math.isfinite(number) else None
