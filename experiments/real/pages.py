"""Tables of a trained model in README and docs/which-format.md, and sentences that follow from them by a rule.

The rule (:func:`order`): of two formats the one whose KL divergence is smaller is said to be closer to fp16 where the
95 % interval of the paired difference over windows excludes 0; else they are said not to be told apart. Of the bundled
model, whose file has no figures of single prompts, they are ordered where their two intervals do not overlap.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from experiments.checks.rules import Block, check_documents
from experiments.formats import which
from experiments.formats.grid import TAILS, line_key
from experiments.formats.which import LINES, bits, digits
from experiments.real.fold import FILE, by_name, difference, short, stage_content, stage_markdown, with_interval
from experiments.real.stages import EIGHT, RETRIEVAL, STAGES, line_name
from experiments.stored import ROOT, load_result_json, markdown_table, some
from kvbench.metrics import intervals

FOLDER = ROOT / "results" / "smollm2"
#: the same of the bundled model: outliers alone
BUNDLED = ROOT / "results" / "tiny" / "real"
#: a layer in the middle of the model
SHAPE = replace(which.SHAPE, query_heads=9, heads=3, channels=64, layer=15, layers=30)
PAGE = "docs/which-format.md"
Line = Mapping[str, Any]
#: pairs that the page compares, by subject: two quantizers, and the exact tokens of both
PAIRS = (
    ("8 bits", "int8 per token", "fp8", "open"),
    ("8 bits", "q8_0, rotated", "int8 per token", "open"),
    ("A rotation, with a scale per token", "int4 per token, rotated", "int4 per token", "open"),
    ("A rotation, with groups of 32 channels", "q4_0, rotated", "q4_0, not rotated", "open"),
    ("4 bits", "kivi int4 G32", "q4_0, rotated", "wide"),
    ("4 bits", "kivi int4 G32", "KVarN k4v4", "wide"),
    ("4 bits", "kivi int4 G32", "TurboQuant 4 bits", "wide"),
    ("4 bits", "kivi int4 G32", "int4 per token, rotated", "wide"),
    ("4 bits", "kivi int4 G32", "vLLM int4 per token", "wide"),
    ("Uneven levels", "iq4_nl, rotated", "q4_0, rotated", "open"),
    ("e2m1 codes", "nvfp4 4over6", "nvfp4", "open"),
    ("e2m1 codes", "q4_0, rotated", "nvfp4", "open"),
    ("3 bits", "KVarN k4v2", "TurboQuant 3 bits", "wide"),
    ("2 bits", "KVarN k2v2", "kivi int2 G32", "wide"),
    ("2 bits", "kivi int2 G32", "kivi int2 G128", "wide"),
    ("2 bits", "kivi int2 G32", "OSCAR int2", "own"),
)
Order = Literal["first", "second", "open"]
#: in place of the sentences
NO_PAIR = "None of the pairs has been measured yet: `python -m experiments.real kl --write` measures them."


def stage_file(name: str, folder: Path = FOLDER) -> Line | None:
    """Return the content of a stage's file; None before it has been written."""
    path = folder / name / FILE
    return stage_content(path) if path.exists() else None


def order(low: float, high: float) -> Order:
    """Return which of two is smaller by the interval of first less second, or that they cannot be told apart."""
    return "first" if high < 0 else "second" if low > 0 else "open"


def order_of_intervals(first: Mapping[str, float], second: Mapping[str, float]) -> Order:
    """Return which of two is smaller, each with an interval of its own."""
    return "first" if first["high"] < second["low"] else "second" if second["high"] < first["low"] else "open"


def column_of(whole: Line) -> str:
    """Return the name of the runs that the comparisons rest on: the first, at 1k tokens."""
    return next(iter(whole["lines"][0]["runs"]))


def sentences(whole: Line, tiny: Sequence[Line]) -> list[str]:
    """Return a line for each subject of :data:`PAIRS` whose formats have been measured, by the module's rule."""
    column, by_subject = column_of(whole), dict[str, list[str]]()
    for subject, one, two, tail in PAIRS:
        keys = [line_key(name, tail) for name in (one, two)]  # type: ignore[arg-type]
        runs = [by_name(whole, key).get("runs", {}).get(column) for key in keys]
        if runs[0] and runs[1]:
            mean, interval, _ = difference(runs[0], runs[1])
            said = order(*(interval or (-1.0, 1.0)))
            small = [some(tiny, name=name, tail=tail) for name in (one, two)]
            else_where = order_of_intervals(small[0][0]["kld"], small[1][0]["kld"]) if all(small) else None
            values = [run["kl"]["value"] for run in runs]
            words = compared((one, two), values, mean, interval, said)
            by_subject.setdefault(subject, []).append(words + beside((one, two), said, else_where))
    return [f"- **{subject}** {' '.join(texts)}" for subject, texts in by_subject.items()]


