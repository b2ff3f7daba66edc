"""Tables and figures of papers in which a run of the report is a cell: the paper's number next to ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from kvbench.page.numbers import cut, encoded, short

#: bytes of all items in the page
MOST_BYTES = 100_000
#: maximum number of cells and claims of one item
MOST_CELLS = 400


def items(folder: Path, runs: Set[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the papers' items that a report's runs belong to.

    Args:
        folder: folder with the files ``<paper>/<item>/cells.json`` or ``<paper>/<item>/<variant>/cells.json``, which
            ``python -m experiments`` writes.
        runs: ids of the report's runs.

    Returns:
        The items, and messages about files that are damaged or no longer fit.
    """
    chosen: list[dict[str, Any]] = []
    notes: list[str] = []
    size = 0
    for path in sorted({*folder.glob("*/*/cells.json"), *folder.glob("*/*/*/cells.json")}):
        try:
            item = _item(json.loads(path.read_text(encoding="utf-8")), runs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            notes.append(f"{path} is not the table of a paper ({type(error).__name__}); skipped")
            continue
        if item is None:
            continue
        size += len(encoded(item))
        if size > MOST_BYTES:
            notes.append(f"{path} is left out, because the page holds at most {MOST_BYTES // 1000} kB of papers' items")
            size -= len(encoded(item))
            continue
        chosen.append(item)
    return chosen, notes


def _item(content: Mapping[str, Any], runs: Set[str]) -> dict[str, Any] | None:
    """Return one item for the page; None if no cell is of a run of the report, or nothing has both numbers."""
    if not any(run in runs for cell in content["cells"] for run in cell.get("runs") or ()):
        return None
    cells = list(_cells(content))
    claims = [
        [cut(claim["claim"], 200), cut(claim["model"], 80), *map(short, (claim["paper"], claim["ours"]))]
        + [short(claim.get("stderr")), cut(claim.get("unit") or "", 20), cut(claim.get("verdict") or "", 60)]
        for claim in content.get("claims", ())
        if short(claim.get("ours")) is not None
    ]
    if not cells and not claims:
        return None
    return {
        "item": cut(content["item"], 80),
        "number": cut(content.get("number") or "", 40),
        "title": cut(content.get("title") or "", 160),
        "notes": [cut(note, 300) for note in [*content.get("marks", ()), *content.get("notes", ())][:6]],
        "cells": cells[:MOST_CELLS],
        "claims": claims[:MOST_CELLS],
    }


def _cells(content: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield ``[row, column, model, unit, paper, ours, standard error, run]`` per cell that has both numbers."""
    units = {heading["name"]: heading.get("unit") or "" for heading in content["headings"]}
    for cell in content["cells"]:
        paper, ours = short(cell.get("paper")), short(cell.get("ours"))
        if paper is None or ours is None:
            continue
        names = [cut(cell[key], 80) for key in ("row", "column", "model")]
        run = next(iter(cell.get("runs") or ()), None)
        yield [*names, cut(units.get(cell["column"], ""), 20), paper, ours, short(cell.get("stderr")), run]
