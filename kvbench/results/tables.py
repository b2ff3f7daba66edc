"""Runs as a table: on the screen, as markdown, as CSV; one run, or all runs of a sweep.

A cell of a score is two lines: the score with its standard error, and below it the paired difference to fp16 with its
own. Where there are more tasks than columns fit, runs and tasks change places.
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

#: narrowest and widest screen that a table is laid out for
MIN_WIDTH, MAX_WIDTH = 80, 160

#: widest column of names, and the space between columns
_LABEL, _GAP = 34, 2


def summary(runs: Sequence[Metrics], width: int | None = None, *, color: bool | None = None) -> str:
    """Return the table of a sweep (or of one run) as text for a terminal, with notes below it.

    Args:
        runs: contents of `metrics.json` (with ``run_dir``, as `run` returns them, they are read again, since an fp16
            run that came later gives earlier ones their paired differences).
        width: columns of the screen; the terminal's where None.
        color: None: as the terminal can.
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
    """Return a line of cells per run where that fits, else one per task with the runs side by side, else tables."""
    header, body = grid(runs)
    across = _transposed(header, body)
    for (names, lines), gap in itertools.product(((header, body), across), (_GAP, 1)):
        if _needed(names, lines, gap) <= width:
            return Group(_table(names, lines, range(len(names)), gap))
    return Group(*(_table(header, body, block) for block in _blocks(_widths(header, body), width)))


def _blocks(widths: Sequence[int], width: int) -> list[list[int]]:
    """Return the columns of each of several tables, the first in all: few tables, about equally wide."""
    # of the columns up to each one: how many blocks, the sum of their squared widths, and the blocks
    best: list[tuple[int, int, list[list[int]]]] = [(0, 0, [])]
    for last in range(1, len(widths)):
        choices = []
        for first in range(1, last + 1):
            needed = widths[0] + sum(widths[first : last + 1]) + _GAP * (last - first + 1)
            if needed <= width or first == last:
                count, squares, blocks = best[first - 1]
                choices.append((count + 1, squares + needed**2, [*blocks, [0, *range(first, last + 1)]]))
        best.append(min(choices))
    return best[-1][2] or [[0]]


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
    """Return the same cells as a GitHub table; a difference stands behind its score in brackets."""
    header, body = grid([reread(run) for run in runs])
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|"]
    for line in body:
        cells = [cell.main + (f" ({cell.detail})" if cell.detail else "") for cell in line]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines) + "\n"


def to_csv(runs: Sequence[Metrics]) -> str:
    """Return one line per run, or per point, with plain numbers (bytes, seconds), for a spreadsheet or pandas."""
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
    """Return the header and the cells: a line per run, or per point where the runs measured points."""
    lines, chosen = _lines(runs, TABLE)
    body = [[column.cell(line) for column in chosen if column.cell is not None] for line in lines]
    return [column.name for column in chosen if column.cell is not None], body


def _lines(runs: Sequence[Metrics], place: str | None = None) -> tuple[Sequence[Any], Sequence[Column[Any]]]:
    """Return a table's lines and its columns; of all columns where `place` is None."""
    named = [RunLine(name, record.read(run)) for name, run in zip(labels(runs), runs, strict=True)]
    if not any(map(has_points, runs)):
        return named, columns(named, place)
    points = [line for run in named for line in _points(run, repeat_name=place is None)]
    return points, POINT_COLUMNS


def _points(line: RunLine, *, repeat_name: bool) -> list[PointLine]:
    """Return the points of a run; one without a point where it failed. A table names the run once."""
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
    """Return a run with all keys of the record, as `metrics.json` is on disk now where the run says where it lies."""
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
