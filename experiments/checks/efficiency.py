"""Rules for results/efficiency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from experiments.checks.rules import Rule, Whole, table
from experiments.efficiency.fold import tables
from kvbench.results.point_record import Point

SOURCE = "results/efficiency/points.csv"


def rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Whole("results/efficiency/table.md", tables([_point(row) for row in table(SOURCE)]), SOURCE)


def _point(row: dict[str, str]) -> Point:
    """Return a line of the file as the point that it was written from."""
    values: dict[str, Any] = {}
    for field in fields(Point):
        text, kind = row.get(field.name) or "", str(field.type)
        if not text:
            values[field.name] = None if "None" in kind else ""
        else:
            values[field.name] = int(text) if "int" in kind else float(text) if "float" in kind else text
    return Point(**values)
