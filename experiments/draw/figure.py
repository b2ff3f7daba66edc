"""A folded item as a picture: PNG and SVG, legible in print, readable without colour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from experiments.fold.cells import Cell, Folded
from experiments.item import Grid, Item

#: Okabe and Ito's colours, which people with any colour vision can tell apart; markers and hatches differ as well
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "\\\\", "xx", "..", "--", "++", "oo")
#: width of a picture in inches (a text column of two), and its letters in points
WIDTH, LETTERS = 6.5, 9
#: characters of a title's line
TITLE = 88
#: the coordinates of a path or of a mark, and a number with more than two decimals
_PATH, _LONG = re.compile(r'(?<=\b[dxy]=")[^"]*'), re.compile(r"-?\d+\.\d{3,}")


NO_MATPLOTLIB = "no figure, because matplotlib is not installed.\n  hint: run pip install 'kvbench[plot]'"


def draw_item(item: Item, folded: Folded, folder: Path) -> str:
    """Write ``figure.png`` and ``figure.svg`` and return an empty text; or return why there is no picture."""
    if item.draw == "table":
        return ""
    try:
        import matplotlib
    except ImportError:
        return NO_MATPLOTLIB
    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not any(cell.ours is not None for cell in folded.cells) and not folded.arrays:
        return "no figure, because no cell has a number"
    settings = {"font.size": LETTERS, "svg.hashsalt": item.id, "svg.fonttype": "path", "hatch.linewidth": 0.5}
    with pyplot.rc_context(settings):
        figure = _DRAWERS[item.draw](item, folded, pyplot)
        title = "; ".join([*folded.marks, f"{item.title} ({', '.join(folded.models)})"])
        figure.suptitle(fill(title, TITLE), fontsize=LETTERS)
        figure.savefig(folder / "figure.png", dpi=200)
        figure.savefig(folder / "figure.svg", metadata={"Date": None})
        pyplot.close(figure)
    svg = folder / "figure.svg"
    svg.write_text(with_short_coordinates(svg.read_text(encoding="utf-8")), encoding="utf-8")
    return ""


def with_short_coordinates(svg: str) -> str:
    """Return an SVG whose coordinates are in hundredths of a point, with fewer bytes."""
    return _PATH.sub(lambda path: _LONG.sub(lambda number: f"{float(number[0]):.2f}", path[0]), svg)


def _draw_lines(item: Item, folded: Folded, pyplot: Any) -> Any:
    """Draw a line per setting over the columns' positions; a cross ends a line for memory.

    There is a panel per model, and per `panel` of the columns.
    """
    names = list(dict.fromkeys(h.panel for h in folded.headings if h.x is not None))
    places = [(model, name) for model in folded.models for name in names]
    figure, panels = _panels(places, pyplot)
    for axes, (model, name) in zip(panels, places, strict=False):
        headings = [h for h in folded.headings if h.x is not None and h.panel == name]
        for number, row in enumerate(folded.rows):
            cells = [(h.x, folded.at(model, row, h.name)) for h in headings]
            known = [(x, cell) for x, cell in cells if cell is not None and cell.ours is not None]
            if not known:
                continue
            _line(axes, known, row, number)
            ended = [x for x, cell in cells if cell is not None and cell.reason.startswith("out of memory")]
            if ended:
                (x, last), colour = known[-1], COLOURS[number % 8]
                axes.plot([x, min(ended)], [last.ours] * 2, color=colour, linestyle=":", linewidth=1)
                axes.plot(min(ended), last.ours, marker="x", markersize=9, color=colour, linestyle="")
        positions = [h.x for h in headings if h.x is not None]
        if positions and min(positions) > 0 and max(positions) / min(positions) >= 16:
            axes.set_xscale("log", base=2)
            if len(positions) <= 8:
                axes.set_xticks(positions)
            axes.xaxis.set_major_formatter(lambda x, _: count_text(x))
            axes.minorticks_off()
        if not axes.lines:
            axes.text(0.5, 0.5, "no numbers", ha="center", transform=axes.transAxes)
        heights = [y for line in axes.get_lines() for y in line.get_ydata() if y > 0]
        if heights and max(heights) / min(heights) >= 20:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.08 * max(heights, default=0)))  # crosses lie inside
        axes.set(xlabel=item.x, ylabel=name or _label(item, folded), title=model)
        axes.grid(alpha=0.3)
    _legend(figure, panels)
    return figure


def _line(axes: Any, points: Sequence[tuple[float | None, Cell]], label: str, number: int) -> None:
    """Draw line `number` of a panel: cells with a number over their positions, with their standard errors."""
    style = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8], "markersize": 4, "linewidth": 1.2}
    xs, cells = zip(*points, strict=True)
    axes.errorbar(xs, [cell.ours for cell in cells], yerr=_errors(cells), capsize=2, label=label, **style)


def count_text(x: float) -> str:
    """Return a number of sequences or tokens as text: 65536 as ``64k``."""
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def _sweep(item: Item, folded: Folded, pyplot: Any) -> Any:
    """Draw the last column's cells over the rows' positions: a line per series of rows and model.

    The series share one panel if the item names the axis that they have in common; otherwise each has its own.
    """
    assert isinstance(item, Grid)
    series = list(dict.fromkeys(row.series for row in item.rows if row.series))
    figure, panels = _panels([""] if item.x else series, pyplot)
    last = folded.headings[-1].name
    lines = [(name, model) for name in series for model in folded.models]
    for number, (name, model) in enumerate(lines):
        axes = panels[0 if item.x else series.index(name)]
        points = []
        for row in item.rows:
            cell = folded.at(model, row.name, last)
            place = folded.at(model, row.name, item.along) if item.along else None
            x = row.x if place is None else place.ours
            if row.series == name and cell is not None and cell.ours is not None and x is not None:
                points.append((x, cell))
        points.sort(key=lambda point: point[0])
        if points:
            _line(axes, points, name if len(folded.models) == 1 else f"{model}, {name}", number)
        axes.set(xlabel=item.x or name, ylabel=_label(item, folded))
        axes.grid(alpha=0.3)
    if item.x or len(folded.models) > 1:
        _legend(figure, panels)
    return figure


def _bars(item: Item, folded: Folded, pyplot: Any) -> Any:
    """Draw groups of bars: one group per model, or per column where there is one model; a bar per setting."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.2), constrained_layout=True)
    names = [h.name for h in folded.headings]
    along = [(model, name) for model in folded.models for name in names]
    width = 0.8 / max(1, len(folded.rows))
    for number, row in enumerate(folded.rows):
        cells = [folded.at(model, row, name) for model, name in along]
        heights = [0.0 if cell is None or cell.ours is None else cell.ours for cell in cells]
        places = [place + (number - (len(folded.rows) - 1) / 2) * width for place in range(len(along))]
        style = {"color": COLOURS[number % 8], "hatch": HATCHES[number % 8], "edgecolor": "white", "linewidth": 0.3}
        axes.bar(places, heights, width, yerr=_errors(cells), label=row, **style)
        for place, cell in zip(places, cells, strict=True):
            if cell is None or cell.ours is None:
                axes.annotate("n/a", (place, 0), rotation=90, ha="center", va="bottom", fontsize=6)
    labels = [
        name if len(folded.models) == 1 else model if len(names) == 1 else f"{model}\n{name}" for model, name in along
    ]
    axes.set_xticks(range(len(along)), labels)
    axes.set(xlabel=item.x, ylabel=_label(item, folded))
    axes.grid(axis="y", alpha=0.3)
    _legend(figure, [axes])
    return figure


