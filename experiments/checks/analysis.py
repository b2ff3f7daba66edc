"""Rules for results/analysis."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import ROOT, Rule, Whole
from kvbench.analysis.outcome import Outcome
from kvbench.analysis.table import markdown


def rules() -> Iterator[Rule]:
    """Yield a rule for each folder: its table is that of its rows."""
    for document in sorted((ROOT / "results" / "analysis").glob("*/table.md")):
        folder = document.parent.relative_to(ROOT)
        text = markdown(Outcome.load(document.parent, arrays=False))
        yield Whole(f"{folder}/table.md", text, f"{folder}/rows.jsonl")
