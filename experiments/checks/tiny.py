"""Rules for results/tiny."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import Rule, Text, Whole, load
from experiments.tiny import perplexity, report


def rules() -> Iterator[Rule]:
    """Yield the rules of results/tiny."""
    scores, sensitivity, levels = (f"results/tiny/{name}.json" for name in ("scores", "sensitivity", "perplexity"))
    yield Whole("results/tiny/scores.md", report.table(load(scores)["scores"]), scores)
    yield Whole("results/tiny/sensitivity.md", report.sensitivity(load(sensitivity)), sensitivity)
    document = "results/tiny/perplexity.md"
    yield Whole(document, perplexity.tables(load(levels)), levels)
    for pattern, values in perplexity.quoted(load(levels)):
        yield Text(document, pattern, values, levels)
    if "again" in load(levels):
        cells, again = load(levels)["cells"], load(levels)["again"]["cells"]
        changes = [abs(cell["diff"] - cells[key]["diff"]) for key, cell in again.items() if cell["diff"] is not None]
        pattern = "Of its {} cells {} were made again on 2026-11-22"
        yield Text(document, pattern, [len(cells), len(again)], levels)
        yield Text(document, "differ from the ones below by at most {}.", [max(changes)], levels)
