"""Cells of a table, and sizes and times in readable units."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: what a terminal acts on or cannot show: control characters, line breaks, changes of direction, lone surrogates
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """Escape the characters, but for `keep`, that would break a table or steer a terminal, as Python writes them."""
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )


@dataclass(frozen=True)
class Cell:
    """A table cell with a main line and, unless `detail` is empty, a second line below it; both get escaped."""

    main: str
    detail: str = ""

    def __post_init__(self) -> None:
        for name in ("main", "detail"):
            object.__setattr__(self, name, printable(getattr(self, name)))

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
