"""Chunk-level quantization search: the choice of each chunk's bit width from its similarity score.

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
    """Bit widths of the chunks of one context.

    Args:
        bits: bits per element of each chunk: 2, 4 or 16 (full precision).
        t_low: the threshold below which a chunk's score gave it 2 bits; None if the widths were chosen by rank.
        t_high: the threshold above which a chunk's score gave it 16 bits; None if the widths were chosen by rank.
    """

    bits: tuple[int, ...]
    t_low: float | None
    t_high: float | None

    def count(self, bits: int) -> int:
        """Return the number of chunks with a bit width of `bits`."""
        return self.bits.count(bits)


def by_threshold(scores: Sequence[float], alpha: float, beta: float) -> Widths:
    """Choose bit widths by comparing scores with two thresholds (Cocktail, eq. 2 and 3).

    The thresholds are ``T_low = s_min + (s_max - s_min) alpha`` and ``T_high = s_max - (s_max - s_min) beta``. A chunk
    gets 2 bits if its score is below T_low, 16 bits if it is above T_high, and 4 bits otherwise. A single chunk
    therefore gets 4 bits, as do chunks that all have the same score; with beta = 0, no chunk gets 16 bits.
    """
    if not scores:
        return Widths((), None, None)
    low, high = min(scores), max(scores)
    t_low, t_high = low + (high - low) * alpha, high - (high - low) * beta
    return Widths(tuple(LOW if s < t_low else FULL if s > t_high else MIDDLE for s in scores), t_low, t_high)


def by_rank(scores: Sequence[float], shares: Sequence[float]) -> Widths:
    """Choose bit widths by rank: fixed shares of the chunks get 16, 4 and 2 bits, whatever the scores are.

    The most similar chunks get 16 bits, the next ones 4 bits and the rest 2 bits. Of two chunks with the same score,
    the earlier one ranks higher. The size of the cache therefore does not depend on the scores.

    The shares are those of 16, 4 and 2 bits; they need not sum to 1.
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
    """Return the same bit widths in random order: Cocktail's ablation in which the search (module I) is left out."""
    bits = list(widths.bits)
    random.Random(seed).shuffle(bits)
    return Widths(tuple(bits), widths.t_low, widths.t_high)
