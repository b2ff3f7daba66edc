"""Settings of speculative decoding: what drafts, and how far ahead. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["same", "int4", "int4_all"]

#: drafts that read the target's own cache: only its upper nibbles, or all of it (with other weights)
OWN_VIEWS = ("upper", "full")

#: values from which ``gamma=auto`` chooses
AUTO = tuple(range(1, 9))


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Settings of speculative decoding in which one model is both draft and target (QuantSpec, Algorithm 1).

    Args:
        gamma: tokens drafted per round; ``auto``: 1 to 8, chosen for each round from measured times and the running
            acceptance (:class:`kvbench.decoding.round_times.Gamma`).
        draft: what the draft attends to. ``upper``: only the upper nibbles of the target's cache; ``full``: all of the
            target's cache. Any other value names a method; the draft then reads a second cache of the same tokens, made
            with that method (:meth:`kvbench.cache.KVCache.lead`).
        weights: weights of the draft: ``same``: the target's; ``int4``: feed-forward layers in 4 bits (the authors'
            code); ``int4_all``: all linear layers and the output head.
        forced: probability with which each draft is accepted, by chance and independently of its token, until the first
            refusal of the round. The text is then meaningless: only times may be reported. None: drafts are accepted by
            comparison with the target.
    """

    gamma: int | Literal["auto"]
    draft: str = "upper"
    weights: Weights = "same"
    forced: float | None = None

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of drafts that a round may have: gamma alone, or those from which ``auto`` chooses."""
        return AUTO if self.gamma == "auto" else (self.gamma,)

    @property
    def most(self) -> int:
        """Largest number of drafts that a round may have."""
        return max(self.choices)
