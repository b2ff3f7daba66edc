"""Made-up names, keys and values: towns, people, labels, digits and hexadecimal strings."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.rng import Rng


def distinct(n: int, make: Callable[[], str]) -> list[str]:
    """Draw random names until `n` different ones have occurred, and return these, in the order of their first draw.

    If `make` cannot return `n` different ones, this never returns.
    """
    names: dict[str, None] = {}
    while len(names) < n:
        names[make()] = None
    return list(names)


def digits(rng: Rng, n: int) -> str:
    """Return a random string of `n` decimal digits, the first of which is not 0."""
    return str(rng.between(10 ** (n - 1), 10**n - 1))


def hexadecimal(rng: Rng, n: int) -> str:
    """Return a random string of `n` hexadecimal digits; `n` is at most 16."""
    return f"{rng.bits():016x}"[:n]


def random_key(rng: Rng) -> str:
    """Return a random adjective and noun joined by a hyphen, for example ``rusty-lantern``."""
    return f"{rng.choice(words.ADJECTIVES)}-{rng.choice(words.TOOLS)}"


def random_pair(rng: Rng) -> str:
    """Return two random words, a colour and an animal or a tool, for example ``amber falcon``."""
    return f"{rng.choice(words.COLOURS)} {rng.choice(words.ANIMALS + words.TOOLS)}"


def label(rng: Rng) -> str:
    """Return a random made-up word, for example ``zuvake``."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(3))


def town(rng: Rng) -> str:
    """Return a random made-up name of a town, for example ``Fenmouth``."""
    return rng.choice(words.TOWN_STARTS) + rng.choice(words.TOWN_ENDS)


def person(rng: Rng) -> str:
    """Return a random full name, a real first name with a made-up surname, for example ``Clara Holbrook``."""
    return f"{rng.choice(words.FIRST_NAMES)} {town(rng)}"


def variable(rng: Rng) -> str:
    """Return a random variable name of three capital letters, for example ``QXB``."""
    return "".join(chr(65 + rng.below(26)) for _ in range(3))
