"""Scores of an answer's text: exact match, containment, regular expressions, and the share of correct words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Return a text in the form in which it is compared by :func:`exact_match`.

    The text is in lower case, with single spaces, and without quotes and punctuation at its ends.
    """
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
    """Return 1.0 if the text that a pattern extracts from the prediction equals one of the answers, else 0.0.

    Both are compared after :func:`normalise`. If the pattern does not match the prediction, the score is 0.0.

    Args:
        prediction: generated text.
        answers: reference answers. If the pattern matches an answer, only the extracted part is compared, and otherwise
            the complete answer.
        pattern: regular expression with one group, whose content in the first match is extracted.
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
    """Return the letter with which a prediction answers a multiple-choice question.

    Args:
        prediction: generated text.
        letters: the allowed letters, as one string.

    Returns:
        The first allowed letter that stands alone as a word in the prediction; None if there is none.
    """
    match = re.search(rf"\b([{letters}])\b", prediction)
    return match[1] if match else None


def prefix_share(prediction: str, answer: str) -> float:
    """Return the fraction of the answer's words that the prediction reproduces before its first wrong word.

    The result is 1.0 if the prediction begins with the complete answer. It gives partial credit where exact match gives
    none, for tasks that ask for a long literal copy.
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
