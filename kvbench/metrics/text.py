"""Scores of an answer's text: exact match, containment, the share of words that are right."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Lower case, whitespace runs made one space, quotes and final punctuation off the ends."""
    return _SPACES.sub(" ", text).strip(" \"'`.,;:!?").casefold()


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1.0 where the prediction equals one of the answers after :func:`normalise`, else 0.0."""
    said = normalise(prediction)
    return float(any(said == normalise(answer) for answer in answers))


def contains(prediction: str, answers: Iterable[str]) -> float:
    """1.0 where one of the answers stands in the prediction as whole words, else 0.0."""
    said = f" {_words(prediction)} "
    return float(any(f" {_words(answer)} " in said for answer in answers))


def prefix_share(prediction: str, answer: str) -> float:
    """Share of the answer's words that the prediction has, in place and without a slip before them.

    A graded form of exact match for long copies: 1.0 exactly where all words are right.
    """
    said, meant = normalise(prediction).split(" "), normalise(answer).split(" ")
    right = 0
    for a, b in zip(said, meant, strict=False):
        if a != b:
            break
        right += 1
    return right / len(meant)


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
