"""Settings of speculative decoding: what drafts, and how far ahead. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["same", "int4", "int4_all"]

#: drafts that read the target's own cache: only its upper nibbles, or all of it (with other weights)
OWN_VIEWS = ("upper", "full")


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Settings of speculative decoding in which one model is both draft and target (QuantSpec, Algorithm 1).

    Args:
        gamma: tokens drafted per round.
        draft: what the draft attends to. ``upper``: only the upper nibbles of the target's cache; ``full``: all of the
            target's cache. Any other value names a method; the draft then reads a second cache of the same tokens, made
            with that method (:meth:`kvbench.cache.KVCache.lead`).
        weights: weights of the draft: ``same``: the target's; ``int4``: feed-forward layers in 4 bits (the authors'
            code); ``int4_all``: all linear layers of the decoder except the output head.
    """

    gamma: int
    draft: str = "upper"
    weights: Weights = "same"
