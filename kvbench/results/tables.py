"""Tables of one run or of all runs of a sweep: for the terminal, as markdown and as CSV.

The cell of a score has two lines: the score, and the paired difference from fp16, each with its 95 % interval. If the
columns do not fit the terminal, the table is transposed: one column per run.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from kvbench.results import inter_token, record
from kvbench.results.columns import TABLE, Column, RunLine, shown_columns
from kvbench.results.labels import UNSAID, labels
from kvbench.results.notes import findings, notes, untouched
from kvbench.results.point_columns import POINT_COLUMNS, PointLine
from kvbench.results.points import has_points
from kvbench.util import table
from kvbench.util.table import Cell, printable, size

__all__ = [
    "UNSAID",
    "labels",
    "notes",
    "reread",
    "runs_csv",
    "runs_markdown",
    "runs_screen",
    "size",
    "table_text",
    "untouched",
]

Metrics = Mapping[str, Any]


def table_text(runs: Sequence[Metrics], width: int | None = None, *, color: bool | None = None) -> str:
    """Return the table of one run or of a sweep as text for a terminal, with notes below it.

    Args:
        runs: content of each run's `metrics.json`, read again where possible (:func:`reread`).
        width: width in characters; None for the width of the terminal (:func:`kvbench.util.table.fit`).
        color: True or False to force colours on or off; None to use colours only if standard output is a terminal.
    """
    runs = [reread(run) for run in runs]
    width = table.fit(width)
    lines = [Text(printable(line), style="dim") for line in notes(runs)]
    if len(runs) > 1:
        lines += [Text(line) for line in findings(labels(runs), runs)]
    return table.render_text(runs_screen(runs, width), *lines, width=width, color=color)


def runs_screen(runs: Sequence[Metrics], width: int = table.WIDTH) -> Group:
    """Return the table of runs as an object that rich prints to a terminal.

    A table wider than `width` characters is transposed, so that it has one column per run; if it is still too wide, its
    columns are divided among several tables.
    """
    header, body = table_grid(runs)
    return table.Grid(header, body, across=True).fitted(width)


def runs_markdown(runs: Sequence[Metrics]) -> str:
    """Return the table of runs as GitHub markdown, with the difference from fp16 in parentheses after the score."""
    header, body = table_grid([reread(run) for run in runs])
    lines = [
        "| " + " | ".join(map(printable, header)) + " |",
        "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|",
    ]
    for line in body:
        cells = [cell.main + (f" ({cell.detail})" if cell.detail else "") for cell in line]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines) + "\n"


def runs_csv(runs: Sequence[Metrics]) -> str:
    """Return the table of runs as CSV with plain numbers in bytes and seconds, for a spreadsheet or pandas.

    It has the same lines as :func:`table_grid`: one per run, or one per point.
    """
    runs = [reread(run) for run in runs]
    lines, chosen = _lines_and_columns(runs)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([printable(heading) for column in chosen for heading in column.csv])
    for line in lines:
        if not isinstance(line, PointLine) or line.point is not None:
            values = [value(line) for column in chosen for value in column.csv.values()]
            writer.writerow([printable(value) if isinstance(value, str) else value for value in values])
    return buffer.getvalue()


def table_grid(runs: Sequence[Metrics]) -> tuple[list[str], list[list[Cell]]]:
    """Return the headings and the rows of cells of the table that :func:`runs_screen` and :func:`runs_markdown` show.

    There is one row per run. If any run measured time and memory (``dataset=efficiency``), there is one row for each of
    its points instead; a point is a prompt length with a batch size.
    """
    lines, chosen = _lines_and_columns(runs, TABLE)
    body = [[column.cell(line) for column in chosen if column.cell is not None] for line in lines]
    return [column.name for column in chosen if column.cell is not None], body


def _lines_and_columns(
    runs: Sequence[Metrics], place: str | None = None
) -> tuple[Sequence[Any], Sequence[Column[Any]]]:
    """Return the lines of a table and the columns shown in `place`; all columns if it is None."""
    named = [RunLine(name, record.read_metrics(run)) for name, run in zip(labels(runs), runs, strict=True)]
    if not any(map(has_points, runs)):
        return named, shown_columns(named, place)
    points = []
    for line, run in zip(named, runs, strict=True):
        points += _point_lines(line, inter_token.fit_lines(run), repeat_name=place is None)
    return points, [column for column in POINT_COLUMNS if place is None or column.present(points)]


def _point_lines(line: RunLine, fits: Mapping[int, Any], *, repeat_name: bool) -> list[PointLine]:
    """Return a line per point of a run, or one line without figures if it has no points.

    Only the first line has the run's name, unless `repeat_name` is True.
    """
    points = [
        PointLine(line.name, line.run, int(key.rsplit("@", 1)[1]), int(batch), point, fits.get(int(batch)))
        for key, entry in line.run.scores.items()
        if entry.points is not None
        for batch, point in entry.points.batches.items()
    ]
    if not points:
        return [PointLine(line.name, line.run)]
    return points if repeat_name else [points[0], *(replace(point, name="") for point in points[1:])]


def reread(run: Metrics) -> dict[str, Any]:
    """Return a run's metrics, read again from its `metrics.json` if possible, with defaults for keys that are missing.

    The file may have changed, because an fp16 run that finishes later adds differences to it. If `run` has no key
    ``run_dir``, the run's directory, or the file there is invalid or belongs to another run, the result is `run`
    itself.
    """
    if run.get("run_dir"):
        try:
            content = json.loads((Path(run["run_dir"]) / "metrics.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        if record.problem(content) is None and content["run_id"] == run["run_id"]:
            return record.fill_defaults(content)
    return record.fill_defaults(run)


#: headings of the table of answers
ANSWERS = ("answers", "flips", "lost", "won", "McNemar p", "B leaves A at", "never", "n")
#: headings of the table of fidelity
FIDELITY = ("fidelity to fp16", "A", "B", "B - A", "95 % (prompts drawn)", "n")
_NAMES = {
    "kld_mean": "KL mean, nats",
    "kld_median": "KL median, nats",
    "kld_p99_9": "KL 99.9 %, nats",
    "same_top": "same top",
}


def answer_lines(answers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of answers as text, one line per task, or per task and length.

    An answer is correct if its score is 1. "B leaves A at" is the median, over the answers, of the index of the first
    token that differs; if more than half of the answers never differ, ``>`` and their median length.
    """
    lines = []
    for key, entry in answers.items():
        flips, left = entry["flips"], entry["left"]
        counted: tuple[str, ...] = ("-", "-", "-", "-")  # answers without scores, such as continuations of a text
        if flips is not None:
            counted = (
                f"{100 * flips['flips']:.1f} %",
                str(flips["lost"]),
                str(flips["won"]),
                f"{flips['p']:.3g}",
            )
        parting = ("-", "-")
        if left is not None:
            middle = f"> {left['compared']:g}" if left["median"] is None else f"{left['median']:g}"
            parting = (middle, f"{100 * left['never']:.0f} %")
        count = flips["n"] if flips else left["n"]
        lines.append((key, *counted, *parting, str(count)))
    return lines


def fidelity_lines(fidelity: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of fidelity as text, one line per measure of each task, or task and length."""
    lines = []
    for key, figures in fidelity.items():
        for name, entry in figures.items():
            numbers = (f"{entry[side]:.4g}" for side in ("a", "b"))
            interval = f"{entry['low']:+.3g} to {entry['high']:+.3g}"
            lines.append((f"{key} {_NAMES[name]}", *numbers, f"{entry['diff']:+.3g}", interval, str(entry["n"])))
    return lines
