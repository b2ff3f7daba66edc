"""The English words from which RULER draws keys and lists: those of the package wonderwords, version 3.0.1."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from kvbench.errors import DataError
from kvbench.tasks.ruler.stream import Stream

#: the version whose lists RULER's published prompts use; another version changes every key
VERSION = "3.0.1"


@cache
def words(kind: str) -> tuple[str, ...]:
    """Return the words of one list of wonderwords.

    Args:
        kind: ``noun``, ``adjective`` or ``verb``.

    Raises:
        DataError: another version of wonderwords is installed.
    """
    if version("wonderwords") != VERSION:
        raise DataError(
            f"dataset ruler needs wonderwords {VERSION}, but {version('wonderwords')} is installed; with its words, "
            f"all prompts would differ from RULER's.\n  hint: pip install wonderwords=={VERSION}"
        )
    text = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())  # as wonderwords itself reads them


@cache
def pairs() -> tuple[str, ...]:
    """Return all pairs ``adjective-noun``, sorted, each once: about 6.2 million."""
    return tuple(sorted({f"{adjective}-{noun}" for adjective in words("adjective") for noun in words("noun")}))


def listed(stream: Stream) -> list[str]:
    """Return all nouns, adjectives and verbs, each once, shuffled."""
    every = sorted({*words("noun"), *words("adjective"), *words("verb")})
    stream.shuffle(every)
    return every


def checksum(lines: Sequence[str]) -> str:
    """Return the SHA-256 of a list of words, joined by line feeds."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
