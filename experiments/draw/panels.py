"""Pictures of panels: lines, stems and points of arrays that a fold provides."""

from __future__ import annotations

from typing import Any

from experiments.draw.style import COLOURS, MARKERS, WIDTH


def panels(item: Any, folded: Any, pyplot: Any) -> Any:
    """Draw ``arrays["panels"]``, a list of panels, ``arrays["across"]`` of them side by side.

    A panel has ``title``, ``x``, ``y``, ``log`` (both axes are logarithmic), ``length`` (x is from 0 to it) and
    ``series``: each has ``x``, ``y``, a ``label`` (may be empty) and a ``kind``: ``line``, ``dashes``, ``stems`` or
    ``points``.
    """
    contents = folded.arrays["panels"]
    across = min(folded.arrays.get("across", 2), len(contents))
    down = -(-len(contents) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(WIDTH, max(2.6, 1.35 * down + 0.4)), constrained_layout=True, squeeze=False
    )
    places = [panel for line in axes for panel in line]
    for place in places[len(contents) :]:
        place.set_axis_off()
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
