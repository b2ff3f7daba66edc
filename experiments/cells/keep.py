"""Measurements of the worker as files of results: points of time and memory, and speeds at a forced acceptance."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.cells.worker import ended_late
from experiments.fold.points import FOLDERS, canonical
from experiments.stored import ROOT
from kvbench.bench.report import write_json

COMMAND = "python -m experiments.cells measure"
Line = Mapping[str, Any]


def keep(lines: Iterable[Line], root: Path = ROOT) -> list[Path]:
    """Write the rows of logged jobs below ``results/h200`` of `root`, and return the files.

    Points of a model, a memory limit and a device are one file, named so that it is read after those of single
    commands; a row replaces one of the same setting, prompt and batch. A row that failed for another reason than
    memory, that was not finished, or whose memory ended late (:func:`ended_late`), is left out.
    """
    files: dict[Path, dict[str, Any]] = {}
    for line in lines:
        content = line.get("content")
        if not content:
            continue
        points = line["job"]["data"] == "efficiency"
        rows = [row for row in content["rows"] if row["status"] in ("ok", "oom") and not ended_late(row)]
        if not rows:
            continue
        path = _place(root, line, content, points)
        whole = files.setdefault(path, _kept_file(path))
        same = _point if points else _case
        kept = {same(row): row for row in whole.get("rows", ())}
        kept |= {same(row): row for row in rows}
        about = {key: value for key, value in content.items() if key != "rows"}
        if points:
            about |= {"command": COMMAND}
        files[path] = {**about, "rows": list(kept.values())}
    for path, content in files.items():
        write_json(path, content)
    return list(files)


def _kept_file(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = stored.content(path) if path.exists() else {}
    return found


def _place(root: Path, line: Line, content: Mapping[str, Any], points: bool) -> Path:
    """Return the file of a job's rows; that of another card than an H200 has the card in its name."""
    card = re.sub(r"[^a-z0-9]+", "_", str(content["device"]).lower().replace("nvidia", "")).strip("_")
    card = "" if card == "h200" else f"_{card}"
    model = Path(line["job"]["model"]).name.removesuffix(".yaml")
    if not points:
        context = content["rows"][0]["context"]
        return root / "results" / "h200" / "speculation" / f"forced_{model}_{context}{card}.json"
    limit = content.get("memory_limit_gb")
    limit_text = "" if limit is None else f"_{limit:g}gib"
    # behind table5_*.json, whose steps without module II were eager
    return root / "results" / "h200" / FOLDERS[-1].name / f"timed_{model}{limit_text}{card}.json"


def _point(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return canonical(row["setting"]), row["prompt"], row["batch"]


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["context"], row["batch"], row["case"]
