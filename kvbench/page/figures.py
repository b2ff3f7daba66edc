"""The plots of the page as files, PNG and SVG, drawn with matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.results.ranking import front
from kvbench.results.store import DONE

Run = Mapping[str, Any]

#: Okabe and Ito's colours, which people with any colour vision can tell apart; markers differ as well
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
#: parts of the bill with their colours, in the order of a run's ``bill``
PARTS = (
    ("packed codes", "#0072B2"),
    ("scales and zeros", "#56B4E9"),
    ("tokens in full precision", "#E69F00"),
    ("indices", "#7F7F7F"),
)
#: figures of a point: name of the file, label, place in the point, unit
POINTS = (
    ("tpot", "time per output token (ms)", 4, 1e-3),
    ("ttft", "time to the first token (ms)", 3, 1e-3),
    ("rate", "tokens per second", 7, 1.0),
    ("bytes", "KV bytes of a sequence (MiB)", 8, 2**20),
    ("peak", "memory peak of decoding (MiB)", 9, 2**20),
)
#: maximum number of runs in a plot with a line per run
MOST = 40
#: width of a plot in inches, and size of its letters in points
WIDTH, LETTERS = 6.5, 8


def write_plots(data: Mapping[str, Any], folder: Path) -> tuple[str, list[Path]]:
    """Write the plots of comparable runs to an existing folder; return the group's title and the paths of the files.

    The group is the largest one (:func:`largest`); plots of fidelity and of points show the largest group with such
    figures (:func:`most`). A plot for which no run has figures is not written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    group, runs = largest(data["runs"])
    title = data["groups"].get(group, group)
    styles = _styles(runs)
    plots: dict[str, Callable[[Any], Any]] = {
        "score-bytes": lambda p: _scatter(runs, "kv", "KV bytes of a sequence (MiB)", 2**20, styles, p),
        "score-tpot": lambda p: _scatter(runs, "tpot", "time per output token (ms)", 1e-3, styles, p),
        "differences": lambda p: _heat(runs, data["tasks"], p),
        "bytes": lambda p: _bill(runs, p),
        "tpot": lambda p: _draw_times(runs, "tpots", "time per output token (ms)", styles, p),
        "ttft": lambda p: _draw_times(runs, "ttfts", "time to the first token (ms)", styles, p),
    }
    compared, runs_compared = most(data["runs"], "kl")
    distances = _styles(runs_compared)
    plots["kl-bytes"] = lambda p: _scatter(
        runs_compared, "kv", "KV bytes of a sequence (MiB)", 2**20, distances, p, "kl"
    )
    measured, lines = most(data["runs"], "points")
    marks = _styles(lines)
    for name, label, place, unit in POINTS:
        plots[f"points-{name}"] = partial(_draw_points, lines, place, unit, label, marks)
    files = []
    with pyplot.rc_context({"font.size": LETTERS, "svg.hashsalt": "kvbench", "svg.fonttype": "path"}):
        for name, plot in plots.items():
            drawn = plot(pyplot)
            if drawn is None:
                continue
            group_of = {"points": measured, "kl": compared}.get(name.partition("-")[0], group)
            drawn.suptitle(_drawable_text(data["groups"].get(group_of, group_of)), fontsize=LETTERS)
            for suffix, options in (("png", {"dpi": 200}), ("svg", {"metadata": {"Date": None}})):
                files.append(folder / f"{name}.{suffix}")
                drawn.savefig(files[-1], **options)
            pyplot.close(drawn)
    return title, files


def largest(runs: Sequence[Run]) -> tuple[str, list[Run]]:
    """Return the largest group of comparable runs: the half of the id that they share, and its finished runs.

    The size of a group is its number of runs with a score or a perplexity; if no run has one, of all finished runs.
    """
    finished = [run for run in runs if run["status"] in DONE]
    judged = [run for run in finished if _quality(run) is not None] or finished
    if not judged:
        return "", []
    group = Counter(_group(run) for run in judged).most_common(1)[0][0]
    return group, [run for run in finished if _group(run) == group]


