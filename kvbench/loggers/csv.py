"""A CSV file with one row per finished run."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvbench.loggers.base import Logger
from kvbench.results.tables import UNSAID
from kvbench.util import atomic

#: columns that are ignored when rows are compared: the time of writing, and differences to fp16, which come later
_LATER = re.compile(r"time$|.*[._]vs_fp16(\.|$)")

#: maximum wait in seconds for another process that is writing to the file
LOCK_SECONDS = 60


class CsvLogger(Logger):
    """Logger that appends one row per run to a CSV file, which several processes may share.

    If the row has columns that the file lacks, the whole file is rewritten with the additional columns, atomically. A
    row that equals the newest row of the same run is not written again. If a process was killed in the middle of a
    line, that incomplete last line is moved to ``<path>.damaged``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Append the row of the run to the file.

        Raises:
            OSError: the file cannot be written; its content is then the same as before the call.
            filelock.Timeout: another process holds the file's lock for more than :data:`LOCK_SECONDS`.
        """
        row = flat_row(metrics)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f".{self.path.name}.lock")
        lock.touch()  # raises an error if the folder is not writable; the lock would wait for ever
        with FileLock(lock, timeout=LOCK_SECONDS):
            columns, rows, whole = self._read()
            if rows and _same_row([old for old in rows if old.get("run_id") == row["run_id"]][-1:], row):
                return
            wanted = columns + [key for key in row if key not in columns]  # existing columns keep their order
            if columns == wanted and whole:
                self._append(_csv_text([row], wanted, header=False))
            else:
                atomic.replace_file(self.path, _csv_text([*rows, row], wanted, header=True).encode())

    def _read(self) -> tuple[list[str], list[dict[str, str]], bool]:
        """Return the columns, the rows, and True if the last line has ended; move one that lacks columns elsewhere."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return [], [], True
        text = data.decode("utf-8", "replace")
        lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
        whole = not text or text.endswith("\n")
        columns = lines[0] if lines else []
        if not whole and len(lines) > 1 and len(lines[-1]) < len(columns):
            with self.path.with_name(f"{self.path.name}.damaged").open("a", encoding="utf-8") as aside:
                aside.write(_csv_text([dict(zip(columns, lines.pop(), strict=False))], columns, header=False))
        rows = [dict(zip(columns, [*line, *[""] * len(columns)], strict=False)) for line in lines[1:]]
        return columns, rows, whole

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
    """Return the CSV row of a run: the values in `metrics.json` under dotted keys such as ``method.residual``.

    Lists are left out, and of an error only the first line remains. Scores have keys such as
    ``scores.needle@2048.score`` and ``scores.efficiency@4096.b8.tpot_s.median`` (prompts of 4096 tokens in batches of
    8).
    """
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
    hyper = {key: value for key, value in config["method"].items() if key not in (*UNSAID, "quantizer")}
    for prefix, part in (
        ("method", hyper),
        ("scores", {key: _score_fields(entry) for key, entry in metrics["scores"].items()}),
        ("mean", _score_fields(metrics["mean"])),
        *((name, metrics[name]) for name in ("samples", "kv_bytes", "peak_bytes", "ttft_s", "tpot_s", "attention")),
        ("inter_token", metrics.get("inter_token") or {}),
        ("oom", {"bytes_asked": metrics["oom"]["bytes_asked"]} if metrics["oom"] else {}),
    ):
        row.update(flatten(part, prefix))
    row["tokens_per_s"] = metrics["tokens_per_s"]
    row["error"] = (metrics["error"] or "").splitlines()[0] if metrics["error"] else None
    for name in ("device_name", "dtype", "arithmetic", "torch", "transformers", "python", "kvbench", "commit"):
        row[f"env.{name}"] = metrics["env"].get(name)
    return row


def flatten(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return nested mappings as one flat dict, with keys such as ``PREFIX.outer.inner``.

    Lists are left out; None is kept as a value.
    """
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, name))
        elif not isinstance(value, list):
            flat[name] = value
    return flat


def _score_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    pair = entry["vs_fp16"] or {"diff": None, "stderr": None, "n": None}
    points = dict(entry.get("points") or {})
    batches = {f"b{batch}": figures for batch, figures in points.pop("batches", {}).items()}
    return {"score": entry["score"], "stderr": entry["stderr"], "n": entry["n"], "vs_fp16": pair, **points, **batches}


def _same_row(latest: list[dict[str, str]], row: Mapping[str, Any]) -> bool:
    """Return True if `latest` (a run's last row, or empty) equals `row` apart from times and differences from fp16."""
    now = {key: "" if value is None else str(value) for key, value in row.items() if not _LATER.match(key)}
    return any(all(written.get(key, "") == value for key, value in now.items()) for written in latest)


def _csv_text(rows: list[dict[str, Any]], columns: list[str], *, header: bool) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
