"""The English words from which RULER draws keys and lists: those of the package wonderwords, version 3.0.1."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import accumulate
from typing import overload

from kvbench.errors import DataError
from kvbench.tasks.ruler.stream import Stream

#: the version whose lists RULER's published prompts use; another version changes every key
VERSION = "3.0.1"


@cache
def words(kind: str) -> tuple[str, ...]:
    """Return the words of one list of wonderwords: ``noun``, ``adjective`` or ``verb``.

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


class Pairs(Sequence[str]):
    """All pairs ``adjective-noun``, sorted, each once; a pair is made when it is asked for, as there are millions.

    Pairs of one adjective follow each other, unless it begins like another one that ends there with a hyphen (``well``
    and ``well-known``): the pairs of such adjectives are sorted together.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        groups: list[list[str]] = []
        for first in sorted(f"{adjective}-" for adjective in set(adjectives)):
            if groups and first.startswith(groups[-1][0]):
                groups[-1].append(first)
            else:
                groups.append([first])
        self._groups: list[str | list[str]] = [
            group[0] if len(group) == 1 else sorted({first + noun for first in group for noun in self._nouns})
            for group in groups
        ]
        sizes = (len(self._nouns) if isinstance(group, str) else len(group) for group in self._groups)
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...

    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        at = bisect_right(self._ends, number)
        group, number = self._groups[at], number - (self._ends[at - 1] if at else 0)
        return group + self._nouns[number] if isinstance(group, str) else group[number]


@cache
def pairs() -> Pairs:
    """Return all pairs ``adjective-noun`` of wonderwords, sorted, each once: about 6.2 million."""
    return Pairs(words("adjective"), words("noun"))


def listed(stream: Stream) -> list[str]:
    """Return all nouns, adjectives and verbs, each once, shuffled."""
    every = sorted({*words("noun"), *words("adjective"), *words("verb")})
    stream.shuffle(every)
    return every


def checksum(lines: Sequence[str]) -> str:
    """Return the SHA-256 of a list of words, joined by line feeds."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
