"""Pictures of a trained model: KL divergence against bits, and against the factor of outliers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.formats.fold import label
from experiments.formats.grid import TAILS, Tail
from experiments.place import drawable
from experiments.real.sentences import Line, columns_of, lines_of, packed_bits, quantizer_of

#: height of a name in a picture, in points
LINE = 7.5


def draw_pictures(kl: Line | None, outliers: Line | None, tiny: Line | None, folder: Path) -> None:
    """Draw what has been measured into ``kl/plot.png`` and ``outliers/plot.png``; nothing without matplotlib."""
    if not drawable():
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if kl:
        draw_formats(pyplot, kl, folder / "kl" / "plot.png")
    if outliers:
        draw_factors(pyplot, [whole for whole in (outliers, tiny) if whole], folder / "outliers" / "plot.png")


def reach(figure: Mapping[str, float | None]) -> list[list[float]]:
    """Return the lengths of a figure's error bar, below and above."""
    value = float(figure["value"] or 0.0)
    low, high = (value if figure[end] is None else float(figure[end] or 0.0) for end in ("low", "high"))
    return [[max(value - low, 0.0)], [max(high - value, 0.0)]]


def draw_formats(pyplot: Any, whole: Line, path: Path) -> None:
    """Draw KL divergence against packed bits, with 95 % intervals: formats as shipped, and at equal exact tokens."""
    column = columns_of(whole)[0]
    families = sorted({line["family"] for line in whole["lines"]})
    tails: tuple[tuple[Tail | None, str], ...] = ((None, "as shipped"), ("wide", f"exact tokens: {TAILS['wide']}"))
    shown = [(title, lines) for tail, title in tails if (lines := lines_of(whole, tail))]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(8 * len(shown), 9), sharey=True, squeeze=False)
    named: list[dict[str, tuple[float, float]]] = []
    for axes, (title, lines) in zip(panels[0], shown, strict=True):
        places = {}
        for line in lines:
            if column in line["runs"]:
                kl, x = line["runs"][column]["kl"], packed_bits(line["setting"])
                colour = f"C{families.index(line['family']) % 10}"
                axes.errorbar([x], [kl["value"]], reach(kl), fmt="o", ms=4, lw=1, color=colour)
                places[quantizer_of(line)] = (x, kl["value"])
        axes.set(yscale="log", xlabel="bits per packed element, scales included (heads of 64 channels)", title=title)
        axes.margins(x=0.15)
        axes.grid(alpha=0.3)
        named.append(places)
    panels[0][0].set_ylabel(f"KL divergence from fp16, nats a token ({whole['model']}, {column})")
    figure.tight_layout()
    for axes, places in zip(panels[0], named, strict=True):
        label(axes, places)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def draw_factors(pyplot: Any, models: Sequence[Line], path: Path) -> None:
    """Draw KL divergence against the factor of outliers, with 95 % intervals: a panel for each model."""
    figure, panels = pyplot.subplots(1, len(models), figsize=(6 * len(models), 5), squeeze=False)
    ends: list[dict[str, tuple[float, float]]] = []
    for axes, whole in zip(panels[0], models, strict=True):
        columns, last = columns_of(whole), {}
        for number, line in enumerate(line for line in whole["lines"] if line["family"] != "fp16"):
            known = [(int(name.split()[-1]), line["runs"][name]["kl"]) for name in columns if name in line["runs"]]
            places, values = zip(*((factor, kl["value"]) for factor, kl in known), strict=True)
            last[quantizer_of(line)] = (places[-1], values[-1])
            bars = [[part[0] for part in side] for side in zip(*(reach(kl) for _, kl in known), strict=True)]
            dashes = "-" if number < 10 else "--"
            axes.errorbar(places, values, bars, fmt="o", ms=3, lw=1, ls=dashes, color=f"C{number % 10}")
        ticks = [int(name.split()[-1]) for name in columns]
        axes.set(xscale="log", yscale="log", xlabel="factor of the channels made larger", title=whole["model"])
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
        axes.set_xlim(0.8 * ticks[0], 6 * ticks[-1])
        axes.grid(alpha=0.3)
        ends.append(last)
    panels[0][0].set_ylabel("KL divergence from fp16, nats a token")
    figure.tight_layout()
    for axes, last in zip(panels[0], ends, strict=True):
        label_ends(axes, last)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def label_ends(axes: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """Name lines at their ends on the right, one name above the other; the limits of the panel must be final."""
    scale, below = 72 / axes.figure.dpi, -math.inf
    for name, place in sorted(ends.items(), key=lambda item: item[1][1]):
        own = scale * axes.transData.transform(place)[1]
        below = max(own, below + LINE)
        axes.annotate(name, place, (6, below - own - 2), textcoords="offset points", size=6)
