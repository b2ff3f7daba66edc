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
    """Random number generator that gives the same numbers on every machine and Python version.

    The algorithm is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

    Args:
        labels: values that determine the seed, for example a task, a length and a sample's number. The seed is the
            first 8 bytes of the SHA-256 of their text, so generators with different labels give unrelated numbers.
    """

    __slots__ = ("_state",)

    def __init__(self, *labels: object) -> None:
        text = "\x1f".join(str(label) for label in labels)
        self._state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def bits(self) -> int:
        """Return the next 64 random bits, as an integer from 0 to 2^64 - 1."""
        self._state = state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return state ^ (state >> 31)

    def below(self, n: int) -> int:
        """Return a random integer in [0, n). All are equally likely, as long as `n` is far below 2^64."""
        return (self.bits() * n) >> 64

    def between(self, low: int, high: int) -> int:
        """Return a random integer in [low, high], both ends included."""
        return low + ((self.bits() * (high - low + 1)) >> 64)

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.bits() < probability * 18446744073709551616.0

    def choice(self, items: Sequence[T]) -> T:
        """Return a random entry of `items`; all are equally likely."""
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
        """Put `items` into a random order, in place (the Fisher-Yates shuffle)."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """Draw `n` of `items` without replacement, and return them in random order.

        Raises:
            ValueError: `items` has fewer than `n` entries.
        """
        if n > len(items):
            raise ValueError(f"cannot draw {n} of {len(items)} items")
        chosen: dict[int, None] = {}
        while len(chosen) < n:
            chosen[self.below(len(items))] = None
        return [items[i] for i in chosen]
