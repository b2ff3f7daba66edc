"""The files of a folded item: ``table.md``, ``table.tex``, ``table.csv``, ``cells.json`` and the picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from experiments import stored
from experiments.data import Plan
from experiments.draw.figure import draw_item
from experiments.draw.table import item_markdown, latex, to_csv
from experiments.fold.cells import Cell, Folded, Heading, Verdict, interval_fields
from experiments.fold.claims import OPEN
from experiments.item import Item
from experiments.place import Choice, Place, place_result
from kvbench.metrics import intervals
from kvbench.util import atomic

PICTURES = ("figure.png", "figure.svg")


def write_item(item: Item, folded: Folded, plan: Plan) -> tuple[Place, str]:
    """Write all files of an item; return their place and the reason why there is no picture, if any."""
    wanted, item = plan.folder(item), replace(item, caption=item.caption_with(plan.data))
    before = stored.content(wanted / "cells.json") if (wanted / "cells.json").exists() else None
    old = [] if before is None else read_folded(before).cells
    same = _numbers(old) == _numbers(folded.cells)  # then the picture is still that of the cells
    pictures = [] if item.draw == "table" else [wanted / name for name in PICTURES]
    chosen = Choice(write=plan.write, replace=plan.replace)
    where = place_result(wanted, chosen, _samples(folded.cells), _samples(old), pictures, same)
    folder = where.path
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
        "table.md": item_markdown(item, folded),
        "table.tex": latex(item, folded),
        "table.csv": to_csv(folded),
        "cells.json": json.dumps(_finite(content), indent=1, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        atomic.replace_file(folder / name, text.encode())
    return where, draw_item(item, folded, folder)


def _samples(cells: Sequence[Cell]) -> dict[str, int]:
    """Return the number of samples of each cell; 0 for one without a number."""
    return {", ".join(filter(None, (c.model, c.row, c.column))): c.n or 1 if c.ours is not None else 0 for c in cells}


def _numbers(cells: Sequence[Cell]) -> dict[tuple[str, str, str], float | None]:
    return {(cell.model, cell.row, cell.column): cell.ours for cell in cells}


def read_folded(content: dict[str, Any]) -> Folded:
    """Return the folded item of a ``cells.json``, without the arrays of its picture.

    Files of older versions have standard errors alone: their intervals are those of the moments.
    """
    headings = [Heading(**heading) for heading in content["headings"]]
    shares = {heading.name for heading in headings if heading.unit == "%"}
    cells = [_read_cell(cell, 100.0 if cell["column"] in shares else None) for cell in content["cells"]]
    kept = {key: content[key] for key in ("rows", "models", "base", "notes", "marks")}
    return Folded(headings=headings, cells=cells, verdicts=claims_of(content), **kept)


def claims_of(content: Mapping[str, Any]) -> list[Verdict]:
    """Return the claims of a ``cells.json`` with their verdicts."""
    verdicts = []
    for claim in content["claims"]:  # JSON has no infinity
        low = -math.inf if claim["low"] is None else claim["low"]
        high = math.inf if claim["high"] is None else claim["high"]
        word = {"cannot be seen": OPEN}.get(claim["verdict"], claim["verdict"])  # of older versions
        verdicts.append(Verdict(**{**claim, "low": low, "high": high, "verdict": word}))
    return verdicts


def _read_cell(known: dict[str, Any], scale: float | None) -> Cell:
    """Return a cell of a ``cells.json``; `scale` is the largest number of a column of shares or scores, else None."""
    cell = Cell(**{**{key: value for key, value in known.items() if key != "difference"}, "runs": (*known["runs"],)})
    if "low" in known or cell.ours is None or cell.stderr is None:
        return cell
    if scale is None:
        more = interval_fields(intervals.of_moments(cell.ours, cell.stderr, cell.n))
        if cell.to_base is not None:
            more |= interval_fields(intervals.of_moments(cell.to_base, cell.to_base_stderr, cell.n), "to_base_")
        return replace(cell, **more)
    own, error = cell.ours / scale, cell.stderr / scale
    low, high = intervals.of_score_moments(own, error, cell.n) or (0.0, 1.0)
    cell = replace(cell, low=scale * low, high=scale * high)
    if cell.to_base is None or cell.to_base_stderr is None:
        return cell
    gap, spread = cell.to_base / scale, cell.to_base_stderr / scale
    low, high = intervals.of_pair_moments(own, own - gap, spread, cell.n) or (-1.0, 1.0)
    return replace(cell, to_base_low=scale * low, to_base_high=scale * high)


def _finite(value: Any) -> Any:
    """Return JSON data with infinite and undefined numbers as None."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
