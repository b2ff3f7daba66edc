"""A table in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with aligned columns, text to the left and numbers to the right; None is shown as ``-``."""
    cells = [[shown(cell) for cell in row] for row in rows]
    numeric = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(head))]
    widths = [max(len(head[i]), *(len(row[i]) for row in cells)) if cells else len(head[i]) for i in range(len(head))]
    lines = ["  ".join(name.rjust(w) if n else name.ljust(w) for name, w, n in zip(head, widths, numeric, strict=True))]
    lines.append("  ".join("-" * width for width in widths))
    for row in cells:
        line = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        lines.append("  ".join(line).rstrip())
    return "\n".join(lines)


def shown(cell: object) -> str:
    """Return a cell as text: floats with about three digits, tiny ones as ``1.2e-03``; None as ``-``."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    if cell != cell or cell in (float("inf"), float("-inf")):
        return str(cell)
    if cell == 0 or abs(cell) >= 1e-2:
        return f"{cell:.0f}" if abs(cell) >= 99.95 else f"{cell:.1f}" if abs(cell) >= 9.995 else f"{cell:.2f}"
    return f"{cell:.1e}"