def most(runs: Sequence[Run], key: str) -> tuple[str, list[Run]]:
    """Return what :func:`largest` returns, but of the finished runs with the figure `key`, such as ``points``."""
    having = [run for run in runs if run.get(key) and run["status"] in DONE]
    if not having:
        return "", []
    group = Counter(_group(run) for run in having).most_common(1)[0][0]
    return group, [run for run in having if _group(run) == group][:MOST]


def _draw_points(
    runs: Sequence[Run], place: int, unit: float, label: str, styles: Mapping[str, Mapping[str, str]], pyplot: Any
) -> Any:
    """Draw a figure of measured points over the prompt length, a line per run, at the batch size with most points."""
    known = [point for run in runs for point in run["points"] if len(point) > place and point[place]]
    if not known:
        return None
    batch = Counter(point[1] for point in known).most_common(1)[0][0]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 4), constrained_layout=True)
    for run in runs:
        mine = sorted((p[0], p[place] / unit) for p in run["points"] if p[1] == batch and len(p) > place and p[place])
        if mine:
            method = _method(run)
            axes.plot(*zip(*mine, strict=True), label=_drawable_text(run["name"], 30), markersize=5, **styles[method])
    lengths = sorted({point[0] for point in known if point[1] == batch})
    if len(lengths) > 1:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(lambda y, _: f"{y:g}")
        axes.tick_params(axis="x", which="minor", size=0)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.set(xlabel=f"prompt tokens (batch {batch})", ylabel=label)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _scatter(
    runs: Sequence[Run],
    key: str,
    label: str,
    unit: float,
    styles: Mapping[str, Mapping[str, str]],
    pyplot: Any,
    of: str = "",
) -> Any:
    """Draw the quality of runs against a cost, with error bars and the Pareto front.

    The quality is the score or the perplexity; if `of` is ``kl``, the KL divergence of runs in which it is above 0.
    """
    judged = _divergence_point if of else lambda run: (_quality(run), _score_error(run))
    points = [
        (run[key] / unit, quality, error, run)
        for run in runs
        for quality, error in [judged(run)]
        if key in run and quality is not None
    ]
    if not points:
        return None
    up = not of and "score" in points[0][3]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 4), constrained_layout=True)
    named: set[str] = set()
    for x, y, error, run in points:
        method = _method(run)
        label_once = None if method in named else method
        named.add(method)
        axes.errorbar(x, y, yerr=error, label=label_once, linestyle="", markersize=5, capsize=2, **styles[method])
    best = [points[i][:2] for i in front([(x, y) for x, y, _, _ in points], up)]
    axes.step(*zip(*best, strict=True), where="post", color="#444444", linestyle="--", linewidth=1, label="Pareto")
    costs = [point[0] for point in points]
    if min(costs) > 0 and max(costs) / min(costs) > 6:
        axes.set_xscale("log")
        for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis(lambda x, _: f"{x:g}")
    if of:
        axes.set_yscale("log")
    worse = "KL divergence from fp16 (nats per token)" if of else "perplexity"
    axes.set(xlabel=label, ylabel="score (mean over tasks)" if up else worse)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure


