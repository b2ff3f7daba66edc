"""The table of formats as markdown, and KL divergence against bits as a plot (PNG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.formats.grid import TAILS, line_key
from experiments.measured import TINY, markdown_table
from experiments.mini.report import percentage_points

#: colour and marker of each family
STYLE = {
    "fp16": ("black", "*"),
    "plain": ("tab:gray", "x"),
    "kivi": ("tab:blue", "o"),
    "engine": ("tab:brown", "s"),
    "turboquant": ("tab:red", "D"),
    "kvarn": ("tab:green", "^"),
    "oscar": ("tab:purple", "v"),
    "kvquant": ("tab:olive", "h"),
}
Line = Mapping[str, Any]


def formats_markdown(
    content: Mapping[str, Any], claims: Sequence[Line] = (), steps: Mapping[str, float] | None = None
) -> str:
    """Return a table for each tail, lines with the fewest bits last, and one of the claims.

    Args:
        content: what ``lines.json`` holds.
        claims: what ``claims.json`` holds.
        steps: time per token of a large model in milliseconds, by line
            (:func:`experiments.formats.tpot.step_milliseconds`).
    """
    steps = steps or {}
    head = ["quantizer", "bits", "KL mean, 0.0001 nats", "KL 99.9 %", "same top", "score", "Δ to fp16", "TPOT, ms"]
    head += [name.replace("_", " ") for name in content["tasks"]]
    out: list[str] = []
    for tail, title in TAILS.items():
        chosen = [line for line in content["lines"] if line["tail"] == tail or line["name"] == "fp16"]
        if len(chosen) < 2:
            continue
        cells = [
            [
                line["name"],
                f"{line['bits']:.2f}",
                divergence_text(line["kld"]),
                f"{line['kld']['p99_9']:.2g}",
                f"{100 * line['same_top']['share']:.1f} %",
                f"{100 * line['score']['score']:.1f}",
                percentage_points(line["vs_fp16"]),
                milliseconds_text(steps.get(line_key(line["name"], line["tail"]))),
                *(f"{100 * line['tasks'][task]['score']:.0f}" for task in content["tasks"]),
            ]
            for line in sorted(chosen, key=lambda line: -line["bits"])
        ]
        out += [f"Exact tokens: {title}", "", *markdown_table(head, cells), ""]
    env = content["env"]
    positions = max(line["positions"] for line in content["lines"])
    out += [
        "Bits of the cache per key or value element at the end of a sample, everything counted; KL divergence from "
        f"fp16 over {content['prompts']} prompts ({positions} decoded tokens) with its 95 % interval (bootstrap over "
        f"prompts); scores in percent over {content['n']} samples, Δ paired, ± standard error. "
        f"{env['device']}, {env['dtype']}, torch {env['torch']}, transformers {env['transformers']}. "
        "TPOT: one sequence of 32k tokens in a model of the shape of Llama-2-7B on an NVIDIA H200, bf16, captured and "
        "compiled steps, rotations included, with the exact tokens of the authors; -: no kernel reads the format, or "
        "it was not timed with these exact tokens.",
    ]
    if content["missing"]:
        out += ["", f"Not run, or not to the end: {', '.join(content['missing'])}."]
    if claims:
        out += [
            "",
            "Claims: the first minus the second, paired. The exact tokens are "
            + "; ".join(f"*{tail}*: {title}" for tail, title in TAILS.items())
            + ". *apart*: by which measure the two differ (score: more than two standard errors; KL: the interval does "
            "not contain 0), and in whose favour.",
            "",
        ]
        head = ["claim", "first", "second", "bits", "Δ score", "Δ KL mean, 0.0001 nats", "apart"]
        out += markdown_table(head, map(claim_line, claims), "lllr")
    return "\n".join(out) + "\n"


def claim_line(claim: Line) -> list[str]:
    """Return the cells of one pair of a claim."""
    mean = claim["kld"]["kld_mean"]
    return [
        claim["claim"],
        claim["better"].replace(" | ", ", "),
        claim["worse"].replace(" | ", ", "),
        "{:.2f}, {:.2f}".format(*claim["bits"]),
        percentage_points(claim["score"]),
        "{} ({} to {})".format(*(digits(1e4 * mean[name], "+") for name in ("diff", "low", "high"))),
        apart(claim),
    ]


def apart(claim: Line) -> str:
    """Return which measures tell the two lines of a claim apart, and in whose favour."""
    mean, score = claim["kld"]["kld_mean"], claim["score"]
    verdicts = []
    if mean["low"] > 0 or mean["high"] < 0:
        verdicts.append("KL: " + ("first" if mean["high"] < 0 else "second"))
    if abs(score["diff"]) > 2 * score["stderr"]:
        verdicts.append("score: " + ("first" if score["diff"] > 0 else "second"))
    return ", ".join(verdicts) or "no"


def milliseconds_text(step: float | None) -> str:
    """Return milliseconds with two decimals, or ``-`` if there are none."""
    return "-" if step is None else f"{step:.2f}"


def divergence_text(kld: Mapping[str, float]) -> str:
    """Return a mean KL divergence and its interval in 0.0001 nats."""
    return "{} ({} to {})".format(*(digits(1e4 * kld[name]) for name in ("mean", "low", "high")))


def digits(x: float, sign: str = "") -> str:
    """Return a number with three significant digits, and without an exponent if it is 1000 or more."""
    return format(x, f"{sign}.0f" if abs(x) >= 999.5 else f"{sign}.3g")


def plot(lines: Sequence[Line], model: str, pyplot: Any, folder: Path) -> None:
    """Plot KL divergence against bits, one panel for each tail, as ``plot.png``."""
    tails = [tail for tail in TAILS if any(line["tail"] == tail and line["name"] != "fp16" for line in lines)]
    figure, panels = pyplot.subplots(1, len(tails), figsize=(6 * len(tails), 8), sharey=True, squeeze=False)
    for axes, tail in zip(panels[0], tails, strict=True):
        points = [line for line in lines if line["tail"] == tail and line["name"] != "fp16" and line["kld"]["mean"] > 0]
        for line in points:
            colour, marker = STYLE[line["family"]]
            axes.plot(line["bits"], line["kld"]["mean"], color=colour, marker=marker, ls="")
        axes.set_yscale("log")
        axes.margins(x=0.12)
        axes.set_xlabel("bits of the cache per element")
        axes.set_title(f"exact tokens: {TAILS[tail]}", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("KL divergence from fp16, mean, nats" + ("" if model == TINY else f" ({model})"))
    figure.tight_layout()
    for axes, tail in zip(panels[0], tails, strict=True):
        names = {line["name"]: (line["bits"], line["kld"]["mean"]) for line in lines if line["tail"] == tail}
        label(axes, {name: place for name, place in names.items() if name != "fp16" and place[1] > 0})
    figure.savefig(folder / "plot.png", dpi=130)
    pyplot.close(figure)


def label(axes: Any, places: Mapping[str, tuple[float, float]]) -> None:
    """Name points so that names cover neither each other nor a point, with a line to a name that had to move away.

    The limits of the panel must be final.
    """
    marks = [axes.transData.transform(place) for place in places.values()]
    taken: list[Any] = []
    for name, place in sorted(places.items(), key=lambda item: -item[1][1]):
        best: tuple[float, Any] | None = None
        for distance in range(8):
            for down in (distance, -distance):
                for right in (True, False):
                    text = axes.annotate(
                        name,
                        place,
                        (5 if right else -5, -2 - 7 * down),
                        textcoords="offset points",
                        size=6,
                        ha="left" if right else "right",
                        arrowprops={"arrowstyle": "-", "lw": 0.3, "color": "0.5"} if distance > 1 else None,
                    )
                    box = text.get_window_extent()
                    inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
                    hits = sum(box.overlaps(other) for other in taken) + sum(box.contains(*mark) for mark in marks)
                    cost = 10.0 * (hits + (not inside)) + distance + 0.4 * (not right)
                    if best is None or cost < best[0]:
                        if best is not None:
                            best[1].remove()
                        best = (cost, text)
                    else:
                        text.remove()
        assert best is not None
        taken.append(best[1].get_window_extent())
