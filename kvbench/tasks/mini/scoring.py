"""Scores of the tasks of `mini`: pure functions of a prediction and the sample's answer and meta data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbench.metrics.text import contains, exact_match, prefix_share
from kvbench.metrics.values import last_number, marked_number, recall

Scorer = Callable[[str, str, Mapping[str, Any]], dict[str, float]]


def exact(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Exact match; the variant `contained` lets the prediction say more than the answer."""
    return {"score": exact_match(prediction, [answer]), "contained": contains(prediction, [answer])}


def words(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Exact match; the variant `words` is the share of words that are right before the first slip."""
    return {"score": exact_match(prediction, [answer]), "words": prefix_share(prediction, answer)}


def values(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Recall of the values in ``meta["parts"]`` (as RULER); the variant `exact` wants them alone and in order."""
    return {"score": recall(prediction, meta["parts"]), "exact": exact_match(prediction, [answer])}


def number(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """The number after ``####``; the variant `steps` wants every step right, `flexible` takes the last number."""
    wanted = marked_number(answer)
    return {
        "score": float(marked_number(prediction) == wanted),
        "steps": exact_match(prediction, [answer]),
        "flexible": float(last_number(prediction) == wanted),
    }


SCORERS: dict[str, Scorer] = {"exact": exact, "words": words, "values": values, "number": number}
