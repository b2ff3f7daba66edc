"""What stands in a table: a cell, and sizes and times as people read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: `main`, and below it `detail`."""

    main: str
    detail: str = ""

    @property
    def width(self) -> int:
        """Columns of the screen that it takes."""
        return max(len(self.main), len(self.detail))


def size(count: float | None) -> str:
    """Bytes in a unit that leaves three figures."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds(value: float | None) -> str:
    """A time in s or ms."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"
