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