def _heat(item: Item, folded: Folded, pyplot: Any) -> Any:
    """Draw ``arrays["heat"]`` (rows of numbers) as a heat map, rows named by ``arrays["rows"]``."""
    heat = folded.arrays["heat"]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.9 + 0.24 * len(heat)), constrained_layout=True)
    picture = axes.imshow(heat, aspect="auto", cmap="cividis", interpolation="nearest")
    axes.set_yticks(range(len(heat)), folded.arrays.get("rows") or [str(n + 1) for n in range(len(heat))])
    axes.set(xlabel=item.x, ylabel=_label(item, folded))
    figure.colorbar(picture, ax=axes, label=str(folded.arrays.get("label", "")))
    return figure


def _boxes(item: Item, folded: Folded, pyplot: Any) -> Any:
    """Draw ``arrays["boxes"]`` (name -> numbers) as box plots."""
    boxes = folded.arrays["boxes"]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.2), constrained_layout=True)
    axes.boxplot(list(boxes.values()), tick_labels=list(boxes), showfliers=False)
    axes.set(xlabel=item.x, ylabel=_label(item, folded))
    axes.grid(axis="y", alpha=0.3)
    return figure


def _label(item: Item, folded: Folded) -> str:
    """Return the label of the vertical axis; with tiny, memory is in MiB."""
    small = any(heading.unit == "MiB" for heading in folded.headings)
    return item.y.replace("GiB", "MiB") if small else item.y


