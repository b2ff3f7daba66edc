"""Runs of the grid to one table (markdown), one file of numbers (JSON) and one plot (PNG)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.mini.grid import Setting
from kvbench.results.samples import read as read_samples

#: colours of the families, distinguishable without hue as well (markers differ)
STYLE = {
    "fp16": ("black", "*"),
    "atom": ("tab:brown", "s"),
    "kivi": ("tab:blue", "o"),
    "hf": ("tab:cyan", "P"),
    "logquant": ("tab:green", "^"),
    "cocktail": ("tab:red", "D"),
    "eviction": ("tab:gray", "x"),
}


def fold(runs: Path, out: Path, settings: Sequence[Setting], configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Read every setting's run and write ``table.md``, ``scores.json`` and ``plot.png``; the table as text.

    Args:
        runs: where the runs lie.
        configs: the composed configuration of each setting, by name: a run is found by its method and formats.
    """
    rows = [row for setting in settings if (row := read(runs, setting, configs[setting.name]))]
    if not rows:
        return f"nothing has run yet in {runs}"
    base = next((row for row in rows if row["name"] == "fp16"), None)
    for row in rows:
        row["mean"] = mean(row, base)
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(rows)
    (out / "table.md").write_text(text, encoding="utf-8")
    kept = [{k: v for k, v in row.items() if k != "samples"} for row in rows]
    (out / "scores.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    plot(rows, out / "plot.png")
    return text


def read(runs: Path, setting: Setting, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a setting gave: scores, bytes, the score of each sample."""
    wanted = [config[group] for group in ("model", "method", "quantizer", "dataset")]
    for folder in sorted(path.parent for path in runs.glob("*/metrics.json")):
        have = yaml.safe_load((folder / "config.yaml").read_text())
        if [have[group] for group in ("model", "method", "quantizer", "dataset")] == wanted:
            break
    else:
        return None
    metrics = json.loads((folder / "metrics.json").read_text())
    samples = {row["id"]: row["scores"]["score"] for row in read_samples(folder / "samples.jsonl").rows.values()}
    return {
        "name": setting.name,
        "family": setting.family,
        "command": " ".join(setting.overrides),
        "status": metrics["status"],
        "scores": metrics["scores"],
        "kv_bytes": metrics["kv_bytes"],
        "attention": metrics["attention"],
        "env": metrics["env"],
        "samples": samples,
    }


def mean(row: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Mean over all samples (every task has equally many) and the paired difference to fp16, with standard errors."""
    values = list(row["samples"].values())
    answer: dict[str, Any] = {"score": sum(values) / len(values), "stderr": error(values), "n": len(values)}
    if base is not None:
        both = sorted(row["samples"].keys() & base["samples"].keys())
        differences = [row["samples"][i] - base["samples"][i] for i in both]
        answer["vs_fp16"] = {
            "diff": sum(differences) / len(differences),
            "stderr": error(differences),
            "n": len(differences),
        }
    return answer


def error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    n = len(values)
    if n < 2:
        return math.nan
    middle = sum(values) / n
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table: a line a setting, a column a task."""
    keys = list(rows[0]["scores"])
    names = [key.split("@")[0].replace("_", " ") for key in keys]
    lines = [
        "| setting | mean | Δ to fp16 | KV bytes | ratio | " + " | ".join(names) + " |",
        "|---|---|---|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        difference = row["mean"].get("vs_fp16", {"diff": math.nan, "stderr": math.nan})
        used = row["kv_bytes"]["used"]["total"]
        cells = [f"{100 * row['scores'][key]['score']:.0f}" for key in keys]
        lines.append(
            f"| {row['name']} | {100 * row['mean']['score']:.1f} ±{100 * row['mean']['stderr']:.1f} "
            f"| {100 * difference['diff']:+.1f} ±{100 * difference['stderr']:.1f} | {used / 2**20:.2f} MiB "
            f"| {row['kv_bytes']['fp16_equivalent'] / used:.2f} | " + " | ".join(cells) + " |"
        )
    env, lengths = rows[0]["env"], sorted({key.split("@")[-1] for key in keys})
    counts = sorted({row["scores"][key]["n"] for row in rows for key in keys})
    lines += [
        "",
        f"Scores in percent, prompts of {', '.join(lengths)} tokens, n = {', '.join(map(str, counts))} a task; ± "
        f"standard error over samples, Δ paired over the same samples. KV bytes: in use at the end of a sample, mean. "
        f"{env['device_name']}, {env['dtype']}, torch {env['torch']}, transformers {env['transformers']}, "
        f"commit {str(env.get('commit'))[:10]}.",
    ]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Score against KV bytes, both of all tasks."""
    try:
        import matplotlib
    except ImportError:
        return  # the numbers are in the table; the extra `plot` draws them
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for row in rows:
        colour, marker = STYLE[row["family"]]
        x, y = row["kv_bytes"]["used"]["total"] / 2**20, 100 * row["mean"]["score"]
        axes.errorbar(x, y, yerr=100 * row["mean"]["stderr"], color=colour, marker=marker, markersize=7, capsize=2)
        axes.annotate(row["name"], (x, y), textcoords="offset points", xytext=(6, 4), fontsize=7, color=colour)
    axes.set_xscale("log")
    axes.set_xlabel("KV bytes in use, MiB (log scale)")
    axes.set_ylabel("score, mean over mini's tasks, %")
    axes.set_title("tiny on mini: accuracy against KV memory")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
