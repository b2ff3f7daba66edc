"""Figures of small runs: results/tiny, results/quantspec, results/quickstart and results/report."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from experiments.checks.rules import MIB, Block, Rule, Text, spread
from experiments.stored import ROOT, content, csv_rows, grid, load_result_json, markdown_table, one
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method
from kvbench.results import record
from kvbench.results.columns import COLUMNS
from kvbench.results.load import SIDE_BY_SIDE
from kvbench.results.notes import notes
from kvbench.results.tables import table_grid

PAGE, FAQ = "docs/methods.md", "docs/faq.md"
SENSITIVITY, PERPLEXITY = "results/tiny/sensitivity.json", "results/tiny/perplexity.json"
OSCAR_RUNS, KEEP_RUNS, KEEP_SCORES = (f"results/tiny/ablations/{name}.csv" for name in ("oscar", "keep", "keep_scores"))
ACCEPTANCE = "results/quantspec/acceptance-tiny-float32-t0.json"
EQUALITY, EQUAL_PAGE = "results/quantspec/equality.json", "results/quantspec/equality.md"
BYTES = "kvbench.methods.bytes"
QUICKSTART = "results/quickstart"
REPORT, REPORT_PAGE = "results/report/page.json", "docs/report.md"
#: presets of conf/experiment/quickstart, as the Makefile names them
PRESETS = ("fp16", "kivi4", "kivi2", "atom4")
#: columns of a table of runs that README.md shows, beside those of the tasks
SHOWN = ("", "mean", "KV", "ratio", "peak", "TTFT", "TPOT")
#: headings of the table that README.md says in other words
NAMES = {"mean": "**mean**", "ratio": "KV bytes, fp16's to them"}
#: lines of the table of ``keep``, and names of the runs
KEEP = {
    "keep=1 quantizer=int4": "keep int4 keep=1",
    "keep=1 quantizer=int2": "keep int2 keep=1",
    "keep=0.5 quantizer=int4": "keep int4 keep=0.5",
    "keep=0.5 quantizer=none": "keep keep=0.5",
}
#: lines of the table of OSCAR's parts: label in the page, name of the run
OSCAR = {
    "one group per token and head, neither rotated nor clipped": "oscar int2_token clip_key=1 clip_value=1 "
    "levels=uniform basis=rotation",
    "... calibrated rotation, not clipped": "oscar int2_token clip_key=1 clip_value=1 levels=uniform basis=calibrated",
    "... Hadamard rotation, not clipped (QuaRot)": "oscar int2_token rotation=hadamard clip_key=1 clip_value=1",
    "... Hadamard rotation, clipped": "oscar int2_token rotation=hadamard clip_key=0.96 clip_value=0.92",
    "**OSCAR**: calibrated rotation, clipped": "oscar int2_token clip_key=0.96 clip_value=0.92 levels=uniform "
    "basis=calibrated",
    "OSCAR, `levels=lloyd_max`": "oscar int2_token clip_key=0.96 clip_value=0.92 levels=lloyd_max basis=calibrated",
    "KIVI int2, groups of 32": "kivi int2 residual=32 sinks=64 window=256",
    "KIVI int2, groups of 32, with its own newest tokens exact": "kivi int2 residual=128 sinks=0 window=0",
}


def method_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Block("README.md", readme_block(), QUICKSTART, "results")
    yield Block(PAGE, sensitivity(), SENSITIVITY, "sensitivity")
    yield Block(PAGE, oscar(), OSCAR_RUNS, "oscar")
    yield Block(PAGE, keep_method_table(), f"{KEEP_RUNS}, {KEEP_SCORES}", "keep")
    yield Block(PAGE, drafts(), ACCEPTANCE, "drafts")
    yield Block(REPORT_PAGE, report(), REPORT, "report")
    for sentences in (_small, _equality):
        yield from sentences()


def quickstart_records(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return the kept records by preset, with today's defaults for keys that were added later."""
    return {name: record.fill_defaults(content(root / QUICKSTART / name / "metrics.json")) for name in PRESETS}


