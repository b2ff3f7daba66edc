"""The table of ``python -m kvbench.bench kernel``: a line for each measurement, and times per byte read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.bench.shapes import Point, short
from kvbench.util.table import table

#: format with whose time per byte the others are compared
BASE = "int4_g128"
HEAD = (
    "model",
    "B",
    "tokens",
    "q",
    "format",
    "path",
    "us",
    "+-%",
    "GB/s",
    "% read",
    "floor",
    "a byte",
    "best 16 bit",
    "us",
    "x",
    "error",
)


def per_byte(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Return the time per byte read, relative to that of :data:`BASE` at the same point by the same kernel, or None."""
    same = ("model", "batch", "context", "q_len", "path")
    bases = [r for r in rows if r["format"] == BASE and r.get("us") and all(r[key] == row[key] for key in same)]
    if not bases or not row.get("us"):
        return None
    return float(row["us"] / row["bytes"] / (bases[0]["us"] / bases[0]["bytes"]))


def line(row: dict[str, Any]) -> list[object]:
    """Return one line of the table as cells; the last is the numerical error, or why the measurement failed."""
    start = [row["model"], row["batch"], short(row["context"]), row["q_len"], row["format"], row.get("path", "-")]
    best, best_us = row.get("best"), row.get("best_us")
    if "us" not in row:
        return [*start, None, None, None, None, None, None, best, best_us, None, row["failed"]]
    spread = 50 * (row["p90"] - row["p10"]) / row["us"]
    ratio = best_us / row["us"] if best_us else None
    share = 100 * row["GB_s"] / row["ceiling_GB_s"]
    return [
        *start, row["us"], spread, row["GB_s"], share, row["floor_us"], row.get("per_byte"), best, best_us, ratio,
        "-" if row["error"] is None else f"{row['error']:.1e}",
    ]  # fmt: skip


def finish(rows: list[dict[str, Any]], skipped: int, path: Path, seconds: float) -> None:
    """Print the table and notes that explain it; `skipped` measurements were left out to limit the time."""
    print("\n" + table(HEAD, [line(row) for row in rows], HEAD.index("us")))
    for row in rows:
        if row.get("expected_us"):
            more = 100 * (row["us"] / row["expected_us"] - 1)
            at = Point(row["model"], row["batch"], row["context"], row["q_len"])
            print(
                f"{at} {row['format']} ({row['path']}): {more:+.0f}% compared with the time of its bytes "
                "at the rates of the single formats"
            )
    if skipped:
        print(f"{skipped} rows were not measured, because --quick limits the time")
    print(
        "us: median over graph replays; +-%: half the range from p10 to p90; floor: time of a plain "
        f"read of the same bytes; a byte: microseconds per byte read, over those of {BASE} at the same point"
    )
    print(f"{path} ({seconds:.0f} s)")
