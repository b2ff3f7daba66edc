"""RULER's figures over tasks and lengths, from the scores of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.metrics import ruler

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
            effective = ruler.effective_length(self.means)
            parts.append(f"effective length {effective or f'below {min(self.means)}'}")
        else:
            parts.append(f"{self.tasks} of {TASKS} tasks")
        if len(self.means) > 1:
            inc, dec = (ruler.weighted(self.means, increasing=increasing) for increasing in (True, False))
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
