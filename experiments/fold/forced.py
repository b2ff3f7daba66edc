"""Speeds at a forced acceptance: JSON files of ``python -m kvbench.bench speculation``, measured with random weights.

Drafts were accepted by chance with the same probability for all of them; the text was meaningless, the times are real.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.data import Plan
from experiments.fold.analytic import SHARES, length, shares, weights_or_kv
from experiments.fold.cells import OUT_OF_MEMORY, Cell, Folded
from experiments.fold.grid import Source
from experiments.item import Column, Computed
from kvbench.bench.choices import shape_of
from kvbench.config.setting import parse_setting
from kvbench.profiling.roofline import Shape
from kvbench.tasks.efficiency import point_id

FOLDER = stored.ROOT / "results" / "h200" / "speculation"
#: figures of columns with such speeds; no run of kvbench's data sets has them
FIGURES = ("forced_speedup", "forced_rate", "forced_peak")
COMMAND = "python -m kvbench.bench speculation"
#: rows of Figure 5 -> cases of the command
CASES = {"KV cache only": "kv", "weights only": "weights", "both": "quantspec"}
Key = tuple[Shape, str, int, int]


def case_of(setting: str) -> str:
    """Return the command's case for a setting of QuantSpec's tables: that with the same draft, or ``plain``."""
    speculation = parse_setting(setting).load().speculation
    if speculation is None:
        return "plain"
    return "quantspec" if speculation.draft == "upper" else str(speculation.draft)


def forced_source(model: str, case: str, column: Column, folder: Path | None = None) -> Source:
    """Return the source of a case at a column's prompt length and batch; without rows if no file of the folder has it.

    The points of a model with the same dimensions are the model's points too. A folder of None is :data:`FOLDER`.
    """
    source = forced_speeds(folder or FOLDER).get((shape_of(model), case, column.prompt, column.batch))
    return source or Source({}, reason=f"not measured: {COMMAND}")


@cache
def forced_speeds(folder: Path) -> Mapping[Key, Source]:
    """Return the speeds of all files of a folder, by :data:`Key`: dimensions, case, tokens and batch."""
    by_key: dict[Key, Source] = {}
    for path in sorted(folder.glob("*.json")):
        content = stored.content(path)
        for row in content.get("rows", ()):
            if "case" not in row or "context" not in row:
                continue  # another command's file
            source = _speed_source(path, content, row)
            key = (shape_of(row["model"]), row["case"], row["context"], row["batch"])
            known = by_key.get(key)
            if known is None or not known.rows or _forced(source).get("speedup") is not None:
                by_key[key] = source
    return by_key


def _speed_source(path: Path, content: Mapping[str, Any], row: Mapping[str, Any]) -> Source:
    """Return the source of a row: its measured time per token at the acceptance of the file."""
    device, steps = content.get("device", ""), str(row.get("stepping", "")).split(" (")[0]
    one = row if row["case"] == "plain" else at_acceptance(row, content["at"])
    if "ms" not in one:
        ended = OUT_OF_MEMORY if row["status"] == "oom" else row["status"]
        return Source({}, (path.name,), f"{ended} on {device}")
    plain = plain_ms(content["rows"], (row["model"], row["batch"], row["context"]))
    speedup = None if plain is None else plain / one["ms"]
    best = f"acceptance {content['at']:g}, gamma {one['gamma']}" if "gamma" in one else ""
    forced = {"speedup": speedup, "tokens_per_s": 1e3 * row["batch"] / one["ms"], "peak": row.get("peak"), "best": best}
    note = ", ".join(part for part in (device, steps) if part)
    name = point_id(row["context"], row["batch"])
    return Source({name: {"id": name, "measured": {"point": {"forced": forced}}}}, (path.name,), "", note)


def plain_ms(rows: Sequence[Mapping[str, Any]], place: tuple[str, int, int]) -> float | None:
    """Return the milliseconds per token of plain decoding in one file's rows; None if they lack it.

    `place` is the model, the batch and the tokens in the cache.
    """
    mine = [row for row in rows if row.get("case") == "plain" and (row["model"], row["batch"], row["context"]) == place]
    return mine[0].get("ms") if mine else None


def at_acceptance(row: Mapping[str, Any], acceptance: float) -> Mapping[str, Any]:
    """Return what was measured at an acceptance with the best gamma; empty if nothing was."""
    return next((one for one in row.get("measured", ()) if one["acceptance"] == acceptance), {})


def shares_of_speed(item: Computed, plan: Plan, folder: Path | None = None) -> Folded:
    """Return Figure 5: measured speed-ups with quantized keys and values, weights, or both, and predicted ones.

    The item's options are those of :func:`~experiments.fold.analytic.weights_or_kv`; without a folder it is
    :data:`FOLDER`.
    """
    predicted = weights_or_kv(item, plan)
    cells, verdicts, tables = [], [], []
    for model in plan.models_of(item):
        table: dict[tuple[str, int], float] = {}
        for context in item.options["contexts"]:
            column = Column(length(context), "efficiency", prompt=context, batch=1)
            for row, case in CASES.items():
                source = forced_source(model.preset, case, column, folder)
                forced = _forced(source)
                factor = forced.get("speedup")
                place = (model.title, row, column.name)
                if factor is None:
                    cells.append(Cell(*place, reason=source.reason or f"not measured: {COMMAND}"))
                    continue
                table[row, context] = factor
                cells.append(Cell(*place, ours=factor, n=1, runs=source.runs, note=forced["best"]))
        complete = [c for c in item.options["contexts"] if all((row, c) in table for row in CASES)]
        tables.append(bool(complete))
        if complete:
            verdicts += shares(model, table, complete, computed=False)
    for cell in predicted.cells:
        cells.append(replace(cell, row=_predicted_name(cell.row)))
    return Folded(
        predicted.headings,
        [*CASES, *map(_predicted_name, SHARES)],
        predicted.models,
        cells,
        verdicts=verdicts if all(tables) else predicted.verdicts,
        notes=predicted.notes,
    )


def _predicted_name(row: str) -> str:
    return f"{row}, predicted"


def _forced(source: Source) -> Mapping[str, Any]:
    """Return the figures of a source's only point; none without one."""
    return next((row["measured"]["point"]["forced"] for row in source.rows.values()), {})
