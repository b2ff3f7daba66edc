"""Numbers of tokens to drop once a sliding window hides them, in whole groups. Imports no torch."""

from __future__ import annotations

#: number of hidden tokens dropped at a time where dropping one by one would move codes or positions at every step
CHUNK = 32
#: limits of KVQuant's blocks of outliers, whose indices have 16 bits: elements and tokens per block
INDICES, TILE = 1 << 16, 128


def hidden(count: int, window: int | None) -> int:
    """Return the number of oldest tokens that have left a sliding window, so that no later token can attend to them.

    The window counts the tokens that a query sees, its own included; without one (None) the result is 0.
    """
    return 0 if window is None else max(count - (window - 1), 0)


def whole(hidden: int, unit: int, first: int = 0) -> int:
    """Return how many of the `hidden` oldest tokens can be dropped without splitting a group.

    The first `first` tokens (sinks), before the first group of `unit` tokens, are dropped together or not at all.
    """
    return first + (hidden - first) // unit * unit if hidden >= first else 0


def outlier_block(width: int) -> int:
    """Return the number of tokens in each block into which KVQuant divides its tokens to store their outliers.

    The index of an outlier within its block has 16 bits. The block is as large as this allows for `width` channels over
    all heads, rounded down to a power of two, but has at most 128 tokens (:data:`TILE`).
    """
    return min(1 << ((INDICES // width).bit_length() - 1), TILE)