def _panels(
    places: Sequence[object], pyplot: Any, most: int = 2, high: float = 2.7, title: float = 0.5, least: float = 0.0
) -> tuple[Any, list[Any]]:
    """Return a figure with a panel per place, at most `most` in a row, and its panels; heights are in inches."""
    across = min(most, len(places))
    down = -(-len(places) // across)
    size = (WIDTH, max(least, high * down + title))
    figure, axes = pyplot.subplots(down, across, figsize=size, constrained_layout=True, squeeze=False)
    panels = [panel for line in axes for panel in line]
    for panel in panels[len(places) :]:
        panel.set_axis_off()
    return figure, panels


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """Add one legend below all panels, with each label once."""
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True)) | entries
    if entries:
        place = {"loc": "outside lower center", "ncols": min(4, len(entries)), "frameon": False}
        figure.legend(entries.values(), entries.keys(), **place)


def _errors(cells: Sequence[Cell | None]) -> list[float]:
    return [0.0 if cell is None or cell.stderr is None else cell.stderr for cell in cells]


def _arrays(item: Item, folded: Folded, pyplot: Any) -> Any:
    """Draw ``arrays["panels"]``, a list of panels, ``arrays["across"]`` of them side by side.

    A panel has ``title``, ``x``, ``y``, ``log`` (both axes are logarithmic), ``length`` (x is from 0 to it) and
    ``series``: each has ``x``, ``y``, a ``label`` (may be empty) and a ``kind``: ``line``, ``dashes``, ``stems`` or
    ``points``.
    """
    contents = folded.arrays["panels"]
    figure, places = _panels(contents, pyplot, folded.arrays.get("across", 2), 1.35, 0.4, 2.6)
    for place, content in zip(places, contents, strict=False):
        for number, series in enumerate(content["series"]):
            _series(place, series, number)
        if content.get("log"):
            place.set_xscale("log", base=2)
            place.set_yscale("log")
        if "length" in content:
            place.set_xlim(-0.02 * content["length"], 1.02 * content["length"])
        place.set(xlabel=content.get("x", ""), ylabel=content.get("y", ""))
        place.set_title(content.get("title", ""), fontsize=8)
        place.grid(alpha=0.3)
        if any(series.get("label") for series in content["series"]):
            place.legend(fontsize=7, frameon=False)
    return figure


def _series(place: Any, series: dict[str, Any], number: int) -> None:
    x, y, label, colour = series["x"], series["y"], series.get("label") or None, COLOURS[number % len(COLOURS)]
    if series["kind"] == "stems":
        place.vlines(x, 0, y, color=colour, linewidth=0.8, label=label)
    elif series["kind"] == "points":
        place.plot(x, y, linestyle="", marker="v", markersize=4, color="#D55E00", label=label)
    elif series["kind"] == "dashes":
        place.plot(x, y, linestyle="--", color="#7F7F7F", linewidth=1.2, label=label)
    else:
        place.plot(x, y, marker=MARKERS[number % len(MARKERS)], markersize=4, color=colour, linewidth=1.2, label=label)


_DRAWERS = {"lines": _draw_lines, "bars": _bars, "sweep": _sweep, "heat": _heat, "boxes": _boxes, "panels": _arrays}
