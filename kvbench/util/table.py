"""Tables of text that fit their width, coloured on a terminal and plain elsewhere, and readable sizes and times.

Columns that do not fit get a smaller gap. If that is not enough, the table is transposed where that makes sense, or
else split into several tables, each of which repeats the columns that name its lines.
"""

from __future__ import annotations

import io
import itertools
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

#: what a terminal acts on or cannot show: control characters, line breaks, changes of direction, lone surrogates
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """Escape, as Python does, all characters except `keep` that would break a table or control a terminal."""
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )


@dataclass(frozen=True)
class Cell:
    """A table cell with a main line and, unless `detail` is empty, a second line below it; both are escaped."""

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


#: width where there is no terminal, and the narrowest and widest terminal that is laid out for, in characters
WIDTH, MIN_WIDTH, MAX_WIDTH = 100, 80, 160

#: maximum width of a column of texts, and the gap between columns
_TEXT, _GAP = 34, 2


@dataclass(frozen=True)
class Grid:
    """A table's header and cells, before it is fitted to a width and drawn.

    Args:
        names: number of columns at the left that identify a line. If the table is split, each part repeats them.
        left: indices of the columns aligned to the left; all others are aligned to the right.
        wraps: indices of the columns whose long texts are wrapped.
        across: True if the table may be transposed to make it fit; requires ``names=1``.
    """

    header: Sequence[str]
    body: Sequence[Sequence[Cell]]
    names: int = 1
    left: Collection[int] = field(default=(0,))
    wraps: Collection[int] = field(default=(0,))
    across: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", [printable(name) for name in self.header])

    @property
    def widths(self) -> list[int]:
        """Width at which each column is drawn, in characters; texts longer than that are wrapped."""
        widths = [max([len(name), *(line[i].width for line in self.body)]) for i, name in enumerate(self.header)]
        return [min(width, _TEXT) if i in self.wraps else width for i, width in enumerate(widths)]

    def transposed(self) -> Grid:
        """Return the table with its lines and columns exchanged."""
        headings = [" ".join(filter(None, (line[0].main, line[0].detail))) for line in self.body]
        lines = [[Cell(self.header[i]), *(line[i] for line in self.body)] for i in range(1, len(self.header))]
        return Grid(["", *headings], lines)

    def drawn(self, columns: Sequence[int] | None = None, gap: int = _GAP) -> Table:
        """Convert the columns with given indices (None: all) to a rich table, which is not fitted to any width.

        `gap` is the number of spaces between columns.
        """
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        columns = range(len(self.header)) if columns is None else columns
        for i in columns:
            justify: Any = "left" if i in self.left else "right"
            wraps = i in self.wraps
            table.add_column(
                Text(self.header[i]),
                justify=justify,
                max_width=_TEXT if wraps else None,
                no_wrap=not wraps,
                overflow="fold",
            )
        for line in self.body:
            table.add_row(*(_styled_cell(line[i]) for i in columns))
        return table

    def fitted(self, width: int) -> Group:
        """Return the table drawn to fit a width in characters.

        It is drawn as it is, closer together, transposed, or split into several rich tables, whichever fits first.
        """
        for grid, gap in itertools.product((self, self.transposed()) if self.across else (self,), (_GAP, 1)):
            if sum(grid.widths) + gap * (len(grid.header) - 1) <= width:
                return Group(grid.drawn(gap=gap))
        return Group(*(self.drawn(block) for block in column_blocks(self.widths, width, self.names)))


def column_blocks(widths: Sequence[int], width: int, names: int = 1) -> list[list[int]]:
    """Divide the columns of a table that is too wide among several tables; return the columns' indices in each.

    There are as few tables as possible. Among the ways to do this, one with few tables of a single column (apart from
    the first `names` ones, which every table repeats) is chosen, and then the one whose tables have the most similar
    widths. Only a table with a single column besides the first ones may exceed `width`.
    """
    start = sum(widths[:names]) + _GAP * (names - 1)
    # for the columns up to each index: the number of tables, of those with a single column, the sum of their squared
    # widths, and the tables
    best: list[tuple[int, int, int, list[list[int]]]] = [(0, 0, 0, [])]
    for last in range(names, len(widths)):
        choices = []
        for first in range(names, last + 1):
            needed = start + sum(widths[first : last + 1]) + _GAP * (last - first + 1)
            if needed <= width or first == last:
                count, single, squares, tables = best[first - names]
                table = [*range(names), *range(first, last + 1)]
                choices.append((count + 1, single + (first == last), squares + needed**2, [*tables, table]))
        best.append(min(choices))
    return best[-1][-1] or [list(range(names))]


def fit(width: int | None = None) -> int:
    """Return the width at which to draw tables: `width` or, if it is None, the terminal's, limited to 80 to 160."""
    return max(MIN_WIDTH, min(MAX_WIDTH, width or shutil.get_terminal_size((WIDTH, 24)).columns))


def render_text(*parts: RenderableType, width: int | None = None, color: bool | None = None) -> str:
    """Render tables and styled lines, one below the other, to a string without spaces at the ends of lines.

    A width of None is the result of :func:`fit`. A `color` of None includes colour codes if standard output is a
    terminal.
    """
    buffer = io.StringIO()
    terminal = color if color is not None else (sys.stdout.isatty() or None)
    console = Console(file=buffer, width=width or fit(), force_terminal=terminal, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip("\n").split("\n"))


def render_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], names: int = 1, width: int | None = None
) -> str:
    """Render a table of plain values to a string: texts to the left, numbers to the right, ``-`` for None.

    `names` is as in :class:`Grid`; a width of None is the result of :func:`fit`.
    """
    texts = [i for i in range(len(head)) if not all(isinstance(row[i], int | float | None) for row in rows)]
    body = [[Cell(format_value(value)) for value in row] for row in rows]
    return render_text(Grid(head, body, names, left=texts, wraps=texts).fitted(fit(width)), width=fit(width))


def format_value(value: object) -> str:
    """Format a value for a table: floats with about three digits (``12.3``, ``0.97``, ``1.2e-03``), None as ``-``."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == 0 or abs(value) >= 1e-2:
        return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    return f"{value:.1e}"


def _styled_cell(cell: Cell) -> Text:
    drawn = Text(cell.main)
    if cell.detail:
        drawn.append(f"\n{cell.detail}", style="dim")
    return drawn
