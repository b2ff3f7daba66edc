"""Our own random number generator, so that the data is identical on every machine and Python version.

Python guarantees the stream of floats of `random.Random`, but not the results of its `sample`, `shuffle` and `choice`.
"""

from __future__ import annotations

import hashlib
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Rng:
    """Stream of random numbers, which is determined by the labels that name it.

    The generator is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

    Args:
        labels: values that name the stream. The seed is the first 8 bytes of the SHA-256 of their text, so streams with
            different labels are independent of each other.
    """

    __slots__ = ("_state",)

    def __init__(self, *labels: object) -> None:
        text = "\x1f".join(str(label) for label in labels)
        self._state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def bits(self) -> int:
        """Return the next 64 random bits as an integer."""
        self._state = state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return state ^ (state >> 31)

    def below(self, n: int) -> int:
        """Return an integer in [0, n), all equally likely if `n` is far below 2^64."""
        return (self.bits() * n) >> 64

    def between(self, low: int, high: int) -> int:
        """Return an integer in [low, high], both ends included."""
        return low + ((self.bits() * (high - low + 1)) >> 64)

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.bits() < probability * 18446744073709551616.0

    def choice(self, items: Sequence[T]) -> T:
        """Return one of `items`, all equally likely."""
        return items[(self.bits() * len(items)) >> 64]

    def weighted(self, weights: dict[str, float]) -> str:
        """Return a random key of `weights`, with a probability proportional to its weight."""
        point = self.bits() / 18446744073709551616.0 * sum(weights.values())
        for name, weight in weights.items():
            point -= weight
            if point < 0:
                return name
        return next(reversed(weights))

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Shuffle `items` in place (Fisher and Yates)."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """Return the items at `n` different positions, in random order.

        Raises:
            ValueError: `items` has fewer than `n` entries.
        """
        if n > len(items):
            raise ValueError(f"cannot draw {n} of {len(items)} items")
        chosen: dict[int, None] = {}
        while len(chosen) < n:
            chosen[self.below(len(items))] = None
        return [items[i] for i in chosen]
