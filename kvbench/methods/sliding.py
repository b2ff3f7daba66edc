"""Numbers of tokens to drop once a sliding window hides them, in whole groups. Imports no torch."""

from __future__ import annotations

#: number of hidden tokens dropped at a time where dropping one by one would move codes or positions at every step
CHUNK = 32
#: limits of KVQuant's blocks of outliers, whose indices have 16 bits: elements and tokens per block
INDICES, TILE = 1 << 16, 128


def hidden(count: int, window: int | None) -> int:
    """Return how many of the oldest cached tokens no later token can see.

    Args:
        count: number of cached tokens.
        window: sliding window: number of tokens that a query sees, its own included. None: no window, so the result
            is 0.
    """
    return 0 if window is None else max(count - (window - 1), 0)


def whole(hidden: int, unit: int, first: int = 0) -> int:
    """Return how many of the oldest `hidden` tokens can be dropped without splitting a group.

    Args:
        hidden: number of oldest tokens that no later token can see.
        unit: tokens per group.
        first: number of first tokens (sinks) before the first group. They can be dropped only all at once.
    """
    return first + (hidden - first) // unit * unit if hidden >= first else 0


def outlier_block(width: int) -> int:
    """Return the number of tokens per block of KVQuant's outliers.

    It is the largest power of two for which 16 bits can number all elements of the block, but at most 128
    (:data:`TILE`).

    Args:
        width: channels of a token over all heads.
    """
    return min(1 << ((INDICES // width).bit_length() - 1), TILE)