def machine(runs: Sequence[Mapping[str, Any]], root: Path = ROOT) -> str:
    """Return when, where and with which code and packages the kept runs were made, in one sentence."""
    about = content(root / QUICKSTART / "about.json")
    env = runs[0]["env"]
    return (
        f"One run of `make run` on {about['date']}, {about['seconds']:.0f} s: {env['cpu_count']} processors "
        f"({env['cpu']}), Python {env['python']}, torch {env['torch']}, transformers {env['transformers']}, commit "
        f"{env['commit'][:8]}; its records are in [{QUICKSTART}]({QUICKSTART}/README.md)."
    )


def readme_block(root: Path = ROOT) -> str:
    """Return what stands between the marks of README.md's first table."""
    runs = list(quickstart_records(root).values())
    header, body = table_grid(runs)
    lines: list[list[str]] = []
    kv: list[str] = []
    others = {column.name for column in COLUMNS}.difference(SHOWN)
    for number, name in enumerate(header[1:], start=1):
        if name in others:
            continue
        shown = [row[number] for row in body]
        texts = [cell.main + (f" ({cell.detail})" if cell.detail else "") for cell in shown]
        label = NAMES.get(name, name)
        if name == "ratio":  # beside the bytes
            lines[-1] = [label, *map(", ".join, zip(kv, texts, strict=True))]
            continue
        kv = texts
        if name == "mean":
            label += f" (n = {runs[0]['mean']['n']})"
        lines.append([label, *texts])
    with mock.patch.dict(os.environ, {SIDE_BY_SIDE: "1"}):  # the others were the jobs beside each
        said = [line for line in notes(runs) if line.startswith("±") or "other jobs" in line or "code" in line]
    below = " ".join([machine(runs, root), *(f"{line.partition('; set ')[0]}." for line in said)])
    return (
        "\n".join(
            [
                *markdown_table(["", *(row[0].main for row in body)], lines),
                "",
                textwrap.fill(below, 120, break_long_words=False, break_on_hyphens=False),
            ]
        )
        + "\n"
    )


def sensitivity() -> str:
    """Return the table of formats alone."""
    means = load_result_json(SENSITIVITY)["mean"]
    changes = [
        f"{100 * cell['vs_fp16']:+.1f} ± {100 * cell['stderr']:.1f}".replace("-", "−")
        for name, cell in means.items()
        if name != "fp16"
    ]
    body = [
        ["mean score, %", *(f"{100 * cell['score']:.1f}" for cell in means.values())],
        ["to fp16, points", "", *changes],
    ]
    return grid("| | fp16 | kivi int4 | kivi int3 | kivi int2 | kivi int2, keys per token | atom int4 |", body)


def divergence_cells(run: dict[str, str], digits: int) -> list[str]:
    """Return the cells of the KL divergence on windows of text, and of the KV bytes."""
    mean, low, high, rare = (float(run[f"mini_text@768 kld_{key}"]) for key in ("mean", "low", "high", "p99.9"))
    size = int(run["kv_bytes"]) / MIB
    return [f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})", f"{rare:.1f}", f"{size:.2f}"]


def oscar() -> str:
    """Return the table of OSCAR's parts."""
    body = [[label, *divergence_cells(one(csv_rows(OSCAR_RUNS), run=name), 3)] for label, name in OSCAR.items()]
    return grid("| | KL divergence, mean | 99.9 % | KV bytes, MiB |", body)


def keep_method_table() -> str:
    """Return the table of ``keep``."""
    body = []
    for label, name in KEEP.items():
        text, key = (one(csv_rows(file), run=name) for file in (KEEP_RUNS, KEEP_SCORES))
        score, error = (100 * float(key[f"key_value@1024 {part}"]) for part in ("score", "stderr"))
        size = int(key["kv_bytes"]) / MIB
        body.append([f"`{label}`", *divergence_cells(text, 4), f"{score:.0f} ± {error:.0f}", f"{size:.2f}"])
    head = "| `method=keep` | KL divergence, mean | 99.9 % | KV bytes, MiB | exact matches, % | KV bytes, MiB |"
    return grid(head, body)


def drafts() -> str:
    """Return the table of accepted drafts: books / mini."""
    cells: dict[str, list[str]] = {}
    for cell in load_result_json(ACCEPTANCE):
        if cell["gamma"] == 4:
            share = f"{100 * cell['acceptance_rate']:.1f} ± {100 * cell['stderr']:.1f}"
            cells.setdefault(cell["draft"], []).append(share)
    return grid(f"| {' | '.join(cells)} |", [[" / ".join(pair) for pair in cells.values()]], "r")


