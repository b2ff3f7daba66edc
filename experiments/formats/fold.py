"""Runs of the table of formats to numbers: each line's scores, KL divergence and bytes, and the pairs of the claims."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.formats.grid import CLAIMS, ROWS
from experiments.formats.report import markdown, plot
from experiments.formats.tpot import steps
from experiments.mini.fold import mean_of, score
from kvbench.results import fidelity
from kvbench.results.samples import Row

#: the two runs of a line, by data set
Runs = Mapping[str, Any]
BASE = "fp16 | own"


def fold(lines: Mapping[str, Runs], out: Path, count: int, prompts: int) -> str:
    """Write ``lines.json``, ``claims.json``, ``table.md`` and ``plot.png``, and return the tables as text.

    Args:
        lines: for each line of the grid the rows of its two runs by sample id, ``mini`` and ``fidelity``, and ``env``,
            its machine. Lines with fewer samples than the others are left out and named.
        out: folder of the files.
        count: number of scored samples that a line must have.
        prompts: number of prompts with a KL divergence that a line must have.
    """
    whole = {key: runs for key, runs in lines.items() if len(runs["mini"]) >= count}
    whole = {key: runs for key, runs in whole.items() if len(runs["fidelity"]) >= prompts}
    if BASE not in whole:
        return f"fp16 does not have its {count} scored samples and {prompts} prompts with a KL divergence"
    table = [line(key, whole[key], whole[BASE]) for key in ROWS if key in whole]
    claims = [
        {"claim": claim, **compare(better, worse, whole)}
        for claim, pairs in CLAIMS
        for better, worse in pairs
        if better in whole and worse in whole
    ]
    content = {
        "tasks": sorted({row["task"] for row in whole[BASE]["mini"].values()}),
        "n": count,
        "prompts": prompts,
        "missing": [key for key in ROWS if key not in whole],
        "env": whole[BASE]["env"],
        "lines": table,
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, data in (("lines", content), ("claims", claims)):
        (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = markdown(content, claims, steps())
    (out / "table.md").write_text(text, encoding="utf-8")
    plot(table, out / "plot.png")
    return text


def line(key: str, runs: Runs, base: Runs) -> dict[str, Any]:
    """Return the figures of one line.

    Args:
        key: its key in the grid.
        runs: its rows.
        base: those of fp16.
    """
    samples, row = runs["mini"], ROWS[key]
    ids = sorted(samples)
    used = sum(samples[i]["kv_bytes"]["used"]["total"] for i in ids)
    full = sum(samples[i]["kv_bytes"]["fp16_equivalent"] for i in ids)
    forced = list(runs["fidelity"].values())
    figures = fidelity.fold(forced)
    tasks: dict[str, list[str]] = {}
    for i in ids:
        tasks.setdefault(samples[i]["task"], []).append(i)
    return {
        "name": row.name,
        "family": row.family,
        "tail": row.tail,
        "setting": row.setting,
        "score": mean_of([score(samples[i]) for i in ids], "score"),
        "vs_fp16": mean_of([score(samples[i]) - score(base["mini"][i]) for i in ids]),
        "tasks": {task: mean_of([score(samples[i]) for i in chosen], "score") for task, chosen in tasks.items()},
        "bytes": used / len(ids),
        "bits": 16 * used / full,
        "kld": None if figures is None else figures["kld"],
        "same_top": None if figures is None else figures["same_top"],
        "positions": None if figures is None else figures["positions"],
    }


def compare(better: str, worse: str, whole: Mapping[str, Runs]) -> dict[str, Any]:
    """Return the paired differences of two lines, `better` less `worse`, in score and in KL divergence, and the bits.

    Args:
        better: key of the line that is claimed to be the better one.
        worse: key of the other.
        whole: the rows of all lines.
    """
    first, second = whole[better]["mini"], whole[worse]["mini"]
    ids = sorted(first.keys() & second.keys())
    rows: list[list[Row]] = [list(whole[key]["fidelity"].values()) for key in (worse, better)]
    divergences = fidelity.pair(*rows)

    def bits(samples: Mapping[str, Row]) -> float:
        used = sum(samples[i]["kv_bytes"]["used"]["total"] for i in ids)
        return float(16 * used / sum(samples[i]["kv_bytes"]["fp16_equivalent"] for i in ids))

    return {
        "better": better,
        "worse": worse,
        "score": mean_of([score(first[i]) - score(second[i]) for i in ids]),
        "kld": divergences and {name: divergences[name] for name in ("kld_mean", "kld_median", "kld_p99_9")},
        "bits": [bits(first), bits(second)],
    }
