"""Scores of an answer's text: exact match, containment, regular expressions, and the share of correct words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Return a text in lower case, with single spaces, without quotes or punctuation at its beginning and end."""
    return _SPACES.sub(" ", text).strip(" \"'`.,;:!?").casefold()


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """Return 1.0 if the prediction equals one of the answers after :func:`normalise`, else 0.0."""
    text = normalise(prediction)
    return float(any(text == normalise(answer) for answer in answers))


def contains(prediction: str, answers: Iterable[str]) -> float:
    """Return 1.0 if the prediction contains one of the answers as whole words, ignoring case, else 0.0."""
    text = f" {_folded_words(prediction)} "
    return float(any(f" {_folded_words(answer)} " in text for answer in answers))


def matched(prediction: str, answers: Sequence[str], pattern: str) -> float:
    """Extract the answer from a prediction by a regular expression, and return 1.0 if it is right, else 0.0.

    The extracted answer is the text of the pattern's one group in its first match; without a match, the score is 0.0.
    It is right if it equals a reference answer after :func:`normalise`. The pattern is applied to the reference answers
    too; a reference that it does not match is compared as a whole.
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
    """Return the first of the allowed letters that stands alone as a word in a prediction; None if there is none."""
    match = re.search(rf"\b([{letters}])\b", prediction)
    return match[1] if match else None


def prefix_share(prediction: str, answer: str) -> float:
    """Return the fraction of the answer's words that the prediction reproduces before its first wrong word.

    It gives partial credit where exact match gives none, for tasks that ask for a long literal copy.
    """
    words, wanted = normalise(prediction).split(" "), normalise(answer).split(" ")
    right = 0
    for a, b in zip(words, wanted, strict=False):
        if a != b:
            break
        right += 1
    return right / len(wanted)


def _folded_words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def recall(prediction: str, values: Sequence[str]) -> float:
    """Return the fraction of `values` that the prediction contains as whole words, as in RULER.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("recall needs at least one value")
    return sum(bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", prediction)) for value in values) / len(values)


def marked_number(text: str, marker: str = "####") -> str | None:
    """Return the first number after the last `marker` in a text, without thousands separators; None if none."""
    if marker not in text:
        return None
    match = _NUMBER.search(text.rsplit(marker, 1)[1])
    return match[0].replace(",", "") if match else None


def last_number(text: str) -> str | None:
    """Return the last number in a text; None if there is none. Thousands separators are removed from the number."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


#: characters at the end of a text that must repeat a unit for the text to count as looping, and the unit's largest size
LOOPED, LONGEST_UNIT = 512, 256


def loops(text: str) -> bool:
    """Return True if a text ends in a loop: its last 512 characters repeat one unit of at most 256, four times or more.

    The last repetition may be incomplete, because an answer can be cut anywhere.
    """
    end = text[: -4 * LONGEST_UNIT - 1 : -1]  # backwards, so that the loop is at the beginning
    for unit in range(1, LONGEST_UNIT + 1):
        wanted = max(LOOPED, 4 * unit)
        if len(end) >= wanted and end[unit:wanted] == end[: wanted - unit]:
            return True
    return False
