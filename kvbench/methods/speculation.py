"""Settings of speculative decoding: what drafts, and how far ahead. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["same", "int4", "int4_all"]

#: drafts that read the target's own cache: its upper nibbles, or all of it (with other weights)
OWN_VIEWS = ("upper", "full")


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding by the same model (QuantSpec, Algorithm 1).

    Args:
        gamma: tokens that are drafted a round.
        draft: ``upper``: the target's cache, upper nibbles alone; ``full``: the target's cache as it is; or the name of
            a method with a cache of its own, which the target's cache leads (:meth:`kvbench.cache.KVCache.lead`).
        weights: of the draft: ``same`` as the target's; ``int4``: feed-forward layers in 4 bits (the authors' code);
            ``int4_all``: all linear layers of the decoder but the output head.
    """

    gamma: int
    draft: str = "upper"
    weights: Weights = "same"
