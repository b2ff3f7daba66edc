"""Tables of one run or of all runs of a sweep: for the terminal, as markdown and as CSV.

The cell of a score has two lines: the score with its standard error, and the paired difference to fp16 with its own.
If the columns do not fit the terminal, the table is transposed: one column per run.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvbench.results import record
from kvbench.results.columns import TABLE, Column, RunLine, columns
from kvbench.results.findings import findings
from kvbench.results.labels import UNSAID, labels
from kvbench.results.notes import notes, untouched
from kvbench.results.point_columns import POINT_COLUMNS, PointLine
from kvbench.results.points import has_points
from kvbench.util.cells import Cell, size

__all__ = ["UNSAID", "labels", "markdown", "notes", "reread", "screen", "size", "summary", "to_csv", "untouched"]

Metrics = Mapping[str, Any]

#: narrowest and widest terminal, in characters, that a table is laid out for
MIN_WIDTH, MAX_WIDTH = 80, 160

#: maximum width of the column of names, and the gap between columns
_LABEL, _GAP = 34, 2


def summary(runs: Sequence[Metrics], width: int | None = None, *, color: bool | None = None) -> str:
    """Return the table of a sweep (or of one run) as text for a terminal, with notes below it.

    Args:
        runs: contents of `metrics.json`. If they have a ``run_dir``, the file is read again, because a later fp16 run
            adds paired differences to earlier runs.
        width: width in characters; None: that of the terminal. Limited to 80 to 160.
        color: True or False to force color on or off; None: as the terminal supports it.
    """
    runs = [reread(run) for run in runs]
    width = max(MIN_WIDTH, min(MAX_WIDTH, width or shutil.get_terminal_size((120, 24)).columns))
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=color, highlight=False)
    console.print(screen(runs, width))
    for line in notes(runs):
        console.print(Text(line, style="dim"))
    if len(runs) > 1:
        for line in findings(labels(runs), runs):
            console.print(Text(line))
    return buffer.getvalue().rstrip("\n")


def screen(runs: Sequence[Metrics], width: int = 120) -> Group:
    """Return the table with one line per run; if that is too wide, transposed, or else split into several tables."""
    header, body = grid(runs)
    across = _transposed(header, body)
    for (names, lines), gap in itertools.product(((header, body), across), (_GAP, 1)):
        if _needed(names, lines, gap) <= width:
            return Group(_table(names, lines, range(len(names)), gap))
    return Group(*(_table(header, body, block) for block in _blocks(_widths(header, body), width)))


def _blocks(widths: Sequence[int], width: int) -> list[list[int]]:
    """Return the column indices of each of several tables, all with column 0.

    There are as few tables as possible; then as few as possible with a single column besides the names; then the
    widths are as similar as possible.
    """
    # for the columns up to each index: the number of tables, of those with a single column, the sum of their squared
    # widths, and the tables
    best: list[tuple[int, int, int, list[list[int]]]] = [(0, 0, 0, [])]
    for last in range(1, len(widths)):
        choices = []
        for first in range(1, last + 1):
            needed = widths[0] + sum(widths[first : last + 1]) + _GAP * (last - first + 1)
            if needed <= width or first == last:
                count, single, squares, blocks = best[first - 1]
                block = [0, *range(first, last + 1)]
                choices.append((count + 1, single + (first == last), squares + needed**2, [*blocks, block]))
        best.append(min(choices))
    return best[-1][-1] or [[0]]


def _table(header: Sequence[str], body: Sequence[Sequence[Cell]], block: Sequence[int], gap: int = _GAP) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for index in block:
        first = index == 0
        justify: Any = "left" if first else "right"
        table.add_column(header[index], justify=justify, max_width=_LABEL if first else None, no_wrap=not first)
    for line in body:
        table.add_row(*(_drawn(line[index]) for index in block))
    return table


def markdown(runs: Sequence[Metrics]) -> str:
    """Return the table as GitHub markdown, with the difference to fp16 in brackets after the score."""
    header, body = grid([reread(run) for run in runs])
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|"]
    for line in body:
        cells = [cell.main + (f" ({cell.detail})" if cell.detail else "") for cell in line]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines) + "\n"


def to_csv(runs: Sequence[Metrics]) -> str:
    """Return CSV with one line per run or point and plain numbers (bytes, seconds), for a spreadsheet or pandas."""
    runs = [reread(run) for run in runs]
    lines, chosen = _lines(runs)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([heading for column in chosen for heading in column.csv])
    for line in lines:
        if not isinstance(line, PointLine) or line.point is not None:
            writer.writerow([value(line) for column in chosen for value in column.csv.values()])
    return buffer.getvalue()


def grid(runs: Sequence[Metrics]) -> tuple[list[str], list[list[Cell]]]:
    """Return the header and the cells of a table, one line per run, or one per point if the runs measured points."""
    lines, chosen = _lines(runs, TABLE)
    body = [[column.cell(line) for column in chosen if column.cell is not None] for line in lines]
    return [column.name for column in chosen if column.cell is not None], body


def _lines(runs: Sequence[Metrics], place: str | None = None) -> tuple[Sequence[Any], Sequence[Column[Any]]]:
    """Return the lines of a table and the columns shown in `place`; all columns if it is None."""
    named = [RunLine(name, record.read(run)) for name, run in zip(labels(runs), runs, strict=True)]
    if not any(map(has_points, runs)):
        return named, columns(named, place)
    points = [line for run in named for line in _points(run, repeat_name=place is None)]
    return points, POINT_COLUMNS


def _points(line: RunLine, *, repeat_name: bool) -> list[PointLine]:
    """Return a line per point of a run, or one line without a point. Unless `repeat_name`, only the first is named."""
    points = [
        PointLine(line.name, line.run, int(key.rsplit("@", 1)[1]), int(batch), point)
        for key, entry in line.run.scores.items()
        if entry.points is not None
        for batch, point in entry.points.batches.items()
    ]
    if not points:
        return [PointLine(line.name, line.run)]
    return points if repeat_name else [points[0], *(replace(point, name="") for point in points[1:])]


def reread(run: Metrics) -> dict[str, Any]:
    """Return a run's `metrics.json` with all keys of the record, read again from ``run_dir`` if the run has one."""
    if run.get("run_dir"):
        try:
            content = json.loads((Path(run["run_dir"]) / "metrics.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        if record.problem(content) is None and content["run_id"] == run["run_id"]:
            return record.filled(content)
    return record.filled(run)


def _drawn(cell: Cell) -> Text:
    text = Text(cell.main)
    if cell.detail:
        text.append(f"\n{cell.detail}", style="dim")
    return text


def _widths(header: Sequence[str], body: Sequence[Sequence[Cell]]) -> list[int]:
    widths = [max([len(name), *(line[index].width for line in body)]) for index, name in enumerate(header)]
    return [min(widths[0], _LABEL), *widths[1:]]  # longer names take a second line


def _needed(header: Sequence[str], body: Sequence[Sequence[Cell]], gap: int) -> int:
    return sum(_widths(header, body)) + gap * (len(header) - 1)


def _transposed(header: Sequence[str], body: Sequence[Sequence[Cell]]) -> tuple[list[str], list[list[Cell]]]:
    names = [" ".join(filter(None, (line[0].main, line[0].detail))) for line in body]
    lines = [[Cell(header[index]), *(line[index] for line in body)] for index in range(1, len(header))]
    return ["", *names], lines
