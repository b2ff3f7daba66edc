"""A random generator of our own, so that the data has the same bytes on every machine and Python version.

`random.Random` keeps its stream of floats stable, but not what `sample`, `shuffle` and `choice` make of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Rng:
    """SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

    Args:
        labels: what the stream is for; the seed is the first 8 bytes of the SHA-256 of their text, so every set of
            labels has its own stream, whatever was drawn elsewhere.
    """

    __slots__ = ("_state",)

    def __init__(self, *labels: object) -> None:
        text = "\x1f".join(str(label) for label in labels)
        self._state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def bits(self) -> int:
        """The next 64 random bits."""
        self._state = state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return state ^ (state >> 31)

    def below(self, n: int) -> int:
        """An integer in [0, n); n is far below 2^64, so that the multiplication's bias does not matter."""
        return (self.bits() * n) >> 64

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high], both ends possible."""
        return low + ((self.bits() * (high - low + 1)) >> 64)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.bits() < probability * 18446744073709551616.0

    def choice(self, items: Sequence[T]) -> T:
        """One of `items`."""
        return items[(self.bits() * len(items)) >> 64]

    def weighted(self, weights: dict[str, float]) -> str:
        """One of the names with a probability in proportion to its weight."""
        point = self.bits() / 18446744073709551616.0 * sum(weights.values())
        for name, weight in weights.items():
            point -= weight
            if point < 0:
                return name
        return next(reversed(weights))

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Fisher and Yates, in place."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """`n` different positions of `items`, in random order.

        Raises:
            ValueError: `items` has fewer than `n` entries.
        """
        if n > len(items):
            raise ValueError(f"cannot draw {n} of {len(items)} items")
        chosen: dict[int, None] = {}
        while len(chosen) < n:
            chosen[self.below(len(items))] = None
        return [items[i] for i in chosen]
