"""The files of a folded item: ``table.md``, ``table.tex``, ``table.csv``, ``cells.json`` and the picture."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.draw.figure import draw
from experiments.draw.table import latex, markdown, to_csv
from experiments.fold.cells import Cell, Folded, Heading, Verdict
from experiments.item import Item
from experiments.plan import Plan
from kvbench.util import atomic


def write(item: Item, folded: Folded, plan: Plan) -> tuple[Path, str]:
    """Write all files of an item; return their folder and the reason why there is no picture, if any."""
    folder = plan.folder(item)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "item": item.id,
        "number": item.number,
        "title": item.title,
        "caption": " ".join(item.caption.split()),
        "data": plan.data,
        "limit": plan.limit,
        "options": {
            "models": list(plan.models),
            "max_new_tokens": plan.max_new_tokens,
            "lengths": list(plan.lengths),
        },
        "marks": list(folded.marks),
        "notes": list(folded.notes),
        "headings": [asdict(heading) for heading in folded.headings],
        "rows": list(folded.rows),
        "models": list(folded.models),
        "base": folded.base,
        "claims": [asdict(one) for one in folded.verdicts],
        "cells": [{**asdict(cell), "difference": cell.difference} for cell in folded.cells],
        "arrays": folded.arrays,
    }
    texts = {
        "table.md": markdown(item, folded),
        "table.tex": latex(item, folded),
        "table.csv": to_csv(folded),
        "cells.json": json.dumps(_finite(content), indent=1, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        atomic.write(folder / name, text.encode())
    return folder, draw(item, folded, folder)


def read(content: dict[str, Any]) -> Folded:
    """Return the folded item of a ``cells.json``, without the arrays of its picture."""
    verdicts = []
    for claim in content["claims"]:  # JSON has no infinity
        low = -math.inf if claim["low"] is None else claim["low"]
        high = math.inf if claim["high"] is None else claim["high"]
        verdicts.append(Verdict(**{**claim, "low": low, "high": high}))
    cells = [{key: value for key, value in cell.items() if key != "difference"} for cell in content["cells"]]
    return Folded(
        headings=[Heading(**heading) for heading in content["headings"]],
        rows=content["rows"],
        models=content["models"],
        cells=[Cell(**{**cell, "runs": tuple(cell["runs"])}) for cell in cells],
        base=content["base"],
        verdicts=verdicts,
        notes=content["notes"],
        marks=content["marks"],
    )


def _finite(value: Any) -> Any:
    """Return JSON data with infinite and undefined numbers as None."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