def compared(
    names: tuple[str, str],
    values: Sequence[float],
    mean: float,
    interval: tuple[float, float] | None,
    said: Order,
) -> str:
    """Return the sentence on one pair: which is closer to fp16, and by how much."""
    low, high = interval or (0.0, 0.0)
    gap = f"difference {short(mean)}, {short(low)} to {short(high)}"
    if said == "open":
        return f"`{names[0]}` ({short(values[0])}) and `{names[1]}` ({short(values[1])}) cannot be told apart ({gap})."
    best, worst = (0, 1) if said == "first" else (1, 0)
    return (
        f"`{names[best]}` is closer to fp16 than `{names[worst]}`: KL {short(values[best])} against "
        f"{short(values[worst])} ({gap})."
    )


def beside(names: tuple[str, str], said: Order, tiny: Order | None) -> str:
    """Return where the bundled model says otherwise; empty where it says the same or nothing."""
    if tiny is None or tiny == said or said == "open":
        return ""
    if tiny == "open":
        return " `tiny` does not tell them apart."
    return f" `tiny` says otherwise: there `{names[0 if tiny == 'first' else 1]}` is closer."


def formats_table(whole: Line, tiny: Sequence[Line]) -> list[str]:
    """Return a table for each choice of exact tokens: a line for each format, those with the fewest bits last."""
    columns, out = list(dict.fromkeys(name for line in whole["lines"] for name in line["runs"])), []
    for tail, title in TAILS.items():
        lines = [line for line in whole["lines"] if line["name"].endswith(f" | {tail}") and line["family"] != "fp16"]
        body = []
        for line in sorted(lines, key=lambda line: -bits(line["setting"], SHAPE)):
            name, runs = line["name"].partition(" | ")[0], line["runs"]
            own = [with_interval(runs[column]["kl"]) if column in runs else "-" for column in columns]
            first = runs.get(columns[0], {})
            small = some(tiny, name=name, tail=tail)
            more = [f"{short(first['p99_9'])}", f"{100 * first['flips']['value']:.1f}"] if first else ["-", "-"]
            ppl = [short(runs[column]["ppl"]) if column in runs else "-" for column in columns]
            body.append([
                name, f"{bits(line['setting']):.3g}", *own, *more, *ppl,
                digits(small[0]["kld"]["mean"]) if small else "-",
            ])  # fmt: skip
        if body:
            counts = [max(line["runs"].get(column, {}).get("n", 0) for line in lines) for column in columns]
            head = ["format", "bits, packed", *(f"KL, {c} (n = {n})" for c, n in zip(columns, counts, strict=True))]
            head += ["KL 99.9 %", "flips, %", *(f"perplexity, {c}" for c in columns), "`tiny`: KL"]
            out += [f"Exact tokens: {title}", "", *markdown_table(head, body), ""]
    base = by_name(whole, "fp16 | own").get("runs", {})
    known = [f"{short(base[column]['ppl'])} ({column})" for column in columns if column in base]
    return [*out, f"fp16's perplexity: {', '.join(known)}." if known else ""]


def readme_table(kl: Line, perplexity: Line, retrieval: Line | None) -> list[str]:
    """Return README's second table: a column for each of the eight settings, a line for each figure that is known."""
    column, wanted = column_of(kl), next(iter(perplexity["lines"][0]["runs"]))
    divergences = [by_name(kl, line_name(one.name)).get("runs", {}).get(column) for one in EIGHT]
    losses = [by_name(perplexity, one.name).get("runs", {}).get(wanted) for one in EIGHT]
    needles = [by_name(retrieval or {"lines": []}, one.name).get("runs", {}).get(RETRIEVAL) for one in EIGHT]
    base = losses[0]
    lines: list[tuple[str, Sequence[Line | None], Callable[[Any], str]]] = [
        (f"perplexity, {wanted}", losses, lambda run: perplexity_text(run, base)),
        (f"KL from fp16, {column}", divergences, lambda run: with_interval(run["kl"])),
        ("KL 99.9 %", divergences, lambda run: short(run["p99_9"])),
        ("other first token, %", divergences, lambda run: f"{100 * run['flips']['value']:.1f}"),
        ("needle in 2,048 tokens, %", needles, lambda run: with_interval(run["score"], 100)),
        ("KV bytes, fp16's to them", needles, sized),
    ]
    body = []
    for title, runs, write in lines:
        if not any(runs):
            continue
        cells = ["-" if run is None else write(run) for run in runs]
        if runs is divergences:
            cells[0] = "0"
        count = max((run["n"] for run in runs if run), default=0)
        body.append([title if runs is needles and write is sized else f"{title} (n = {count})", *cells])
    return markdown_table(["", *(setting.name for setting in EIGHT)], body)


def perplexity_text(own: Line, base: Line | None) -> str:
    """Return a perplexity and, behind it, its difference from fp16's, paired by window; alone without fp16's."""
    shown = f"{own['perplexity']['value']:.2f}"
    if base is None or own is base:
        return shown
    both = list(zip(own["samples"], base["samples"], strict=False))  # mean negative log-likelihoods of the windows
    first, second = (math.exp(fmean(values)) for values in zip(*both, strict=True))
    gap = first - second
    low, high = intervals.centred(gap, [first * a - second * b for a, b in both]) or (gap, gap)
    return f"{shown} (Δ {gap:+.2g} ±{max(gap - low, high - gap):.2g})"


