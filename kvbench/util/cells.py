"""Cells of a table, and sizes and times in readable units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A cell of a table: `main`, and `detail` on the line below."""

    main: str
    detail: str = ""

    @property
    def width(self) -> int:
        """Columns of the terminal that it takes."""
        return max(len(self.main), len(self.detail))


def size(count: float | None) -> str:
    """Return a number of bytes with three digits and its unit."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds(time: float | None) -> str:
    """Return a time in s or ms."""
    if time is None:
        return "-"
    return f"{time:.2f} s" if time >= 1 else f"{time * 1000:.3g} ms"
