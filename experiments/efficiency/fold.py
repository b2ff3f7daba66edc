"""Points into the papers' figures: what each setting reaches, to full precision, and the papers' claims beside it.

Points are those of runs of ``dataset=efficiency`` and of JSON files of ``kvbench.bench memory | tpot``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from experiments.measured import Folded
from experiments.stored import as_csv, markdown_table
from kvbench.results.point_record import MeasuredPoint, bench_points, circumstances, from_record
from kvbench.results.samples import MEASURED
from kvbench.results.store import find_runs
from kvbench.results.tables import labels
from kvbench.util.table import seconds, size

Row = dict[str, Any]
HEAD = (
    *("setting", "largest batch", "best tokens/s (batch)", "TPOT (batch)"),
    *("roofline", "peak of decoding", "KV", "steps"),
)

#: figure of a picture -> its axis, its unit, what one unit is in the point's
FIGURES = {
    "tokens_per_s": ("tokens/s, including search and prefill", 1.0),
    "tpot_s": ("TPOT, ms", 1e-3),
    "peak_decode": ("peak memory of decoding, GiB", float(2**30)),
}


@dataclass(frozen=True)
class Claim:
    """A paper's claim about its method, compared with full precision.

    Args:
        where: paper and figure.
        method: settings that begin with this name are held against it.
        figure: ``throughput``, ``batch``, ``tpot`` or ``memory``.
        low, high: relative change to full precision, from the least to the most.
    """

    where: str
    method: str
    figure: Literal["throughput", "batch", "tpot", "memory"]
    low: float
    high: float


CLAIMS = (
    Claim("LogQuant, Fig. 7", "logquant", "throughput", 0.25, 0.25),
    Claim("LogQuant, Fig. 7", "logquant", "batch", 0.60, 0.60),
    Claim("Cocktail, Fig. 4", "cocktail", "memory", -0.42, -0.12),
    Claim("Cocktail, Fig. 5", "cocktail", "tpot", -0.52, -0.32),
)


def read_points(places: Sequence[Path]) -> list[MeasuredPoint]:
    """Return the points of files and folders (of runs, of files), each once; a later file wins.

    Raises:
        FileNotFoundError: a place does not exist.
        DataError: a file is damaged.
    """
    points: dict[tuple[Any, ...], MeasuredPoint] = {}
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"{place} does not exist")
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        for point in chain(run_points(place), *map(bench_points, files)):
            points[(*point.group, point.setting, point.batch)] = point
    return list(points.values())


def run_points(folder: Path) -> Iterator[MeasuredPoint]:
    """Yield the points of all runs in a folder."""
    stores = [(store, content) for store in find_runs(folder) if (content := store.metrics()) is not None]
    stores = [(store, content) for store, content in stores if any(e.get("points") for e in content["scores"].values())]
    for (store, content), label in zip(stores, labels([content for _, content in stores]), strict=True):
        runtime = (store.config() or {}).get("runtime") or {}
        eager = ", eager" if runtime.get("graphs") == "never" else ""
        for row in store.samples().rows.values():
            record = row[MEASURED].get("point")
            if record:
                yield from_record(
                    record,
                    model=content["config"]["model"],
                    device=row[MEASURED]["device"],
                    setting=label + eager,
                    limit_gb=runtime.get("memory_limit_gb"),
                    how=circumstances(row[MEASURED].get("dtype"), bool(runtime.get("compile")), record.get("fill")),
                )


def fold_efficiency(points: Sequence[MeasuredPoint]) -> Folded:
    """Return ``points.csv``, ``table.md`` and plots."""
    ordered = sorted(points, key=lambda p: (*map(str, p.group[:4]), p.new_tokens, p.prompt, p.setting, p.batch))
    lines = as_csv([field.name for field in fields(MeasuredPoint)], map(asdict, ordered))
    return Folded(point_tables(ordered), {"points.csv": lines}, {"points": len(points)}, partial(plot, ordered))


def point_tables(points: Sequence[MeasuredPoint]) -> str:
    """Return a table for each group of points, in their order."""
    groups: dict[tuple[Any, ...], list[MeasuredPoint]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    return "\n".join(section(group) for group in groups.values())


def section(group: Sequence[MeasuredPoint]) -> str:
    """Return the table of one group, and the claims that apply to it."""
    one = group[0]
    limit = "" if one.limit_gb is None else f", at most {one.limit_gb:g} GiB"
    how = ", ".join(filter(None, (one.device, one.how)))
    title = f"### {one.model}, prompts of {one.prompt}, {one.new_tokens} new tokens{limit} ({how})"
    rows = [reached(group, setting) for setting in dict.fromkeys(point.setting for point in group)]
    base = next((row for row in rows if row["setting"].split(" ")[0] == "fp16"), None)
    lines = [title, "", *markdown_table(HEAD, (figures_line(row, base) for row in rows), "lrrrrrrl")]
    judgements = [text for claim in CLAIMS for row in rows if (text := judged(claim, row, base))]
    return "\n".join([*lines, "", *judgements, ""] if judgements else [*lines, ""])


def reached(group: Sequence[MeasuredPoint], setting: str) -> Row:
    """Return the results of a setting: limits of the batch, best throughput, and its figures by batch."""
    mine = [point for point in group if point.setting == setting]
    good = {point.batch: point for point in mine if point.status == "ok"}
    timed = [point for point in good.values() if point.tokens_per_s]
    return {
        "setting": setting,
        "points": good,
        "max_batch": max(good, default=None),
        "oom_batch": min((point.batch for point in mine if point.status == "oom"), default=None),
        "best": max(timed, key=lambda point: point.tokens_per_s or 0.0, default=None),
    }


def relative(figure: str, row: Row, base: Row) -> tuple[float, int | None] | None:
    """Return a setting's change to full precision, and the batch at which it is taken; None without a common batch.

    Throughput: each at its best batch. Batch: where both ended for memory. TPOT and memory: at the largest batch that
    both have, where the papers' differences are largest.
    """
    if figure == "throughput":
        if not (row["best"] and base["best"] and row["oom_batch"] and base["oom_batch"]):
            return None
        return row["best"].tokens_per_s / base["best"].tokens_per_s - 1, None
    if figure == "batch":
        ended = row["oom_batch"] and base["oom_batch"] and row["max_batch"] and base["max_batch"]
        return (row["max_batch"] / base["max_batch"] - 1, None) if ended else None
    name = {"tpot": "tpot_s", "memory": "peak_decode"}[figure]
    shared = [batch for batch, p in row["points"].items() if batch in base["points"] and getattr(p, name)]
    shared = [batch for batch in shared if getattr(base["points"][batch], name)]
    if not shared:
        return None
    batch = max(shared)
    return getattr(row["points"][batch], name) / getattr(base["points"][batch], name) - 1, batch


def figures_line(row: Row, base: Row | None) -> list[str]:
    """Return a row of the table; ratios to full precision follow the figures."""
    if not row["points"]:
        return [row["setting"], f"none: {row['oom_batch']} did not fit", *"------"]
    ratios = {}
    if base is not None and row is not base:
        ratios = {figure: relative(figure, row, base) for figure in ("throughput", "batch", "tpot", "memory")}

    def beside(figure: str) -> str:
        ratio = ratios.get(figure)
        return "" if ratio is None else f", {1 + ratio[0]:.2f}x"

    compared = [ratio[1] for figure in ("tpot", "memory") if (ratio := ratios.get(figure))]
    batch = compared[0] if compared else max(row["points"])
    point, best = row["points"][batch], row["best"]
    end = "" if row["oom_batch"] is None else f" of {row['oom_batch']} tried"
    expected = "" if point.expected_tpot_s is None else f" ({seconds(point.expected_tpot_s)} expected)"
    return [
        row["setting"],
        f"{row['max_batch']}{end}{beside('batch')}",
        "-" if best is None else f"{best.tokens_per_s:.4g} ({best.batch}){beside('throughput')}",
        f"{seconds(point.tpot_s)} ({batch}){beside('tpot')}",
        f"{seconds(point.predicted_tpot_s)}{expected}",
        f"{size(point.peak_decode)}{beside('memory')}",
        size(point.kv_used),
        point.stepping.split(" (")[0] or "-",
    ]


def judged(claim: Claim, row: Row, base: Row | None) -> str:
    """Return a claim with the measured change; empty where it is about another setting, or nothing was measured."""
    if base is None or row["setting"].split(":")[0].split(" ")[0] != claim.method:
        return ""
    comparison = relative(claim.figure, row, base)
    if comparison is None:
        return ""
    change, batch = comparison
    claimed = f"{claim.low:+.0%}" if claim.low == claim.high else f"{claim.low:+.0%} to {claim.high:+.0%}"
    at = "" if batch is None else f" at batch {batch}"
    better = change > claim.high if claim.figure in ("throughput", "batch") else change < claim.low
    verdict = "better" if better else "as claimed" if claim.low <= change <= claim.high else "less"
    return f"- {claim.where} claims {claimed} {claim.figure}; {row['setting']}: {change:+.0%}{at} ({verdict})"


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
