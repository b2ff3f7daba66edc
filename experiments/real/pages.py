"""Tables of a trained model in README and docs/which-format.md, from the files of its stages.

The sentences beside them follow from the same files by rules (:mod:`experiments.real.sentences`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.checks.rules import Block, check_documents
from experiments.formats.grid import TAILS, Tail
from experiments.formats.which import LINES
from experiments.real.costs import FILE as TIME
from experiments.real.costs import time_markdown
from experiments.real.draw import draw_pictures
from experiments.real.fold import FILE, by_name, fewer, measured_on, short, stage_content, stage_markdown, with_interval
from experiments.real.sentences import (
    MILLI,
    Line,
    break_sentences,
    broken_in,
    columns_of,
    lines_of,
    milli,
    packed_bits,
    pair_sentences,
    quantizer_of,
    short_sentences,
    small_line,
)
from experiments.real.stages import EIGHT, RETRIEVAL, STAGES, line_name
from experiments.real.weights import NAME as WEIGHTS
from experiments.stored import ROOT, content, load_result_json, markdown_table
from kvbench.metrics import intervals

FOLDER = ROOT / "results" / "smollm2"
#: the same of the bundled model: outliers alone
BUNDLED = ROOT / "results" / "tiny" / "real"
PAGE = "docs/which-format.md"
#: in place of what has not been measured
MISSING = "Not measured yet: `python -m experiments.real {} --write`."
#: below a table without the row of the weights themselves
NO_WEIGHTS = (
    "A row with these weights against the hub's, in bf16, is left out: the hub was out of reach "
    "(`python -m experiments.real weights --write`)."
)


def stage_file(name: str, folder: Path = FOLDER) -> Line | None:
    """Return the content of a stage's file; None before it has been written."""
    path = folder / name / FILE
    return stage_content(path) if path.exists() else None


def formats_table(whole: Line, tail: Tail | None, tiny: Sequence[Line], weights: Line | None = None) -> list[str]:
    """Return the table of formats with these exact tokens, None: as shipped, those with the most bits first.

    The last line has the model's weights against those that they were rounded from, where these were at hand.
    """
    columns, lines = columns_of(whole), lines_of(whole, tail)
    body = []
    for line in lines:
        small = small_line(line, tiny)
        name = f"{quantizer_of(line)}", f"{packed_bits(line['setting']):.3g}"
        body.append([*name, *format_cells(line["runs"], columns), milli(small["kld"]["mean"]) if small else "-"])
    for line in weights["lines"] if weights and lines else ():
        body.append([f"*weights: {line['name']}*", "-", *format_cells(line["runs"], columns), "-"])
    head = [f"KL, {column}" for column in columns]
    head[1:1] = ["KL 99.9 %", "flips, %"]
    more = [f"perplexity, % more: {column}" for column in columns]
    return markdown_table(["format", "bits", *head, *more, "`tiny`: KL"], body) if body else [MISSING.format("kl")]


def format_cells(runs: Mapping[str, Line], columns: Sequence[str]) -> list[str]:
    """Return a format's cells: KL divergences in thousandths of a nat, the first one's tail and flips, perplexities."""
    cells = [with_interval(runs[column]["kl"], MILLI) if column in runs else "-" for column in columns]
    first = runs.get(columns[0])
    cells[1:1] = [milli(first["p99_9"]), with_interval(first["flips"], 100)] if first else ["-", "-"]
    return [*cells, *(lost_text(runs[column]) if column in runs else "-" for column in columns)]


def lost_text(run: Line) -> str:
    """Return how much more perplexity than with fp16 a run has, in percent, with its interval where that is known."""
    loss = run.get("loss") or {"value": math.log(run["ppl"] / run["ppl_fp16"]), "low": None, "high": None}
    percent = {key: None if value is None else 100 * math.expm1(value) for key, value in loss.items()}
    return with_interval(percent)


def basis_text(whole: Line) -> str:
    """Return what a table rests on: windows of each text and context, fp16's perplexities, the machine, gaps."""
    parts = []
    for column in columns_of(whole):
        runs = [line["runs"][column] for line in whole["lines"] if column in line["runs"]]
        count, tokens, base = (
            max(run["n"] for run in runs),
            runs[0]["tokens"] // runs[0]["n"],
            short(runs[0]["ppl_fp16"]),
        )
        parts.append(f"{column}: n = {count}, the last {tokens} tokens of each, fp16's perplexity {base}")
    missing = f" Not run: {', '.join(whole['missing'])}." if whole["missing"] else ""
    made = f"Measured on {measured_on(whole)}.{fewer(whole)}{missing}"
    return f"Windows of each text and context: {'; '.join(parts)}. {made}"


def factors_basis(whole: Line) -> str:
    """Return what the table of outliers rests on: windows, devices, and formats that were not run."""
    count = max(run["n"] for line in whole["lines"] for run in line["runs"].values())
    parts = [name.partition(" | ") for name in whole["missing"]]  # behind the exact tokens, the runs in brackets
    names = [f"{name} {rest.partition(' ')[2]}".strip() for name, _, rest in parts]
    missing = f" Not run: {', '.join(names)}." if names else ""
    return f"n = {count} windows. Measured on {measured_on(whole)}.{fewer(whole)}{missing}"


