"""Scores of an answer's text: exact match, containment, regular expressions, and the share of correct words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Return a text in lower case, with runs of whitespace as one space, and no quotes or punctuation at either end."""
    return _SPACES.sub(" ", text).strip(" \"'`.,;:!?").casefold()


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """Return 1.0 if the prediction equals one of the answers after :func:`normalise`, else 0.0."""
    text = normalise(prediction)
    return float(any(text == normalise(answer) for answer in answers))


def contains(prediction: str, answers: Iterable[str]) -> float:
    """Return 1.0 if the prediction contains one of the answers as whole words, ignoring case, else 0.0."""
    text = f" {_words(prediction)} "
    return float(any(f" {_words(answer)} " in text for answer in answers))


def matched(prediction: str, answers: Sequence[str], pattern: str) -> float:
    """Return 1.0 if the part of the prediction that a pattern extracts equals one of the answers, else 0.0.

    Both are compared after :func:`normalise`.

    Args:
        prediction: generated text; without a match it scores 0.
        answers: reference answers. The pattern is applied to them too; an answer that does not match counts as a whole.
        pattern: regular expression with one group, which is extracted from the first match.
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
    """Return the first of `letters` that is a word of its own in the prediction, or None."""
    match = re.search(rf"\b([{letters}])\b", prediction)
    return match[1] if match else None


def prefix_share(prediction: str, answer: str) -> float:
    """Return the share of the answer's words that the prediction reproduces before its first wrong word.

    A graded form of exact match for long copies; 1.0 if the prediction begins with the whole answer.
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
