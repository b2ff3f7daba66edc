"""Scores of answers that consist of values: recall of several values, and extraction of a final number."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    """Return the first number after the last `marker` in a text, without thousands separators; None without one."""
    if marker not in text:
        return None
    match = _NUMBER.search(text.rsplit(marker, 1)[1])
    return match[0].replace(",", "") if match else None


def last_number(text: str) -> str | None:
    """Return the last number in a text; None if there is none. Thousands separators are removed from the number."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None
