"""Scores of RULER: references found in an answer, the effective length, and means over tasks and lengths.

Source: NVIDIA/RULER c3f5e3b, scripts/eval; Hsieh et al. 2024, sec. 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


#: number of tasks that RULER's own figures average
TASKS = 13


@dataclass(frozen=True)
class Lengths:
    """Mean scores over `tasks` tasks, in 0..1, by length in tokens."""

    means: Mapping[int, float]
    tasks: int

    def text(self) -> str:
        """Return one line: the mean at each length, the effective length, and the weighted means.

        The effective length is the largest one with a mean of at least 0.856, the score of Llama-2-7B at 4k tokens. It
        is defined over all 13 tasks, so it is left out if there are fewer.
        """
        parts = [" ".join(f"{length}: {mean:.3f}" for length, mean in self.means.items())]
        if self.tasks == TASKS:
            effective = effective_length(self.means)
            parts.append(f"effective length {effective or f'below {min(self.means)}'}")
        else:
            parts.append(f"{self.tasks} of {TASKS} tasks")
        if len(self.means) > 1:
            inc, dec = (weighted(self.means, increasing=increasing) for increasing in (True, False))
            parts.append(f"weighted to long prompts {inc:.3f}, to short ones {dec:.3f}")
        return ", ".join(parts)


def lengths(scores: Mapping[str, Mapping[str, Any]]) -> Lengths | None:
    """Average a run's scores, keyed ``task@length``, by length.

    The result is None if the tasks are not the same at every length, or have no scores.
    """
    by_length: dict[int, dict[str, float]] = {}
    for key, entry in scores.items():
        task, at, length = key.rpartition("@")
        if not at or not length.isdigit() or entry.get("score") is None:
            return None
        by_length.setdefault(int(length), {})[task] = float(entry["score"])
    tasks = {frozenset(tasks) for tasks in by_length.values()}
    if len(tasks) != 1:
        return None
    means = {length: sum(by_length[length].values()) / len(by_length[length]) for length in sorted(by_length)}
    return Lengths(means, len(next(iter(tasks))))
