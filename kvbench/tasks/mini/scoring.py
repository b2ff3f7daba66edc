"""Scores of the tasks of `mini`: pure functions of the prediction, the sample's answer and its `meta`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbench.metrics.text import contains, exact_match, prefix_share
from kvbench.metrics.values import last_number, marked_number, recall

Scorer = Callable[[str, str, Mapping[str, Any]], dict[str, float]]


def exact(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score by exact match; the variant `contained` is 1 if the prediction contains the answer."""
    return {"score": exact_match(prediction, [answer]), "contained": contains(prediction, [answer])}


def words(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score by exact match; the variant `words` is the share of the answer's words before the first wrong one."""
    return {"score": exact_match(prediction, [answer]), "words": prefix_share(prediction, answer)}


def values(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score by recall of the values in ``meta["parts"]``, as RULER does; the variant `exact` is exact match."""
    return {"score": recall(prediction, meta["parts"]), "exact": exact_match(prediction, [answer])}


def number(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score the number after ``####``.

    The variant `steps` is exact match of the whole solution, and `flexible` scores the last number instead.
    """
    wanted = marked_number(answer)
    return {
        "score": float(marked_number(prediction) == wanted),
        "steps": exact_match(prediction, [answer]),
        "flexible": float(last_number(prediction) == wanted),
    }


SCORERS: dict[str, Scorer] = {"exact": exact, "words": words, "values": values, "number": number}