def _heat(runs: Sequence[Run], names: Sequence[str], pyplot: Any) -> Any:
    """Draw the paired differences from fp16 by task as a heat map."""
    chosen = [run for run in runs if any(_difference(task) is not None for task in run.get("tasks", ()))][:MOST]
    if not chosen:
        return None
    keys = list(dict.fromkeys(task[0] for run in chosen for task in run["tasks"]))
    table = [[{task[0]: _difference(task) for task in run["tasks"]}.get(key) for key in keys] for run in chosen]
    most = max(abs(value) for line in table for value in line if value is not None) or 1.0
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1.4 + 0.22 * len(chosen)), constrained_layout=True)
    numbers = [[float("nan") if value is None else value for value in line] for line in table]
    losses = "PuOr" if any("score" in run for run in chosen) else "PuOr_r"  # orange; a higher perplexity is a loss
    picture = axes.imshow(numbers, aspect="auto", cmap=losses, vmin=-most, vmax=most, interpolation="nearest")
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            if value is not None:
                colour = "white" if abs(value) > 0.7 * most else "black"
                axes.annotate(f"{value:+.2f}", (x, y), ha="center", va="center", fontsize=6, color=colour)
    axes.set_yticks(range(len(chosen)), [_drawable_text(run["name"], 44) for run in chosen])
    axes.set_xticks(range(len(keys)), [_drawable_text(names[key], 24) for key in keys], rotation=30, ha="right")
    figure.colorbar(picture, ax=axes, label="method minus fp16")
    return figure


def _bill(runs: Sequence[Run], pyplot: Any) -> Any:
    """Draw the bytes of each run as a bar of its parts."""
    chosen = sorted((run for run in runs if run.get("bill")), key=lambda run: run["kv"])[-MOST:]
    if not chosen:
        return None
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1 + 0.2 * len(chosen)), constrained_layout=True)
    left = [0.0] * len(chosen)
    for i, (name, colour) in enumerate(PARTS):
        widths = [run["bill"][i] / 2**20 for run in chosen]
        axes.barh(range(len(chosen)), widths, left=left, label=name, color=colour, edgecolor="white", linewidth=0.4)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(chosen)), [_drawable_text(run["name"], 44) for run in chosen])
    axes.set(xlabel="KV bytes of a sequence (MiB)")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_times(runs: Sequence[Run], key: str, label: str, styles: Mapping[str, Mapping[str, str]], pyplot: Any) -> Any:
    """Draw the distribution of a time per run: 5 % to 95 %, the middle half, the median."""
    chosen = sorted((run for run in runs if run.get(key)), key=lambda run: -run[key][2])[-MOST:]
    if not chosen:
        return None
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1 + 0.2 * len(chosen)), constrained_layout=True)
    names = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(names, (value * 1e3 for value in run[key][:5]), strict=True)) for run in chosen]
    drawn = axes.bxp(
        boxes, orientation="horizontal", showfliers=False, patch_artist=True, medianprops={"color": "black"}
    )
    for patch, run in zip(drawn["boxes"], chosen, strict=True):
        patch.set(facecolor=styles[_method(run)]["color"], alpha=0.6)
    axes.set_yticks(range(1, len(chosen) + 1), [_drawable_text(run["name"], 44) for run in chosen])
    axes.set(xlabel=label)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _styles(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Return a colour and a marker per method; the pair differs for up to 56 methods."""
    methods = sorted({_method(run) for run in runs} - {"fp16"})
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, name in enumerate(["fp16", *methods])
    }


def _method(run: Run) -> str:
    return _drawable_text(run["label"].split(" ")[0])


def _group(run: Run) -> str:
    return str(run["id"]).partition("-")[0]


def _quality(run: Run) -> float | None:
    entry = run.get("score") or run.get("ppl")
    return entry[0] if entry else None


def _score_error(run: Run) -> float | None:
    entry = run.get("score") or run.get("ppl")
    return entry[1] if entry and len(entry) > 1 else None


def _divergence_point(run: Run) -> tuple[float | None, list[list[float]] | None]:
    """Return the KL divergence of a run, None if it is 0, and the distances from it to both ends of its interval."""
    mean, ends = run["kl"][0], run["kl"][4:6]
    return mean or None, [[mean - ends[0]], [ends[1] - mean]] if ends and None not in ends else None


def _difference(task: Sequence[Any]) -> float | None:
    return task[4] if len(task) > 4 else None


def _drawable_text(text: str, longest: int = 100) -> str:
    """Return a text shortened to `longest` characters, with ``$`` escaped, which begins mathematics in matplotlib."""
    plain = text.encode("utf-8", "replace").decode().replace("$", r"\$")
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."
