"""The power table: settings, each measure of each of them, and the pairs that it tells apart at equal n.

A measure tells a pair apart if the 95 % interval of its paired difference does not contain 0. All intervals are from
the same bootstrap, which draws whole prompts, so the measures differ only in what they see of the same prompts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.measured import Folded, Setting, Stored
from experiments.stored import as_csv, markdown_table
from kvbench.metrics import fidelity as metrics
from kvbench.results import fidelity_fold
from kvbench.results.samples import Row

_SETTINGS = {
    "fp16": "fp16",
    "kivi 4": "kivi:int4",
    "kivi 3": "kivi:int3",
    "kivi 2": "kivi:int2",
    "atom 4": "atom:int4_token",
    "quantspec 8 (both nibbles)": "quantspec:gamma=0",
    "kvquant 4, 1% outliers": "kvquant",
    "kvquant 3, 1% outliers": "kvquant:bits=3",
    "logquant 4": "logquant:int4_g64",
    "logquant 2": "logquant",
    "partial_logquant 2": "partial_logquant",
    "hf_quantized 2 (hqq)": "hf_quantized:backend=hqq:axis_key=1:axis_value=1",
    "cocktail": "cocktail:encoder=bm25",
    "streamingllm, half": "streamingllm:budget=512",
    "snapkv, half": "snapkv:budget=512",
    "h2o, half": "h2o:budget=512",
}
#: all methods, and formats of 4 bits, which scores hardly separate
SETTINGS = tuple(Setting(name, "", setting) for name, setting in _SETTINGS.items())

#: tasks of mini with answers of 12 to 144 tokens, and the nominal length of their prompts
TASKS = ("key_value_hex", "multi_value", "copy_long", "repeat")
LENGTH = 1024
#: the two runs of a setting: fp16's own answers decoded through its cache, and answers of its own
FORCED, FREE = "fidelity", "mini"
DRAWS = 2000
#: heading of each measure
MEASURES = {
    "kld_mean": "KL mean",
    "kld_median": "KL median",
    "kld_p99_9": "KL 99.9 %",
    "same_top": "same top",
    "kept": "divergence",
    "flips": "flips",
    "score": "score",
}
#: percentiles among them
LEVELS = {"kld_median": 50.0, "kld_p99_9": 99.9}
#: settings whose formats have 4 bits
FOUR_BITS = ("kivi 4", "atom 4", "kvquant 4, 1% outliers", "logquant 4")

Drawn = Mapping[str, NDArray[np.float64]]


def data(length: int, forced: int, free: int) -> dict[str, list[str]]:
    """Return the data of both runs, over the same prompts, with so many samples per task."""
    options = f"{{tasks: [{', '.join(TASKS)}], lengths: [{length}], limit: {forced}}}"
    tasks = [f"dataset.tasks=[{','.join(TASKS)}]", f"dataset.lengths=[{length}]", f"dataset.limit={free}"]
    return {
        FORCED: ["dataset=fidelity/answers", "dataset.over=mini", f"dataset.options={options}"],
        FREE: ["dataset=mini", *tasks],
    }


def fold_fidelity(stored: Mapping[str, Stored], count: int) -> Folded:
    """Return ``table.md``, ``settings.csv`` and ``pairs.csv`` of settings with `count` samples in both runs."""
    runs = {name: done.rows for name, done in stored.items()}
    full = {name: own[FORCED].keys() & own[FREE].keys() for name, own in runs.items()}
    names = [name for name in runs if len(full[name]) == count]
    if "fp16" not in names:
        return Folded(f"fp16 has {len(full.get('fp16', ()))} of {count} samples in both of its runs")
    # prompts without a decoded position, such as answers of one token, have no divergences
    samples = [key for key in sorted(full["fp16"]) if runs["fp16"][FORCED][key]["fidelity"]["kld"]]
    measured = {name: setting_measures(runs[name], runs["fp16"][FREE], samples) for name in names}
    pairs = [paired_measures(a, b, measured) for a, b in itertools.combinations(names, 2)]
    positions = sum(len(runs["fp16"][FORCED][key]["fidelity"]["kld"]) for key in samples)
    text = fidelity_markdown(measured, pairs, len(samples), positions)
    missing = [name for name in runs if name not in names]
    text += f"\nLeft out, with fewer prompts: {', '.join(missing)}\n" if missing else ""
    files = {
        "settings.csv": _csv([{"setting": name, **values} for name, (values, _) in measured.items()]),
        "pairs.csv": _csv(pairs),
    }
    return Folded(text, files, {"prompts": count, "settings": len(stored)})


def setting_measures(
    runs: Mapping[str, Mapping[str, Row]], base: Mapping[str, Row], samples: list[str]
) -> tuple[dict[str, float], Drawn]:
    """Return the measures of a setting, and the same for each draw of the bootstrap over prompts."""
    forced = [runs[FORCED][key] for key in samples]
    klds = [row["fidelity"]["kld"] for row in forced]
    same = [fidelity_fold.same_top(row) for row in forced]
    parts = [_kept(row["fidelity"]["left"]) for row in forced]
    scores = [float(runs[FREE][key]["scores"]["score"]) for key in samples]
    right = [score >= 1 - 1e-9 for score in scores]
    flipped = [
        float(own != (base[key]["scores"]["score"] >= 1 - 1e-9)) for own, key in zip(right, samples, strict=True)
    ]
    values = {
        **{name: fidelity_fold.value(forced, name) for name in fidelity_fold.MEASURES},
        "kept": float(np.mean(parts)),
        "flips": float(np.mean(flipped)),
        "score": float(np.mean(scores)),
        "never_left": float(np.mean([part == 1.0 for part in parts])),
    }
    columns = dict.fromkeys(("kld_mean", "kld_median", "kld_p99_9"), klds) | {"same_top": same}
    columns |= {name: [[x] for x in own] for name, own in (("kept", parts), ("flips", flipped), ("score", scores))}
    drawn = {name: metrics.drawn(column, LEVELS.get(name), draws=DRAWS) for name, column in columns.items()}
    return values, drawn


def _kept(left: Mapping[str, Any]) -> float:
    """Return the share of fp16's answer that greedy decoding reproduces before it leaves it."""
    return 1.0 if left["at"] is None else left["at"] / left["compared"]


