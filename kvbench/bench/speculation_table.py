"""Text of ``bench speculation``: speed-ups by case, the grid of acceptance by gamma, and lines of progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.util.table import render_table

Row = Mapping[str, Any]

HEAD = (
    "model",
    "B",
    "context",
    "case",
    "gamma",
    "ms",
    "x",
    "expected x",
    "draft ms",
    "verify ms",
    "rest ms",
    "peak GiB",
    "steps",
)


def plain_ms(rows: Sequence[Row], row: Row) -> float | None:
    """Return the milliseconds per token of plain decoding at the same point as `row`; None if not measured."""
    place = [row[key] for key in ("model", "batch", "context")]
    mine = [r for r in rows if r["case"] == "plain" and [r[key] for key in ("model", "batch", "context")] == place]
    return mine[0].get("ms") if mine else None


def cells(rows: Sequence[Row], row: Row, at: float) -> list[object]:
    """Return a line of the table: the case at its best gamma and the acceptance `at`.

    The speed-up is measured over blocks of tokens; the expected one follows from the times of the parts
    (:func:`kvbench.bench.speculation_grid.expected_cell`).
    """
    peak = row.get("peak")
    start: list[object] = [row["model"], row["batch"], row["context"], row["case"]]
    end: list[object] = [None if peak is None else peak / 2**30, row.get("stepping") or row.get("message")]
    base = plain_ms(rows, row)
    if row["case"] == "plain":
        return [*start, None, row.get("ms"), None if "ms" not in row else 1.0, None, None, None, None, *end]
    measured = next((one for one in row.get("measured", ()) if one["acceptance"] == at), None)
    if measured is None:
        return [*start, *[None] * 7, *end]
    expected = next(
        (c["ms"] for c in row["grid"] if (c["acceptance"], c["gamma"]) == (at, measured["gamma"])),
        None,
    )
    return [
        *start,
        measured["gamma"],
        measured["ms"],
        base / measured["ms"] if base else None,
        base / expected if base and expected else None,
        measured.get("draft_ms"),
        measured.get("verify_ms"),
        measured.get("sampling_ms"),
        *end,
    ]


def grid_text(rows: Sequence[Row], row: Row) -> str:
    """Return the grid of a case as a table: a line per acceptance with the speed-up at each gamma, computed."""
    base = plain_ms(rows, row)
    gammas = sorted({cell["gamma"] for cell in row["grid"]})
    lines = []
    for acceptance in sorted({cell["acceptance"] for cell in row["grid"]}):
        times = {cell["gamma"]: cell["ms"] for cell in row["grid"] if cell["acceptance"] == acceptance}
        measured = [one for one in row["measured"] if one["acceptance"] == acceptance]
        values = [base / times[gamma] if base else times[gamma] for gamma in gammas]
        seen = [f"{base / one['ms'] if base else one['ms']:.2f} (gamma {one['gamma']})" for one in measured]
        lines.append([acceptance, *values, ", ".join(seen) or None])
    unit = "speed-up" if base else "ms a token"
    title = f"{row['model']}, batch {row['batch']}, {row['context']} tokens, {row['case']}: {unit} by gamma, computed"
    return f"{title}\n{render_table(('acceptance', *map(str, gammas), 'measured'), lines, 1)}"


def speculation_text(rows: Sequence[Row], at: float) -> str:
    """Return all tables as text; the cases are compared at the acceptance `at`."""
    parts = [
        f"acceptance forced to {at:g} (the text is meaningless); x: speed-up over plain captured steps, measured; "
        "expected x: from the times of the parts and the geometric model",
        render_table(HEAD, [cells(rows, row, at) for row in rows], HEAD.index("gamma")),
    ]
    parts += [grid_text(rows, row) for row in rows if row["case"] == "quantspec" and row.get("grid")]
    return "\n\n".join(parts)


def case_line(row: Row) -> str:
    """Return the beginning of a line of progress: model, batch, context and case."""
    return f"{row['model']} B{row['batch']} {row['context']} {row['case']}"


def round_text(figures: Row) -> str:
    """Return the times of a round as text."""
    names = [name for name in ("draft_ms", "verify_ms", "sampling_ms", "flush_ms", "round_ms") if name in figures]
    return ", ".join(f"{name.removesuffix('_ms')} {figures[name]:.3f}" for name in names) + " ms"
