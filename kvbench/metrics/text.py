"""Scores of an answer's text: exact match, containment, the share of words that are right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Return lower case, whitespace runs made one space, quotes and final punctuation off the ends."""
    return _SPACES.sub(" ", text).strip(" \"'`.,;:!?").casefold()


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """Return 1.0 where the prediction equals one of the answers after :func:`normalise`, else 0.0."""
    text = normalise(prediction)
    return float(any(text == normalise(answer) for answer in answers))


def contains(prediction: str, answers: Iterable[str]) -> float:
    """Return 1.0 where one of the answers stands in the prediction as whole words, else 0.0."""
    text = f" {_words(prediction)} "
    return float(any(f" {_words(answer)} " in text for answer in answers))


def matched(prediction: str, answers: Sequence[str], pattern: str) -> float:
    """Return 1.0 where what a pattern finds in the prediction equals one of the answers after :func:`normalise`.

    Args:
        prediction: a text; without a match it scores 0.
        answers: the pattern's group counts of an answer too, where it matches; else the whole answer.
        pattern: regular expression with one group; the first match counts.
    """
    expression = re.compile(pattern)
    match = expression.search(prediction)
    if match is None:
        return 0.0
    references = (expression.search(answer) for answer in answers)
    wanted = [
        reference[1] or "" if reference else answer for reference, answer in zip(references, answers, strict=True)
    ]
    return exact_match(match[1] or "", wanted)


def letter(prediction: str, letters: str) -> str | None:
    """Return the first of `letters` that stands alone in the prediction, or None."""
    match = re.search(rf"\b([{letters}])\b", prediction)
    return match[1] if match else None


def prefix_share(prediction: str, answer: str) -> float:
    """Return the share of the answer's words that the prediction has, in place and without a slip before them.

    A graded form of exact match for long copies: 1.0 exactly where all words are right.
    """
    words, wanted = normalise(prediction).split(" "), normalise(answer).split(" ")
    right = 0
    for a, b in zip(words, wanted, strict=False):
        if a != b:
            break
        right += 1
    return right / len(wanted)


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