def equal_tables(whole: Line, tiny: Sequence[Line]) -> list[str]:
    """Return the table at equal exact tokens, and folded that without any."""
    return [
        *formats_table(whole, "wide", tiny), "", '<details markdown="1">',
        f"<summary>Exact tokens: {TAILS['open']}</summary>", "", *formats_table(whole, "open", tiny), "", "</details>",
    ]  # fmt: skip


def picture(path: Path, about: str) -> list[str]:
    """Return a picture's line for a page of docs/, with a blank line before it; nothing without the picture."""
    return ["", f"![{about}](../{path.relative_to(ROOT)})"] if path.exists() else []


def readme_table(kl: Line, perplexity: Line, retrieval: Line | None) -> list[str]:
    """Return README's second table: a column for each of the eight settings, a line for each figure that is known."""
    column, wanted = columns_of(kl)[0], next(iter(perplexity["lines"][0]["runs"]))
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
        counts = sorted({run["n"] for run in runs if run})
        number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        body.append([title if runs is needles and write is sized else f"{title} (n = {number})", *cells])
    return markdown_table(["", *(setting.name for setting in EIGHT)], body)


def perplexity_text(own: Line, base: Line | None) -> str:
    """Return a perplexity and, behind it, its difference from fp16's, paired by window; alone without these windows."""
    shown = f"{own['perplexity']['value']:.2f}"
    if base is None or own is base or len(own["samples"]) != len(base["samples"]):
        return shown
    both = list(zip(own["samples"], base["samples"], strict=True))  # mean negative log-likelihoods of the windows
    first, second = (math.exp(fmean(values)) for values in zip(*both, strict=True))
    gap = first - second
    low, high = intervals.centred(gap, [first * a - second * b for a, b in both]) or (gap, gap)
    return f"{shown} (Δ {gap:+.2g} ±{max(gap - low, high - gap):.2g})"


def sized(needle: Line) -> str:
    """Return the mean bytes of a cache and how many times more fp16 holds."""
    return f"{needle['bytes'] / 2**20:.2f} MiB, {needle['ratio']:.2f}x"


def factors_table(whole: Line) -> list[str]:
    """Return the table of outliers: KL divergence of each format by factor, and at which it breaks; ``-``: it holds."""
    columns, broken, body = columns_of(whole), broken_in(whole), []
    for line in whole["lines"]:
        if line["family"] != "fp16":
            runs = [line["runs"].get(column) for column in columns]
            cells = ["-" if run is None else with_interval(run["kl"], MILLI) for run in runs]
            at = broken.get(quantizer_of(line), "not known") or "-"
            body.append([quantizer_of(line), *cells, at.removeprefix("factor ")])
    return markdown_table(["format", *(f"KL, {column}" for column in columns), "breaks at"], body)


def page_blocks(folder: Path = FOLDER) -> list[Block]:
    """Return what the files of the stages put into documents; nothing for stages that have not been run."""
    source = str(folder.relative_to(ROOT))
    files = {name: stage_file(name, folder) for name in (*STAGES, WEIGHTS)}
    small = stage_file("outliers", BUNDLED) if folder == FOLDER else None
    tables = {f"{source}/{name}": whole for name, whole in files.items()}
    tables[f"{BUNDLED.relative_to(ROOT)}/outliers"] = small
    blocks = [Block(f"{place}/table.md", stage_markdown(whole), place) for place, whole in tables.items() if whole]
    time_file = folder / "time" / TIME
    if time_file.exists():
        blocks.append(Block(f"{source}/time/table.md", time_markdown(content(time_file)), f"{source}/time/{TIME}"))
    kl, perplexity, outliers = (files[name] for name in ("kl", "perplexity", "outliers"))
    tiny = load_result_json(LINES)["lines"]
    parts: dict[str, Sequence[str]] = {}
    if kl:
        drawn = picture(folder / "kl" / "plot.png", "KL divergence against bits, by exact tokens")
        parts["real-short"] = short_sentences(kl, tiny)
        weights = files[WEIGHTS]
        basis = [basis_text(kl), *([] if weights else [NO_WEIGHTS])]
        parts["real"] = [*formats_table(kl, None, tiny, weights), "", *basis, *drawn]
        parts["real-words"] = pair_sentences(kl, tiny) or [MISSING.format("kl")]
        parts["real-equal"] = equal_tables(kl, tiny)
    if outliers:
        drawn = picture(folder / "outliers" / "plot.png", "KL divergence against the factor of outliers")
        parts["outliers"] = [*factors_table(outliers), "", factors_basis(outliers), *drawn]
        parts["outliers-words"] = break_sentences(outliers, small)
    if small:
        parts["outliers-tiny"] = [*factors_table(small), "", factors_basis(small)]
    blocks += [Block(PAGE, "\n".join(lines), source, name) for name, lines in parts.items()]
    if kl and perplexity:
        text = readme_table(kl, perplexity, files["retrieval"])
        blocks.append(Block("README.md", "\n".join(text), source, "real"))
    return blocks


def write_pages(write: bool) -> int:
    """Print the tables, or write them into the documents and draw the plot; return the exit status."""
    if write:
        draw_pictures(stage_file("kl"), stage_file("outliers"), stage_file("outliers", BUNDLED), FOLDER)
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
    return 1 if lost else 0
