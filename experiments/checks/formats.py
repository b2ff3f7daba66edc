"""Rules for results/formats, and for what docs/which-format.md quotes of it and of results/h200/formats."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import Rule, Whole, load
from experiments.formats.report import markdown
from experiments.formats.tpot import SOURCE, steps
from experiments.formats.which import PAGE, table

FOLDER = "results/formats"


def rules() -> Iterator[Rule]:
    """Yield the rules of the table of formats."""
    lines, claims = f"{FOLDER}/lines.json", f"{FOLDER}/claims.json"
    yield Whole(f"{FOLDER}/table.md", markdown(load(lines), load(claims), steps()), f"{lines}, {claims}, {SOURCE}")
    yield Whole(PAGE, table(), f"{lines}, results/h200/formats")
