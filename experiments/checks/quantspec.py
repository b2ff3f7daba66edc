"""Rules for results/quantspec, and for what docs/methods.md quotes of it."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import Rule, Text, Whole, load
from experiments.quantspec import lines, table

ACCEPTANCE = "results/quantspec/acceptance-tiny-float32-t0.json"
EQUALITY = "results/quantspec/equality.json"


def rules() -> Iterator[Rule]:
    """Yield the rules of results/quantspec and of the table of drafts in docs/methods.md."""
    cells = load(ACCEPTANCE)
    texts = []
    for data in dict.fromkeys(cell["data"] for cell in cells):
        mine = [cell for cell in cells if cell["data"] == data]
        texts += [*table.rates(mine), "", *table.differences(mine), ""]
    yield Whole(ACCEPTANCE.replace(".json", ".md"), "\n".join(texts), ACCEPTANCE)

    shown = load(EQUALITY)
    yield Whole(EQUALITY.replace(".json", ".md"), "\n".join(lines.rows(shown["rows"])), EQUALITY)
    document, runs = "results/quantspec/equality.md", sum(row["prompts"] for row in shown["rows"])
    yield Text(document, "{} runs; {} drafts were rejected in total.", [runs, shown["refused"]], EQUALITY)
    smallest = "Smallest gap between the two best logits: {}."
    yield Text(document, smallest, [shown["smallest_gap"]], EQUALITY)

    if "again" in shown:
        again = shown["again"]["rows"]
        values = [again[0]["prompts"], *(sum(row[key] for row in again) for key in ("equal", "prompts"))]
        yield Text(document, "Made again on 2026-11-22 with {} prompts: {} of {} runs equal.", values, EQUALITY)

    four = [cell for cell in cells if cell["gamma"] == 4]
    books, mini = ([cell for cell in four if cell["data"] == data] for data in ("books", "mini"))
    values = [
        100 * cell[key]
        for pair in zip(books, mini, strict=True)
        for cell in pair
        for key in ("acceptance_rate", "stderr")
    ]
    pattern = "| " + " | ".join(["{} ± {} / {} ± {}"] * len(books)) + " |"
    yield Text("docs/methods.md", pattern, values, ACCEPTANCE)
    values = [four[0]["length"], four[0]["prompts"]]
    yield Text(
        "docs/methods.md", "on PG-19-like books / on mini: {} tokens, {} prompts each, γ = 4", values, ACCEPTANCE
    )
