"""Scores of the tasks of `mini`: pure functions of the prediction, the sample's answer and its `meta`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbench.metrics.text import contains, exact_match, last_number, marked_number, prefix_share, recall

Scorer = Callable[[str, str, Mapping[str, Any]], dict[str, float]]


def exact(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a short answer: ``score`` is 1 if the prediction equals it, ``contained`` is 1 if it contains it."""
    return {"score": exact_match(prediction, [answer]), "contained": contains(prediction, [answer])}


def words(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a copied text: ``score`` is 1 if the prediction equals it, else 0.

    ``words`` is the share of the text's words that the prediction copies before its first wrong word.
    """
    return {"score": exact_match(prediction, [answer]), "words": prefix_share(prediction, answer)}


def values(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a list of values.

    ``score`` is RULER's recall, the share of the values in ``meta["parts"]`` that the prediction contains; ``exact`` is
    1 if the prediction equals the whole answer, else 0.
    """
    return {"score": recall(prediction, meta["parts"]), "exact": exact_match(prediction, [answer])}


def number(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score the solution of a word problem, which should end with ``####`` and the result.

    Of three scores, each 1 if right and 0 if wrong, ``score`` judges the number after ``####``, ``flexible`` the last
    number of the prediction, and ``steps`` whether the whole solution matches exactly.
    """
    wanted = marked_number(answer)
    return {
        "score": float(marked_number(prediction) == wanted),
        "steps": exact_match(prediction, [answer]),
        "flexible": float(last_number(prediction) == wanted),
    }


SCORERS: dict[str, Scorer] = {"exact": exact, "words": words, "values": values, "number": number}
