"""Tables and figures of papers in `results/`: the papers' numbers and claims next to ours, where ours exist."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from kvbench.metrics import intervals
from kvbench.page.numbers import encoded, short_number, shorten_middle, trimmed, whole_or_empty
from kvbench.results import aggregate

#: bytes of all items in the page
MOST_BYTES = 150_000
#: maximum number of cells and claims of one item
MOST_CELLS = 400
#: significant digits of numbers
DIGITS = 4


def items(folder: Path, runs: Set[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the papers' items that have a number or a claim, those with a run of the report first.

    ``python -m experiments`` writes them to files ``<paper>/<item>/cells.json`` or
    ``<paper>/<item>/<variant>/cells.json`` in the folder. The second result is messages about files that are not such
    tables, and about items left out for the page's size. `runs` are the ids of the report's runs.
    """
    chosen: list[dict[str, Any]] = []
    notes: list[str] = []
    for path in sorted({*folder.glob("*/*/cells.json"), *folder.glob("*/*/*/cells.json")}):
        try:
            if path.relative_to(folder).parts[0] == "trials":  # tables that nobody asked to keep
                continue
            content = json.loads(path.read_text(encoding="utf-8"))
            variant = path.parent.name if len(path.relative_to(folder).parts) == 4 else ""
            item = _item(content, variant, runs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            notes.append(f"{path} is not the table of a paper ({type(error).__name__}); skipped")
            continue
        if item is not None:
            chosen.append(item)
    fitting: list[dict[str, Any]] = []
    left_out, size = 0, 0
    for item in sorted(chosen, key=lambda item: not item["mine"]):  # stable: by name within
        needed = len(encoded(item))
        if size + needed > MOST_BYTES:
            left_out += 1
            continue
        size += needed
        fitting.append(item)
    if left_out:
        notes.append(
            f"{left_out} of {len(chosen)} tables and figures of papers are left out, because the page holds at most "
            f"{MOST_BYTES // 1000} kB of them"
        )
    return fitting, notes


class _Names(dict[str, int]):
    """Texts that are stored once and named by their index."""

    def of(self, text: Any, longest: int = 200) -> int:
        """Return the index of a text, which is cut to `longest` characters."""
        return self.setdefault(shorten_middle(text or "", longest), len(self))


def _item(content: Mapping[str, Any], variant: str, runs: Set[str]) -> dict[str, Any] | None:
    """Return one item for the page; None if it has neither a number nor a claim."""
    names = _Names()
    cells = list(_cells(content, names, runs))
    claims = [
        trimmed(
            [
                names.of(claim["claim"]),
                names.of(claim["model"], 80),
                names.of(claim.get("unit"), 20),
                names.of(": ".join(filter(None, (claim.get("verdict"), claim.get("reason"))))),
                *(short_number(claim.get(key), DIGITS) for key in ("paper", "ours")),
                short_number(_paper_reach(claim, "least", "most"), DIGITS),
            ]
        )
        for claim in content.get("claims", ())
    ]
    if not cells and not claims:
        return None
    return {
        "item": shorten_middle(content["item"], 80),
        "variant": shorten_middle(variant, 80),
        "number": shorten_middle(content.get("number") or "", 40),
        "title": shorten_middle(content.get("title") or "", 160),
        "mine": sum(len(cell) > 7 for cell in cells),
        "notes": [shorten_middle(note, 300) for note in [*content.get("marks", ()), *content.get("notes", ())][:6]],
        "cells": cells[:MOST_CELLS],
        "claims": claims[:MOST_CELLS],
        "more": max(0, len(cells) - MOST_CELLS),
        "names": list(names),
    }


def _paper_reach(entry: Mapping[str, Any], low: str, high: str) -> float | None:
    """Return the distance from our number to the farther end of its interval, or its standard error if it has none."""
    if entry.get("ours") is None or entry.get(low) is None or entry.get(high) is None:
        return entry.get("stderr")
    return max(entry["ours"] - entry[low], entry[high] - entry["ours"])


def _cells(content: Mapping[str, Any], names: _Names, runs: Set[str]) -> Iterator[list[Any]]:
    """Yield ``[row, column, model, unit, paper, ours, reach, run]`` for each cell with a paper's number or ours.

    The first four are indices of texts in `names`. `paper` and `ours` are the numbers, and `reach` is the uncertainty
    of ours (:func:`_paper_reach`). `run` is the id of the first of the cell's runs that is in the report. Unknown
    values at the end are left out.
    """
    units = {heading["name"]: heading.get("unit") or "" for heading in content["headings"]}
    for cell in content["cells"]:
        paper, ours = short_number(cell.get("paper"), DIGITS), short_number(cell.get("ours"), DIGITS)
        if paper is None and ours is None:
            continue
        texts = [names.of(cell[key], 80) for key in ("row", "column", "model")]
        run = next((run for run in cell.get("runs") or () if run in runs), None)
        numbers = [paper, ours, short_number(_paper_reach(cell, "low", "high"), DIGITS)]
        yield trimmed([*texts, names.of(units.get(cell["column"]), 20), *numbers, run])


#: file with the scores, below the folder of results
FILE = Path("mini/scores.json")
#: maximum number of settings
MOST = 60


def board(folder: Path) -> list[list[Any]]:
    """Return the settings of the leaderboard, one list each; empty if the folder has no leaderboard.

    Each list is ``[name, method, command, score, its reach, samples, difference from fp16, its reach, KV bytes, fp16's
    bytes, device]``. A reach is the distance to the farther end of the 95 % interval.
    """
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return [_paper_line(entry) for entry in content[:MOST]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _paper_line(entry: dict[str, Any]) -> list[Any]:
    mean, pair, sizes = entry["mean"], entry["mean"].get("vs_fp16") or {}, entry["kv_bytes"]
    apart = aggregate.pair_interval(mean["score"], {**pair, "n": mean["n"]}) if pair else None
    numbers = (
        mean["score"],
        intervals.interval_reach(mean["score"], aggregate.interval_of(mean)),
        mean.get("n"),
        pair.get("diff"),
        intervals.interval_reach(pair.get("diff"), apart),
        round(sizes["used"]),
        round(sizes["fp16_equivalent"]),
    )
    device = ", ".join(map(str, entry.get("devices") or ()))
    keys = [key.partition("@") for key in entry["tasks"]]
    tasks, lengths = (",".join(dict.fromkeys(key[i] for key in keys)) for i in (0, 2))
    data = f"dataset=mini dataset.tasks=[{tasks}] dataset.lengths=[{lengths}] dataset.limit={mean['n'] // len(keys)}"
    command = whole_or_empty(f"python -m kvbench {entry['command']} {data}", 300)
    return trimmed(
        [
            shorten_middle(entry["name"], 80),
            shorten_middle(entry["family"], 40),
            command,
            *map(short_number, numbers),
            shorten_middle(device, 80),
        ]
    )
