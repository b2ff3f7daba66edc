"""Cells of a table, and sizes and times in readable units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A table cell with a main line and, unless `detail` is empty, a second line below it."""

    main: str
    detail: str = ""

    @property
    def width(self) -> int:
        """Width of the longer line, in characters."""
        return max(len(self.main), len(self.detail))


def size(count: float | None) -> str:
    """Format a number of bytes for reading, for example ``1.5 GiB``; None gives ``-``."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds(time: float | None) -> str:
    """Format a number of seconds for reading, in s or ms, for example ``1.25 s`` or ``40 ms``; None gives ``-``."""
    if time is None:
        return "-"
    return f"{time:.2f} s" if time >= 1 else f"{time * 1000:.3g} ms"
