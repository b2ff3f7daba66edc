"""Runs of the table of formats to numbers: each line's scores, KL divergence and bytes, and the pairs of the claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.fidelity.fold import FORCED, FREE
from experiments.formats.grid import CLAIMS, ROWS, TAILS, line_key
from experiments.formats.which import digits, divergence_text, step_milliseconds
from experiments.measured import TINY, Folded, Rows, Stored
from experiments.mini.fold import STYLE, mean_of, percentage_points, sample_score
from experiments.stored import as_json, markdown_table
from kvbench.results import fidelity_fold
from kvbench.results.samples import Row

#: the rows of both runs of a line, by data set
Runs = Mapping[str, Rows]
BASE = "fp16 | own"


def fold_formats(stored: Mapping[str, Stored], count: int, prompts: int, model: str = TINY) -> Folded:
    """Return ``lines.json``, ``claims.json``, ``table.md`` and ``plot.png``.

    Lines with fewer than `count` scored samples, or `prompts` with a KL divergence, are left out and named.
    """
    whole = {key: done.rows for key, done in stored.items() if len(done.rows[FREE]) >= count}
    whole = {key: runs for key, runs in whole.items() if len(runs[FORCED]) >= prompts}
    if BASE not in whole:
        return Folded(f"fp16 does not have its {count} scored samples and {prompts} prompts with a KL divergence")
    table = [line_figures(key, whole[key], whole[BASE]) for key in ROWS if key in whole]
    claims = [
        {"claim": claim, **compare_lines(better, worse, whole)}
        for claim, pairs in CLAIMS
        for better, worse in pairs
        if better in whole and worse in whole
    ]
    content = {
        "tasks": sorted({row["task"] for row in whole[BASE][FREE].values()}),
        "n": count,
        "prompts": prompts,
        "missing": [key for key in ROWS if key not in whole],
        "env": stored[BASE].env,
        "lines": table,
    }
    files = {"lines.json": as_json(content), "claims.json": as_json(claims)}
    return Folded(
        formats_markdown(content, claims, step_milliseconds()), files, sizes(content), partial(plot, table, model)
    )


def sizes(content: Mapping[str, Any]) -> dict[str, int]:
    """Return what a ``lines.json`` rests on: scored samples and prompts of a line, and the number of lines."""
    return {"samples": content["n"], "prompts": content["prompts"], "lines": len(content["lines"])}


def line_figures(key: str, runs: Runs, base: Runs) -> dict[str, Any]:
    """Return the figures of one line; `base` has the rows of fp16."""
    samples, row = runs[FREE], ROWS[key]
    ids = sorted(samples)
    used = sum(samples[i]["kv_bytes"]["used"]["total"] for i in ids)
    full = sum(samples[i]["kv_bytes"]["fp16_equivalent"] for i in ids)
    figures = fidelity_fold.fold_fidelity_rows(list(runs[FORCED].values())) or dict.fromkeys(
        ("kld", "same_top", "positions")
    )
    tasks: dict[str, list[str]] = {}
    for i in ids:
        tasks.setdefault(samples[i]["task"], []).append(i)
    return {
        "name": row.name,
        "family": row.family,
        "tail": row.tail,
        "setting": row.setting,
        "score": mean_of([sample_score(samples[i]) for i in ids], "score"),
        "vs_fp16": mean_of([sample_score(samples[i]) - sample_score(base[FREE][i]) for i in ids]),
        "tasks": {task: mean_of([sample_score(samples[i]) for i in chosen], "score") for task, chosen in tasks.items()},
        "bytes": used / len(ids),
        "bits": 16 * used / full,
        **{name: figures[name] for name in ("kld", "same_top", "positions")},
    }


def compare_lines(better: str, worse: str, whole: Mapping[str, Runs]) -> dict[str, Any]:
    """Return the paired differences of two lines, `better` less `worse`, in score and KL divergence, and the bits."""
    first, second = whole[better][FREE], whole[worse][FREE]
    ids = sorted(first.keys() & second.keys())
    divergences = fidelity_fold.pair_fidelity(*(list(whole[key][FORCED].values()) for key in (worse, better)))

    def bits(samples: Mapping[str, Row]) -> float:
        used = sum(samples[i]["kv_bytes"]["used"]["total"] for i in ids)
        return float(16 * used / sum(samples[i]["kv_bytes"]["fp16_equivalent"] for i in ids))

    return {
        "better": better,
        "worse": worse,
        "score": mean_of([sample_score(first[i]) - sample_score(second[i]) for i in ids]),
        "kld": divergences and {name: divergences[name] for name in ("kld_mean", "kld_median", "kld_p99_9")},
        "bits": [bits(first), bits(second)],
    }


Line = Mapping[str, Any]


def formats_markdown(
    content: Mapping[str, Any], claims: Sequence[Line] = (), steps: Mapping[str, float] | None = None
) -> str:
    """Return a table for each tail, lines with the fewest bits last, and one of the claims.

    `content` is that of ``lines.json``, `claims` that of ``claims.json``; `steps` are those of
    :func:`experiments.formats.which.step_milliseconds`.
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
