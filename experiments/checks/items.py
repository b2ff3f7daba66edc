"""Rules for the tables of items (results/PAPER/ITEM and the scales below it): those of the cells beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments import stored
from experiments.checks.rules import ROOT, Rule, Whole
from experiments.place import TRIALS


def rules(root: Path = ROOT) -> Iterator[Rule]:
    """Yield a rule for each item whose table is in results."""
    results = root / "results"
    paths = sorted([*results.glob("*/*/cells.json"), *results.glob("*/*/*/cells.json")])
    paths = [path for path in paths if path.relative_to(results).parts[0] != TRIALS]
    if not paths:
        return
    from experiments.draw.table import markdown
    from experiments.registry import items
    from experiments.write import read

    known = items()
    for path in paths:
        content = stored.content(path)
        if "headings" not in content:  # of an older version; --uncovered lists its table
            continue
        document = str(path.with_name("table.md").relative_to(root))
        text = markdown(known[content["item"]], read(content))
        yield Whole(document, text, str(path.relative_to(root)))
