"""Rules: what a document must show, a sentence with its figures or what a program writes, and from which file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from experiments.checks.numbers import NUMBER, value_of


class NotFound(Exception):
    """A rule's place is not in its document, or has another number of lines than its program writes."""


@dataclass(frozen=True)
class Shown:
    """A part of a document, and what its file says: a number to be shown rounded, or a text to be shown as it is."""

    start: int
    stop: int
    value: float | str
    source: str


@dataclass(frozen=True)
class Text:
    """A sentence, or a part of one that occurs once, with the figures of a file.

    Args:
        document: the file, from the repository's root.
        source: the file that the figures are read from.
        sentence: what the document says, its figures in all their digits; any white space matches any other. The
            document shows each number with as many digits as it likes.
    """

    document: str
    source: str
    sentence: str

    def find(self, text: str) -> list[Shown]:
        """Return the sentence's numbers in a document. Raises NotFound unless its words occur exactly once."""
        words = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in NUMBER.split(self.sentence))
        matches = list(re.finditer(f"({NUMBER.pattern})".join(words), text))
        if len(matches) != 1:
            raise NotFound(f"{self.document}: {self.sentence!r} occurs {len(matches)} times, whatever its numbers")
        values = map(value_of, NUMBER.findall(self.sentence))
        return [Shown(*matches[0].span(i), value, self.source) for i, value in enumerate(values, start=1)]


@dataclass(frozen=True)
class Block:
    """What a program writes into a document: the lines between two marks, or the lines of all its tables.

    The marks are ``<!-- NAME:begin ... -->`` and ``<!-- NAME:end -->``.

    Args:
        document: the file, from the repository's root.
        text: what the program writes from the file's figures now, whole lines.
        source: the file that they are read from.
        name: the marks' name; empty: the lines of all tables of the document.
    """

    document: str
    text: str
    source: str
    name: str = ""

    def find(self, text: str) -> list[Shown]:
        """Return the lines; what is between marks is one part if the program writes another number of lines.

        Raises:
            NotFound: the marks are missing, or without marks the program writes another number of lines.
        """
        start, stop, prefix = 0, len(text), "|"
        if self.name:
            marked = re.search(rf"<!-- {self.name}:begin[^\n]*-->\n(.*?) *<!-- {self.name}:end -->", text, re.DOTALL)
            if marked is None:
                raise NotFound(f"{self.document}: no lines between {self.name}:begin and {self.name}:end")
            start, stop, prefix = *marked.span(1), ""
        wanted = [line for line in self.text.splitlines() if line.startswith(prefix)]
        places = [place for place in _line_places(text, start, stop) if text.startswith(prefix, place[0])]
        if len(places) == len(wanted):
            return [Shown(*place, line, self.source) for place, line in zip(places, wanted, strict=True)]
        if self.name:
            return [Shown(start, stop, "".join(f"{line}\n" for line in wanted), self.source)]
        raise NotFound(f"{self.document}: {len(places)} lines in tables, {self.source} gives {len(wanted)}")


Rule = Text | Block


def _line_places(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the places of a text's lines, without their ends."""
    for line in text[start:stop].splitlines(keepends=True):
        yield start, start + len(line.rstrip("\n"))
        start += len(line)
