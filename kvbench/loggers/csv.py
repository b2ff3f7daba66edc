"""One row per finished run, appended to a CSV file that several processes may share."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvbench import atomic
from kvbench.loggers.base import Logger


class CsvLogger(Logger):
    """Appends to `path`; when a run brings new columns (other tasks) the file is rewritten with them, atomically.

    Args:
        path: for example ``results/runs.csv``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Append the run's row. Raises OSError; the file then holds what it held."""
        row = flat_row(metrics)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            columns, rows = self._read()
            wanted = columns + [key for key in row if key not in columns]  # a row begins with what identifies it
            if columns == wanted:
                self._append(_text([row], wanted, header=False))
            else:
                atomic.write(self.path, _text([*rows, row], wanted, header=True).encode())

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        try:
            with self.path.open(encoding="utf-8", newline="") as handle:
                reader = csv.DictReader(handle)
                return list(reader.fieldnames or []), [{k: v or "" for k, v in row.items() if k} for row in reader]
        except FileNotFoundError:
            return [], []

    def _append(self, text: str) -> None:
        with self.path.open("ab") as handle:
            before = handle.seek(0, os.SEEK_END)
            try:
                handle.write(text.encode())
                handle.flush()
                os.fsync(handle.fileno())
            except OSError:
                os.truncate(self.path, before)
                raise


def flat_row(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """One flat row of `metrics.json`: dotted keys, hyper-parameters as ``method.residual``, scores as
    ``scores.needle@2048.score``, points as ``scores.efficiency@4096.b8.tpot_s.median``; lists and
    tracebacks left out."""
    config = metrics["config"]
    row: dict[str, Any] = {
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "run_id": metrics["run_id"],
        "status": metrics["status"],
        "model": config["model"],
        "method": metrics["label"].split(" ")[0],
        "quantizer": config["quantizer"],
        "dataset": config["dataset"],
        "seed": config["seed"],
    }
    hyper = {key: value for key, value in config["method"].items() if key not in ("_target_", "takes", "quantizer")}
    for prefix, part in (
        ("method", hyper),
        ("scores", {key: _score(entry) for key, entry in metrics["scores"].items()}),
        ("mean", _score(metrics["mean"])),
        *((name, metrics[name]) for name in ("samples", "kv_bytes", "peak_bytes", "ttft_s", "tpot_s", "attention")),
        ("oom", {"bytes_asked": metrics["oom"]["bytes_asked"]} if metrics["oom"] else {}),
    ):
        row.update(flatten(part, prefix))
    row["tokens_per_s"] = metrics["tokens_per_s"]
    row["error"] = (metrics["error"] or "").splitlines()[0] if metrics["error"] else None
    for name in ("device_name", "torch", "transformers", "python", "kvbench", "commit"):
        row[f"env.{name}"] = metrics["env"].get(name)
    return row


def flatten(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested mappings as one with dotted keys; None stays, so that a column does not come and go."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, name))
        else:
            flat[name] = value
    return flat


def _score(entry: Mapping[str, Any]) -> dict[str, Any]:
    pair = entry["vs_fp16"] or {"diff": None, "stderr": None, "n": None}
    points = dict(entry.get("points") or {})
    batches = {f"b{batch}": figures for batch, figures in points.pop("batches", {}).items()}
    return {"score": entry["score"], "stderr": entry["stderr"], "n": entry["n"], "vs_fp16": pair, **points, **batches}


def _text(rows: list[dict[str, Any]], columns: list[str], *, header: bool) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
