"""Counts of tokens dropped once a sliding window has passed them: groups leave as a whole. Imports no torch."""

from __future__ import annotations

#: hidden tokens that are dropped together where dropping one by one would move codes, or positions, at every step
CHUNK = 32
#: what a 16-bit index numbers: KVQuant's outliers are indexed in blocks of so many elements at most, and of 128 tokens
INDICES, TILE = 1 << 16, 128


def hidden(count: int, window: int | None) -> int:
    """Of `count` tokens the oldest ones, which no later token sees; a query sees `window`, itself included."""
    return 0 if window is None else max(count - (window - 1), 0)


def whole(hidden: int, unit: int, first: int = 0) -> int:
    """Of the `hidden` oldest tokens those that leave in groups of `unit`, which begin behind the `first` tokens."""
    return first + (hidden - first) // unit * unit if hidden >= first else 0


def outlier_block(width: int) -> int:
    """Tokens of a block of outliers, where a token has `width` channels over all heads."""
    return min(1 << ((INDICES // width).bit_length() - 1), TILE)