def paired_measures(a: str, b: str, measured: Mapping[str, tuple[dict[str, float], Drawn]]) -> dict[str, Any]:
    """Return for each measure the difference of two settings, its paired interval, and whether it excludes 0."""
    line: dict[str, Any] = {"a": a, "b": b}
    for name in MEASURES:
        low, high = np.percentile(measured[b][1][name] - measured[a][1][name], (2.5, 97.5))
        line |= {
            f"{name}_diff": measured[b][0][name] - measured[a][0][name],
            f"{name}_low": float(low),
            f"{name}_high": float(high),
            f"{name}_apart": bool(low > 0 or high < 0),
        }
    return line


def fidelity_markdown(
    measured: Mapping[str, tuple[dict[str, float], Drawn]], pairs: list[dict[str, Any]], prompts: int, positions: int
) -> str:
    """Return the tables as markdown: the measures of each setting, and how many pairs each of them tells apart."""
    lines = []
    for name, (values, _) in measured.items():
        divergences = (f"{values[key]:.3g}" for key in ("kld_mean", "kld_median", "kld_p99_9"))
        shares = (f"{100 * values[key]:.1f} %" for key in ("same_top", "kept", "never_left", "flips"))
        lines.append([name, *divergences, *shares, f"{values['score']:.3f}"])
    head = ["", *list(MEASURES.values())[:4], "share of fp16's answer kept", "never leave", "flips", "score"]
    lossy = [line for line in pairs if "fp16" not in (line["a"], line["b"])]
    groups = {
        "with fp16": [line for line in pairs if line not in lossy],
        "two methods": lossy,
        "two formats of 4 bits": [line for line in lossy if line["a"] in FOUR_BITS and line["b"] in FOUR_BITS],
    }
    counts = [
        [f"{title}, of {len(chosen)}", *(str(sum(line[f"{name}_apart"] for line in chosen)) for name in MEASURES)]
        for title, chosen in groups.items()
    ]
    parts = [
        f"{prompts} prompts, {positions} decoded tokens of fp16's answers",
        "",
        *markdown_table(head, lines),
        "",
        "Pairs told apart (95 % interval of the paired difference without 0):",
        "",
        *markdown_table(["pairs", *MEASURES.values()], counts),
    ]
    return "\n".join(parts) + "\n"


def _csv(lines: list[dict[str, Any]]) -> str:
    return as_csv(
        list(lines[0]), ({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()} for line in lines)
    )
