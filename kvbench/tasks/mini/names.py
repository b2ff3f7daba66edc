"""Made-up names, keys and values: towns, people, labels, digits and hexadecimal strings."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.rng import Rng


def distinct(n: int, make: Callable[[], str]) -> list[str]:
    """`n` different results of `make`, in the order in which they came."""
    names: dict[str, None] = {}
    while len(names) < n:
        names[make()] = None
    return list(names)


def digits(rng: Rng, n: int) -> str:
    """`n` decimal digits, the first of them not 0."""
    return str(rng.between(10 ** (n - 1), 10**n - 1))


def hexadecimal(rng: Rng, n: int) -> str:
    """`n` digits of 0-9 and a-f."""
    return f"{rng.bits():016x}"[:n]


def key(rng: Rng) -> str:
    """An adjective and a noun with a hyphen: ``rusty-lantern``."""
    return f"{rng.choice(words.ADJECTIVES)}-{rng.choice(words.TOOLS)}"


def pair(rng: Rng) -> str:
    """A colour and an animal or a thing: ``amber falcon``."""
    return f"{rng.choice(words.COLOURS)} {rng.choice(words.ANIMALS + words.TOOLS)}"


def label(rng: Rng) -> str:
    """A word that does not exist: ``zuvake``."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(3))


def town(rng: Rng) -> str:
    """A town that does not exist: ``Fenmouth``."""
    return rng.choice(words.TOWN_STARTS) + rng.choice(words.TOWN_ENDS)


def person(rng: Rng) -> str:
    """First name and made-up surname: ``Clara Holbrook``."""
    return f"{rng.choice(words.FIRST_NAMES)} {town(rng)}"


def variable(rng: Rng) -> str:
    """Three capital letters: ``QXB``."""
    return "".join(chr(65 + rng.below(26)) for _ in range(3))