def sized(needle: Line) -> str:
    """Return the mean bytes of a cache and how many times more fp16 holds."""
    return f"{needle['bytes'] / 2**20:.2f} MiB, {needle['ratio']:.2f}x"


def factors_table(whole: Line) -> list[str]:
    """Return the table of outliers: KL divergence of each format by factor, and how many times that at factor 1."""
    columns = list(dict.fromkeys(name for line in whole["lines"] for name in line["runs"]))
    body = []
    for line in whole["lines"]:
        values = [line["runs"][column]["kl"]["value"] if column in line["runs"] else None for column in columns]
        if line["family"] != "fp16":
            times = f"{values[-1] / values[0]:.3g}" if values[0] and values[-1] else "-"
            cells = ["-" if value is None else short(value) for value in values]
            body.append([line["name"].partition(" | ")[0], *cells, times])
    return markdown_table(["format", *(f"KL, {column}" for column in columns), "last to first"], body)


def page_blocks(folder: Path = FOLDER) -> list[Block]:
    """Return what the files of the stages put into documents; nothing for stages that have not been run."""
    source = str(folder.relative_to(ROOT))
    files = {name: stage_file(name, folder) for name in STAGES}
    blocks = [
        Block(f"{source}/{name}/table.md", stage_markdown(whole), f"{source}/{name}")
        for name, whole in files.items()
        if whole
    ]
    kl, perplexity, retrieval, outliers = (files[name] for name in ("kl", "perplexity", "retrieval", "outliers"))
    tiny = load_result_json(LINES)["lines"]
    if kl:
        blocks.append(Block(PAGE, "\n".join(formats_table(kl, tiny)), source, "real"))
        words = sentences(kl, tiny) or [NO_PAIR]
        blocks.append(Block(PAGE, "\n".join(words), source, "real-words"))
    if outliers:
        blocks.append(Block(PAGE, "\n".join(factors_table(outliers)), source, "outliers"))
    small = stage_file("outliers", BUNDLED) if folder == FOLDER else None
    if small:
        place = f"{BUNDLED.relative_to(ROOT)}/outliers"
        blocks.append(Block(f"{place}/table.md", stage_markdown(small), place))
        blocks.append(Block(PAGE, "\n".join(factors_table(small)), place, "outliers-tiny"))
    if kl and perplexity:
        text = readme_table(kl, perplexity, retrieval)
        blocks.append(Block("README.md", "\n".join(text), source, "real"))
    return blocks


def draw_formats(pyplot: Any, whole: Line, path: Path) -> None:
    """Draw KL divergence against packed bits, with 95 % intervals: a panel for each choice of exact tokens."""
    from experiments.formats.fold import label

    column = column_of(whole)
    tails = [tail for tail in TAILS if any(line["name"].endswith(f" | {tail}") for line in whole["lines"])]
    figure, panels = pyplot.subplots(1, len(tails), figsize=(6 * len(tails), 6), sharey=True, squeeze=False)
    families = sorted({line["family"] for line in whole["lines"]})
    named: list[dict[str, tuple[float, float]]] = []
    for axes, tail in zip(panels[0], tails, strict=True):
        places = {}
        for line in whole["lines"]:
            run = line["runs"].get(column)
            if line["name"].endswith(f" | {tail}") and run and line["family"] != "fp16":
                kl, x = run["kl"], bits(line["setting"], SHAPE)
                low, high = (kl["value"] if kl[end] is None else kl[end] for end in ("low", "high"))
                reach = [[max(kl["value"] - low, 0.0)], [high - kl["value"]]]
                colour = f"C{families.index(line['family']) % 10}"
                axes.errorbar([x], [kl["value"]], reach, fmt="o", ms=4, lw=1, color=colour)
                places[line["name"].partition(" | ")[0]] = (x, kl["value"])
        axes.set(yscale="log", xlabel="bits per packed element, scales included (heads of 64 channels)")
        axes.set_title(f"exact tokens: {TAILS[tail]}", fontsize=9)
        axes.margins(x=0.12)
        axes.grid(alpha=0.3)
        named.append(places)
    panels[0][0].set_ylabel(f"KL divergence from fp16, nats a token ({whole['model']}, {column})")
    figure.tight_layout()
    for axes, places in zip(panels[0], named, strict=True):
        label(axes, places)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_pages(write: bool) -> int:
    """Print the tables, or write them into the documents and draw the plot; return the exit status."""
    blocks = page_blocks()
    if not blocks:
        print(f"{FOLDER} has no stage's file: python -m experiments.real eight --write", file=sys.stderr)
        return 1
    if not write:
        print("\n\n".join(block.text for block in blocks if block.name))
        return 0
    lost = check_documents(blocks, ROOT, write=True).lost
    for place in lost:
        print(f"error: {place}", file=sys.stderr)
    whole = stage_file("kl")
    from experiments.place import drawable

    if whole and drawable():
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        draw_formats(pyplot, whole, FOLDER / "kl" / "plot.png")
    return 1 if lost else 0
