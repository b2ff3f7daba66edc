"""Rules for results/h200/speculation, and for the tables of speed-ups in docs/speed.md and README.md."""

from __future__ import annotations

from collections.abc import Iterator

from experiments import speculation
from experiments.checks.numbers import NUMBER
from experiments.checks.rules import Row, Rule, Whole

SOURCE = "results/h200/speculation"


def rules() -> Iterator[Rule]:
    """Yield the rules; none before anything has been measured."""
    results = speculation.Results()
    if not results.points():
        return
    yield Whole(f"{SOURCE}/tables.md", speculation.text(results), SOURCE)
    for page, lines in (("docs/speed.md", speculation.speeds(results)), ("README.md", speculation.brief(results))):
        for line in lines[2:]:
            label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            values = [match[0] for cell in cells if (match := NUMBER.search(cell))]
            yield Row(page, speculation.BEGIN, label, values, SOURCE)
