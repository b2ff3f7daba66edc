"""Rules: what a document must show, a sentence or what a program writes, from which file; documents held to them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from experiments.stored import ROOT, Row

KI, MIB, GIB = 2**10, 2**20, 2**30

#: a number: a sign without a blank behind it, thousands in groups of three, decimals, an exponent
NUMBER = re.compile(r"(?<![\w.])[+−-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[+-]?\d+)?(?<=\d)")
_PARTS = re.compile(r"(?P<sign>[+−-]?)(?P<whole>[\d,]*)(?:\.(?P<decimals>\d+))?(?:e(?P<exponent>[+-]?\d+))?$")


def value_of(text: str) -> float:
    """Return the value of a number as a document writes it (``−.142``, ``1,319``, ``3e-5``)."""
    return float(text.replace(",", "").replace("−", "-"))


def like(shown: str, value: float) -> str:
    """Return `value` written as `shown` is: its decimals, minus sign, plus, commas, and no zero before a point."""
    parts = _PARTS.match(shown)
    assert parts is not None, f"not a number: {shown!r}"
    decimals, minus = len(parts["decimals"] or ""), "−" if "−" in shown else "-"
    if parts["exponent"] is not None:
        mantissa, power = f"{abs(value):.{decimals}e}".split("e")
        short = parts["exponent"].lstrip("+-").lstrip("0") == parts["exponent"].lstrip("+-")
        digits = f"{mantissa}e{int(power)}" if short else f"{mantissa}e{power}"
    else:
        digits = f"{abs(value):,.{decimals}f}" if "," in shown else f"{abs(value):.{decimals}f}"
    if not parts["whole"] and digits.startswith("0."):
        digits = digits[1:]
    if value < 0 and value_of(digits) != 0:
        return minus + digits
    return "+" + digits if parts["sign"] else digits  # a number with a sign is a difference


def agrees(shown: str, value: float) -> bool:
    """Return True if `shown` is `value`, rounded to its digits; a tie may go either way."""
    parts = _PARTS.match(shown)
    assert parts is not None, f"not a number: {shown!r}"
    unit = 10.0 ** -len(parts["decimals"] or "") * 10.0 ** int(parts["exponent"] or 0)
    return abs(value_of(shown) - value) <= unit / 2 * (1 + 1e-6) + 1e-12


def three(value: float) -> str:
    """Return a number with three digits or all before its point, such as 9.92, 40.2 and 1230."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def range_text(values: Iterable[float]) -> str:
    """Return the smallest and the largest value as text."""
    known = list(values)
    return f"{min(known)} to {max(known)}"


def spread(cell: Row, key: str = "diff", factor: float = 100) -> str:
    """Return a figure and its standard error as text, in per cent if the factor is not another."""
    return f"{factor * cell[key]} ± {abs(factor) * cell['stderr']}"


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
    """Generated part of a document: the lines between two marks, or the lines of all its tables.

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


@dataclass(frozen=True)
class Difference:
    """A place where a document and a file differ; `line` counts from 1."""

    document: str
    line: int
    shown: str
    wanted: str
    source: str

    def __str__(self) -> str:
        shown, wanted = (text.split("\n")[0] + (" ..." if "\n" in text else "") for text in (self.shown, self.wanted))
        return f"{self.document}:{self.line}: shows {shown}, {self.source} gives {wanted}"


@dataclass
class Checked:
    """The outcome of a comparison.

    Attributes:
        differences: numbers that differ from their file.
        lost: rules whose place is not in the document, or whose figures are not in the file.
        covered: for each document the characters (offsets) of the numbers and lines that a rule covers.
    """

    differences: list[Difference] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    covered: dict[str, set[int]] = field(default_factory=dict)


def check_documents(wanted: Iterable[Rule], root: Path = ROOT, write: bool = False) -> Checked:
    """Compare the documents below `root` with the files, by these rules; `write` what the files give into them."""
    outcome, grouped = Checked(), dict[str, list[Rule]]()
    try:
        for rule in wanted:
            grouped.setdefault(rule.document, []).append(rule)
    except (LookupError, OSError) as error:
        outcome.lost.append(f"{type(error).__name__}: {error}")
    for document, mine in grouped.items():
        text = (root / document).read_text(encoding="utf-8")
        changes: dict[tuple[int, int], tuple[str, str]] = {}
        covered = outcome.covered[document] = set()
        for rule in mine:
            try:
                places = rule.find(text)
            except NotFound as error:
                outcome.lost.append(str(error))
                continue
            for place in places:
                covered.update(range(place.start, place.stop))
                new = _wanted(text, place)
                if new is not None:
                    changes[place.start, place.stop] = (new, place.source)
        for (start, stop), (right, source) in sorted(changes.items()):
            line = text.count("\n", 0, start) + 1
            outcome.differences.append(Difference(document, line, text[start:stop], right, source))
        if write and changes:
            for (start, stop), (right, _) in sorted(changes.items(), reverse=True):
                text = text[:start] + right + text[stop:]
            (root / document).write_text(text, encoding="utf-8")
    return outcome


def _wanted(text: str, place: Shown) -> str | None:
    """Return what the document should show at a place; None if it does."""
    shown = text[place.start : place.stop]
    if isinstance(place.value, str):
        return None if shown == place.value else place.value
    return None if agrees(shown, place.value) else like(shown, place.value)


def write_blocks(blocks: Iterable[Block], root: Path = ROOT) -> int:
    """Write what programs write into their documents; return the exit status: 1 if a document has lost its marks."""
    lost = check_documents(blocks, root, write=True).lost
    for place in lost:
        print(f"error: {place}", file=sys.stderr)
    return 1 if lost else 0
