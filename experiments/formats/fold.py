"""Runs of the table of formats to numbers: each line's scores, KL divergence and bytes, and the pairs of the claims."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments.fidelity.fold import FORCED, FREE
from experiments.formats.grid import CLAIMS, ROWS
from experiments.formats.report import formats_markdown, plot
from experiments.formats.tpot import step_milliseconds
from experiments.measured import TINY, Folded, Rows, Stored, as_json
from experiments.mini.fold import mean_of, sample_score
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
