"""Rules: where in a document which numbers are, and what the files say that they are."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.checks.numbers import NUMBER

ROOT = Path(__file__).resolve().parents[2]
#: a value that a rule computes; a text: the document must show exactly that; None: the number is something else (a bit
#: width, a length) and stays as it is
Value = float | str | None


class NotFound(Exception):
    """A rule's place is not in its document, or holds another number of numbers than the rule has values."""


@dataclass(frozen=True)
class Shown:
    """A number that a document shows: where, and what its file says."""

    start: int
    stop: int
    value: Value
    source: str


@dataclass(frozen=True)
class Text:
    """Numbers in running text.

    Args:
        document: the file, from the repository's root.
        pattern: words around the numbers, each of which is a ``{}``; any white space matches any other.
        values: what the numbers should be.
        source: the file that they are read from.
    """

    document: str
    pattern: str
    values: Sequence[Value]
    source: str

    def find(self, text: str) -> list[Shown]:
        """Return the numbers. Raises NotFound unless the pattern occurs exactly once."""
        pieces = [r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in self.pattern.split("{}")]
        matches = list(re.finditer(rf"({NUMBER.pattern})".join(pieces), text))
        if len(matches) != 1 or len(pieces) != len(self.values) + 1:
            raise NotFound(
                f"{self.document}: {self.pattern!r} occurs {len(matches)} times, for {len(self.values)} values"
            )
        return [Shown(*matches[0].span(i + 1), value, self.source) for i, value in enumerate(self.values)]


@dataclass(frozen=True)
class Row:
    """The numbers of a table's row behind its first cell.

    Args:
        document: the file, from the repository's root.
        after: text before the table that occurs once (a heading, or the table's own head): the first such row behind it
            is meant; empty: the document has only one.
        label: the first cell.
        values: what the numbers should be, in order.
        source: the file that they are read from.
    """

    document: str
    after: str
    label: str
    values: Sequence[Value]
    source: str

    def find(self, text: str) -> list[Shown]:
        """Return the numbers. Raises NotFound without such a row, or with another number of numbers in it."""
        begin = text.find(self.after)
        where = f"{self.document}: row {self.label!r}{f' after {self.after!r}' if self.after else ''}"
        if self.after and text.count(self.after) != 1:
            raise NotFound(f"{where}: that text occurs {text.count(self.after)} times")
        row = re.compile(rf"^\| *{re.escape(self.label)} *\|(?P<cells>.*)$", re.MULTILINE)
        lines = list(row.finditer(text, begin))
        if not lines or (len(lines) > 1 and not self.after):
            raise NotFound(f"{where}: occurs {len(lines)} times")
        line = lines[0]
        numbers = list(NUMBER.finditer(line["cells"]))
        if len(numbers) != len(self.values):
            raise NotFound(f"{where}: has {len(numbers)} numbers, the rule has {len(self.values)} values")
        first = line.start("cells")
        in_label = NUMBER.finditer(text, line.start(), first)
        labels = [Shown(*number.span(), None, self.source) for number in in_label]
        return labels + [
            Shown(first + number.start(), first + number.end(), value, self.source)
            for number, value in zip(numbers, self.values, strict=True)
        ]


@dataclass(frozen=True)
class Whole:
    """Tables that a program writes: every line of a table in the document is the line of the program's text.

    Args:
        document: the file, from the repository's root.
        text: what the program writes from the file's figures now.
        source: the file that they are read from.
    """

    document: str
    text: str
    source: str

    def find(self, text: str) -> list[Shown]:
        """Return the lines of the document's tables. Raises NotFound if the program writes another number of lines."""
        places, start = [], 0
        for line in text.splitlines(keepends=True):
            if line.startswith("|"):
                places.append((start, start + len(line.rstrip("\n"))))
            start += len(line)
        wanted = [line for line in self.text.splitlines() if line.startswith("|")]
        if len(places) != len(wanted):
            raise NotFound(f"{self.document}: {len(places)} lines in tables, {self.source} gives {len(wanted)}")
        return [Shown(*place, line, self.source) for place, line in zip(places, wanted, strict=True)]


@dataclass(frozen=True)
class Block:
    """What a program writes between the marks ``<!-- NAME:begin ... -->`` and ``<!-- NAME:end -->`` of a document.

    Args:
        document: the file, from the repository's root.
        name: the marks' name.
        text: what the program writes from the file's figures now, whole lines.
        source: the file that they are read from.
    """

    document: str
    name: str
    text: str
    source: str

    def find(self, text: str) -> list[Shown]:
        """Return the block's lines, or the block as a whole if it has another number of them. Raises NotFound."""
        marked = re.search(rf"<!-- {self.name}:begin[^\n]*-->\n(.*?)<!-- {self.name}:end -->", text, re.DOTALL)
        if marked is None:
            raise NotFound(f"{self.document}: no lines between {self.name}:begin and {self.name}:end")
        start, shown, wanted = marked.start(1), marked[1].splitlines(), self.text.splitlines()
        if len(shown) != len(wanted):
            return [Shown(start, marked.end(1), self.text, self.source)]
        places = []
        for line, right in zip(shown, wanted, strict=True):
            places.append(Shown(start, start + len(line), right, self.source))
            start += len(line) + 1
        return places


Rule = Text | Row | Whole | Block


@cache
def load(path: str) -> Any:
    """Return the content of a JSON file, named from the repository's root."""
    return stored.content(ROOT / path)


@cache
def table(path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, named from the repository's root."""
    with (ROOT / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def one(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the only row with these values.

    Raises:
        LookupError: there is none, or more than one.
    """
    chosen = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(chosen) != 1:
        raise LookupError(f"{len(chosen)} rows have {wanted}")
    return chosen[0]
