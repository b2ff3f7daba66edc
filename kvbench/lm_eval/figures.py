"""Bytes, times and exactness of each request that lm-eval has made, by the text of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Figures:
    """Measurements of the requests.

    Args:
        by_prompt: the figures of a prompt's last request, by its text. Likelihoods of several continuations of one
            context share an entry.
        requests: number of requests.
        exact: number of requests in which the cache still held every token exactly at the end; such a request gives the
            same answer with every setting, so it tests nothing.
    """

    by_prompt: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: int = 0
    exact: int = 0

    @property
    def empty(self) -> bool:
        """True before the first request, whose times include warm-up."""
        return not self.requests

    def add(self, prompt: str | None, *, exact: bool, **figures: Any) -> None:
        """Record the figures of a request; `exact` if the cache held every token exactly at the end.

        The prompt is None for a piece of a longer text, which has no entry of its own.
        """
        self.requests += 1
        self.exact += exact
        if prompt is not None:
            self.by_prompt[prompt] = {"exact": exact, **figures}

    def summary(self, setting: str) -> str:
        """Return a line for the user: the share of requests that tested the setting."""
        if not self.requests:
            return f"{setting}: no request reached the model (all answers came from lm-eval's request cache)"
        share = 100 * self.exact / self.requests
        line = (
            f"{setting}: {self.requests} requests; in {self.exact} ({share:.0f} %) the cache held every token exactly"
        )
        return line + (", so they test nothing but fp16" if self.exact else "")
