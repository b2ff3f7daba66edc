"""Scores of RULER: references found in an answer, the effective length, and means weighted by length.

Source: NVIDIA/RULER c3f5e3b, scripts/eval; Hsieh et al. 2024, sec. 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: Llama-2-7B's score at 4k tokens, the bar for a model's effective length
BAR = 0.856

_CONTROL = re.compile("[\x00-\x1f]")


def normalized(prediction: str) -> str:
    """Return an answer as RULER compares it: stripped, with control characters as line feeds, in lower case."""
    return _CONTROL.sub("\n", prediction.strip()).strip().lower()


def match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the share of references that occur in an answer, ignoring case."""
    answer = normalized(prediction)
    return sum(reference.lower() in answer for reference in references) / len(references)


def match_part(prediction: str, references: Sequence[str]) -> float:
    """Return 1.0 if any reference occurs in an answer, ignoring case, and 0.0 otherwise."""
    answer = normalized(prediction)
    return float(any(reference.lower() in answer for reference in references))


def effective_length(means: Mapping[int, float], bar: float = BAR) -> int | None:
    """Return the largest length whose mean score over the 13 tasks, in 0..1, reaches a bar; None if none does."""
    return max((length for length, mean in means.items() if mean >= bar), default=None)


def weighted(means: Mapping[int, float], *, increasing: bool) -> float:
    """Return the mean over lengths with weights 1, 2, 3, ... in the order of the lengths.

    Long prompts weigh most if `increasing` (wAvg inc); short ones if not (wAvg dec).
    """
    ordered = [means[length] for length in sorted(means, reverse=not increasing)]
    return sum(weight * mean for weight, mean in enumerate(ordered, 1)) / sum(range(1, len(ordered) + 1))
