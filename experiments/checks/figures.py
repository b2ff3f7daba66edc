"""Figures of result files, and how tables write them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments import stored

ROOT = Path(__file__).resolve().parents[2]
KI, MIB, GIB = 2**10, 2**20, 2**30
Row = dict[str, Any]


def markdown_grid(head: str, body: Iterable[Sequence[str]], rule: str = "") -> str:
    """Return a table in Markdown.

    Args:
        head: its first line.
        body: the cells of each line behind it.
        rule: cell of the line below the head; empty: numbers are aligned to the right.
    """
    width = head.count("|") - 1
    below = [rule] * width if rule else [":--", *["--:"] * (width - 1)]
    lines = (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in body)  # a cell may be empty
    return "\n".join([head, f"|{'|'.join(below)}|", *lines]) + "\n"


def three(value: float) -> str:
    """Return a number with three digits or all before its point, such as 9.92, 40.2 and 1230."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


@cache
def load_result_json(path: str) -> Any:
    """Return the content of a JSON file, named from the repository's root."""
    return stored.content(ROOT / path)


def benchmark_rows(path: str) -> list[Row]:
    """Return the measurements in a benchmark's file."""
    measured: list[Row] = load_result_json(path)["rows"]
    return measured


@cache
def csv_rows(path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, named from the repository's root."""
    with (ROOT / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def some(among: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in among if all(row.get(key) == value for key, value in wanted.items())]


def one(among: Iterable[Row], **wanted: Any) -> Row:
    """Return the only row with these values.

    Raises:
        LookupError: there is none, or more than one.
    """
    chosen = some(among, **wanted)
    if len(chosen) != 1:
        raise LookupError(f"{len(chosen)} rows have {wanted}")
    return chosen[0]


def range_text(values: Iterable[float]) -> str:
    """Return the smallest and the largest value as text."""
    known = list(values)
    return f"{min(known)} to {max(known)}"


def spread(cell: Row, key: str = "diff", factor: float = 100) -> str:
    """Return a figure and its standard error as text, in per cent if the factor is not another."""
    return f"{factor * cell[key]} ± {abs(factor) * cell['stderr']}"
