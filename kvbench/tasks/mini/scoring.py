"""Scores of the tasks of `mini`: pure functions of the prediction, the sample's answer and its `meta`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbench.metrics.text import contains, exact_match, prefix_share
from kvbench.metrics.values import last_number, marked_number, recall

Scorer = Callable[[str, str, Mapping[str, Any]], dict[str, float]]


def exact(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Return ``score`` by exact match, and ``contained``, which is 1 if the prediction contains the answer, else 0."""
    return {"score": exact_match(prediction, [answer]), "contained": contains(prediction, [answer])}


def words(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Return ``score`` by exact match, and ``words``, the fraction of words that are right before the first error."""
    return {"score": exact_match(prediction, [answer]), "words": prefix_share(prediction, answer)}


def values(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Return ``score``, the recall of the values in ``meta["parts"]`` as in RULER, and ``exact`` by exact match."""
    return {"score": recall(prediction, meta["parts"]), "exact": exact_match(prediction, [answer])}


def number(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Return scores of the solution of a word problem, each 1 if right and 0 if wrong.

    Returns:
        ``score`` compares the number after ``####``, ``steps`` the whole solution by exact match, and ``flexible`` the
        last number of the prediction.
    """
    wanted = marked_number(answer)
    return {
        "score": float(marked_number(prediction) == wanted),
        "steps": exact_match(prediction, [answer]),
        "flexible": float(last_number(prediction) == wanted),
    }


SCORERS: dict[str, Scorer] = {"exact": exact, "words": words, "values": values, "number": number}
