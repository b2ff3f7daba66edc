"""Made-up names, keys and values: towns, people, labels, digits and hexadecimal strings."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.rng import Rng


def distinct(n: int, make: Callable[[], str]) -> list[str]:
    """Call `make` until it has returned `n` different names, and return these in order of first occurrence."""
    names: dict[str, None] = {}
    while len(names) < n:
        names[make()] = None
    return list(names)


def digits(rng: Rng, n: int) -> str:
    """Return `n` decimal digits, the first of which is not 0."""
    return str(rng.between(10 ** (n - 1), 10**n - 1))


def hexadecimal(rng: Rng, n: int) -> str:
    """Return `n` hexadecimal digits, at most 16."""
    return f"{rng.bits():016x}"[:n]


def key(rng: Rng) -> str:
    """Return an adjective and a noun joined by a hyphen: ``rusty-lantern``."""
    return f"{rng.choice(words.ADJECTIVES)}-{rng.choice(words.TOOLS)}"


def pair(rng: Rng) -> str:
    """Return a colour and an animal or a tool: ``amber falcon``."""
    return f"{rng.choice(words.COLOURS)} {rng.choice(words.ANIMALS + words.TOOLS)}"


def label(rng: Rng) -> str:
    """Return a made-up word: ``zuvake``."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(3))


def town(rng: Rng) -> str:
    """Return the name of a made-up town: ``Fenmouth``."""
    return rng.choice(words.TOWN_STARTS) + rng.choice(words.TOWN_ENDS)


def person(rng: Rng) -> str:
    """Return a first name and a made-up surname: ``Clara Holbrook``."""
    return f"{rng.choice(words.FIRST_NAMES)} {town(rng)}"


def variable(rng: Rng) -> str:
    """Return three capital letters: ``QXB``."""
    return "".join(chr(65 + rng.below(26)) for _ in range(3))