def report() -> str:
    """Return the table of the report's page."""
    page = load_result_json(REPORT)
    body = [["size of the page, MB", f"{page['page_bytes'] / 1e6:.2f}", ""]]
    body += [["writing the page, s", f"{page['written_s']:.1f}", ""]]
    for name, wall in page["median_ms"].items():
        body += [[f"{name}, ms", f"{wall:.0f}", f"{page['median_cpu_ms'][name]:.0f}"]]
    return grid("| | median | processor time |", body)


def _small() -> list[Text]:
    """Return the sentences about the bundled model, and about bytes by formula."""
    tasks, length = load_result_json(SENSITIVITY)["tasks"], load_result_json(SENSITIVITY)["length"]
    (samples,) = {cell["n"] for entries in tasks.values() for cell in entries.values()}
    cells, four = (
        load_result_json(PERPLEXITY)["cells"],
        next(cell for cell in load_result_json(ACCEPTANCE) if cell["gamma"] == 4),
    )
    cached, simulated = (spread(cells[f"{mode}/wikitext2/kivi int2"], factor=1) for mode in ("decode", "simulated"))
    runs, page = quickstart_records(), load_result_json(REPORT)
    decode, prefill = (
        " to ".join(str(runs[name]["peak_bytes"][key] / MIB) for name in ("fp16", "kivi2"))
        for key in ("decode", "prefill")
    )
    windows = csv_rows(OSCAR_RUNS)[0]["mini_text@768 prompts"]
    methods = [load_method("cocktail", split=(10, 30, 60), reorder=reorder) for reorder in (False, True)]
    sizes = [
        kv_bytes(method, 4096, layers=32, query_heads=32, heads=32, channels=128).total / MIB
        for method in (*methods, load_method("fp16"))
    ]
    return [
        Text(PAGE, SENSITIVITY, f"all {len(tasks)} tasks at {length} tokens, {samples} samples each, paired"),
        Text(PAGE, ACCEPTANCE, f"/ on mini: {four['length']} tokens, {four['prompts']} prompts each, γ = 4"),
        Text(PAGE, OSCAR_RUNS, f"over {windows} windows of 512 prompt and 256 decoded tokens"),
        Text(PAGE, BYTES, f"A 7B model holds {sizes[0]} MiB at 4,096 tokens instead of {sizes[1]} (fp16: {sizes[2]}),"),
        Text(FAQ, PERPLEXITY, f"loses {cached} nats per token through the cache, and {simulated} in the simulation"),
        Text(FAQ, QUICKSTART, f"by a factor of {runs['kivi2']['kv_bytes']['ratio']} with KIVI at 2 bits"),
        Text(FAQ, QUICKSTART, f"the decode peak only from {decode} MiB"),
        Text(FAQ, QUICKSTART, f"the prefill peak from {prefill} MiB"),
        Text(REPORT_PAGE, REPORT, f"A page of {page['runs']} made-up runs"),
        Text(REPORT_PAGE, REPORT, f"medians of {page['visits']} visits"),
    ]


def _equality() -> list[Text]:
    """Return the sentences about greedy answers with and without drafts."""
    stored = load_result_json(EQUALITY)
    equal, prompts = (sum(row[key] for row in stored["rows"]) for key in ("equal", "prompts"))
    said_of = [
        f"{prompts} runs; {stored['refused']} drafts were rejected in total.",
        f"Smallest gap between the two best logits: {stored['smallest_gap']}.",
    ]
    if "again" in stored:
        again = stored["again"]["rows"]
        same, runs = (sum(row[key] for row in again) for key in ("equal", "prompts"))
        said_of += [f"Made again on 2026-11-22 with {again[0]['prompts']} prompts: {same} of {runs} runs equal."]
    return [
        Text(PAGE, EQUALITY, f"Greedy answers are the target's: {equal} of {prompts} runs on tiny"),
        *(Text(EQUAL_PAGE, EQUALITY, sentence) for sentence in said_of),
    ]
