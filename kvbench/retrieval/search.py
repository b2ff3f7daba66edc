"""Chunk-level quantization search: bit widths from similarity scores.

Source: Cocktail (Tao et al., DATE 2025), sec. III-B, eq. 1-3.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: bit widths from the least to the most similar chunk
LOW, MIDDLE, FULL = 2, 4, 16


@dataclass(frozen=True)
class Widths:
    """Bits of each chunk, and the thresholds that decided them (None if shares did)."""

    bits: tuple[int, ...]
    t_low: float | None
    t_high: float | None

    def count(self, bits: int) -> int:
        """Return the number of chunks of one width."""
        return self.bits.count(bits)


def by_threshold(scores: Sequence[float], alpha: float, beta: float) -> Widths:
    """Choose widths by the thresholds of eq. 2 and 3, in double precision.

    ``T_low = s_min + (s_max - s_min) alpha``, ``T_high = s_max - (s_max - s_min) beta``; a chunk strictly below T_low
    is INT2, strictly above T_high FP16, else INT4. So equal scores (or a single chunk) are all INT4, and beta = 0
    leaves no FP16 chunk.
    """
    if not scores:
        return Widths((), None, None)
    low, high = min(scores), max(scores)
    t_low, t_high = low + (high - low) * alpha, high - (high - low) * beta
    return Widths(tuple(LOW if s < t_low else FULL if s > t_high else MIDDLE for s in scores), t_low, t_high)


def by_rank(scores: Sequence[float], shares: Sequence[float]) -> Widths:
    """Choose widths by rank: shares of FP16, INT4 and INT2 chunks (any scale), the most similar chunks first.

    Ties go to the earlier chunk; counts are rounded and INT2 takes the rest, so that bytes are equal for equal shares.
    """
    total, n = sum(shares), len(scores)
    full = round(n * shares[0] / total)
    middle = min(round(n * (shares[0] + shares[1]) / total), n) - full
    ranked = sorted(range(n), key=lambda i: (-scores[i], i))
    bits = [LOW] * n
    for place, chunk in enumerate(ranked[: full + middle]):
        bits[chunk] = FULL if place < full else MIDDLE
    return Widths(tuple(bits), None, None)


def shuffled(widths: Widths, seed: str) -> Widths:
    """Return as many chunks of each width, drawn at random (the paper's ablation without module I)."""
    bits = list(widths.bits)
    random.Random(seed).shuffle(bits)
    return Widths(tuple(bits), widths.t_low, widths.t_high)
