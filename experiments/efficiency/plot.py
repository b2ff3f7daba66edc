"""Throughput, TPOT and memory against batch; TPOT against context (PNG)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.results.point_record import MeasuredPoint

#: file -> the figure's axis, its unit, what one unit is in the point's
FIGURES = {
    "tokens_per_s": ("tokens/s, including search and prefill", 1.0),
    "tpot_s": ("TPOT, ms", 1e-3),
    "peak_decode": ("peak memory of decoding, GiB", float(2**30)),
}


def plot(points: Sequence[MeasuredPoint], pyplot: Any, out: Path) -> None:
    """Draw what there is more than one point of."""
    for fixed, along in (("prompt", "batch"), ("batch", "prompt")):
        groups: dict[tuple[Any, ...], list[MeasuredPoint]] = {}
        for point in points:
            key = (point.model, point.device, point.limit_gb, point.new_tokens, getattr(point, fixed), point.how)
            groups.setdefault(key, []).append(point)
        for key, group in groups.items():
            if len({getattr(point, along) for point in group}) > 1:
                draw_panels(group, fixed, along, key, pyplot, out)


def draw_panels(
    group: Sequence[MeasuredPoint], fixed: str, along: str, key: tuple[Any, ...], pyplot: Any, out: Path
) -> None:
    """Draw one picture with a panel for each figure; a cross marks where memory ended."""
    names = [name for name in FIGURES if any(getattr(point, name) for point in group)]
    if not names:
        return
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(4.6 * len(names), 4), constrained_layout=True, squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        label, unit = FIGURES[name]
        for setting in dict.fromkeys(point.setting for point in group):
            mine = sorted((p for p in group if p.setting == setting), key=lambda p: getattr(p, along))
            good = [(getattr(p, along), getattr(p, name) / unit) for p in mine if getattr(p, name)]
            if not good:
                continue
            (drawn,) = axes.plot(*zip(*good, strict=True), marker="o", markersize=4, label=setting)
            ended = [getattr(p, along) for p in mine if p.status == "oom"]
            if ended:
                axes.plot(min(ended), good[-1][1], marker="x", markersize=9, color=drawn.get_color())
        axes.set_xscale("log", base=2)
        axes.set_xlabel({"batch": "batch", "prompt": "context, tokens"}[along])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7, frameon=False)
    limit = "" if key[2] is None else f", at most {key[2]:g} GiB"
    how = ", ".join(filter(None, (key[1], key[5])))
    figure.suptitle(f"{key[0]}, {fixed} {key[4]}, {key[3]} new tokens{limit} ({how}); x: out of memory", fontsize=9)
    name = "_".join(str(part) for part in (key[0], along, f"{fixed}{key[4]}", f"new{key[3]}") if part)
    name += "" if key[2] is None else f"_{key[2]:g}gb"
    name += "_compiled" if "compiled" in key[5] else ""
    name += "_random" if "random" in key[5] else ""
    figure.savefig(out / f"{name}.png", dpi=130)
    pyplot.close(figure)
