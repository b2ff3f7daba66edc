"""Runs of the grid to one table (markdown), one file of numbers (JSON) and one plot (PNG)."""

from __future__ import annotations

import json
import math
from collections import Counter
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
    found = [row for setting in settings if (row := read(runs, setting, configs[setting.name]))]
    shared = whole_tasks(set.intersection(*(set(row["samples"]) for row in found)) if found else set())
    if not shared:
        return f"nothing that all settings have done lies in {runs}"
    base = next((row for row in found if row["name"] == "fp16"), None)
    rows = [summarize(row, sorted(shared), base) for row in found]
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(rows)
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "scores.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    plot(rows, out / "plot.png")
    return text


def read(runs: Path, setting: Setting, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The samples that a setting has done, whether its run is finished or not; None where it has not begun."""
    groups = ("model", "method", "quantizer")
    wanted = [config[group] for group in groups]
    for path in sorted(runs.glob("*/config.yaml")):
        have = yaml.safe_load(path.read_text(encoding="utf-8"))
        if [have[group] for group in groups] == wanted and have["dataset"]["lengths"] == config["dataset"]["lengths"]:
            samples = read_samples(path.parent / "samples.jsonl").rows
            env = json.loads((path.parent / "env.json").read_text(encoding="utf-8"))
            return {"setting": setting, "name": setting.name, "samples": samples, "env": env} if samples else None
    return None


def whole_tasks(ids: set[str]) -> set[str]:
    """Without the tasks of which some setting has done less than half of the others (an interrupted comparison)."""
    counts = Counter(i.rsplit("/", 1)[0] for i in ids)
    most = max(counts.values(), default=0)
    return {i for i in ids if 2 * counts[i.rsplit("/", 1)[0]] > most}


def summarize(row: dict[str, Any], ids: Sequence[str], base: dict[str, Any] | None) -> dict[str, Any]:
    """Scores of a setting over the samples `ids`, by task and over all, paired with `base`; mean bytes."""
    samples = row["samples"]

    def cell(chosen: Sequence[str]) -> dict[str, Any]:
        values = [samples[i]["scores"]["score"] for i in chosen]
        answer: dict[str, Any] = {"score": sum(values) / len(values), "stderr": error(values), "n": len(values)}
        if base is not None:
            differences = [v - base["samples"][i]["scores"]["score"] for v, i in zip(values, chosen, strict=True)]
            answer["vs_fp16"] = {"diff": sum(differences) / len(differences), "stderr": error(differences)}
        return answer

    tasks: dict[str, list[str]] = {}
    for i in sorted(ids, key=list(samples).index):
        tasks.setdefault(f"{samples[i]['task']}@{samples[i]['length']}", []).append(i)
    used = [samples[i]["kv_bytes"]["used"]["total"] for i in ids]
    full = [samples[i]["kv_bytes"]["fp16_equivalent"] for i in ids]
    return {
        "name": row["name"],
        "family": row["setting"].family,
        "command": " ".join(row["setting"].overrides),
        "mean": cell(ids),
        "tasks": {task: cell(chosen) for task, chosen in sorted(tasks.items())},
        "kv_bytes": {"used": sum(used) / len(used), "fp16_equivalent": sum(full) / len(full)},
        "devices": sorted({samples[i]["measured"]["device"] for i in ids}),
        "env": row["env"],
    }


def error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    n = len(values)
    if n < 2:
        return math.nan
    middle = sum(values) / n
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table: a line a setting, a column a task."""
    keys = list(rows[0]["tasks"])
    names = [key.split("@")[0].replace("_", " ") for key in keys]
    lines = [
        "| setting | mean | Δ to fp16 | KV bytes | ratio | " + " | ".join(names) + " |",
        "|---|---|---|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        whole, used, full = row["mean"], row["kv_bytes"]["used"], row["kv_bytes"]["fp16_equivalent"]
        difference = whole.get("vs_fp16", {"diff": math.nan, "stderr": math.nan})
        cells = [f"{100 * row['tasks'][key]['score']:.0f}" for key in keys]
        lines.append(
            f"| {row['name']} | {100 * whole['score']:.1f} ±{100 * whole['stderr']:.1f} "
            f"| {100 * difference['diff']:+.1f} ±{100 * difference['stderr']:.1f} | {used / 2**20:.2f} MiB "
            f"| {full / used:.2f} | " + " | ".join(cells) + " |"
        )
    env, lengths = rows[0]["env"], sorted({key.split("@")[-1] for key in keys})
    counts = sorted({row["tasks"][key]["n"] for row in rows for key in keys})
    devices = sorted({device for row in rows for device in row["devices"]})
    lines += [
        "",
        f"Scores in percent over the samples that all settings have done: prompts of {', '.join(lengths)} tokens, "
        f"n = {', '.join(map(str, counts))} a task; ± standard error over samples, Δ paired over the same samples. "
        f"KV bytes: in use at the end of a sample, mean. {' and '.join(devices)}; {env['dtype']}, "
        f"torch {env['torch']}, transformers {env['transformers']}.",
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
    for number, row in enumerate(sorted(rows, key=lambda row: -row["kv_bytes"]["used"]), start=1):
        colour, marker = STYLE[row["family"]]
        x, y = row["kv_bytes"]["used"] / 2**20, 100 * row["mean"]["score"]
        spread = 100 * row["mean"]["stderr"]
        label = f"{number}  {row['name']}"
        axes.errorbar(x, y, yerr=spread, color=colour, marker=marker, markersize=7, capsize=2, ls="", label=label)
        # settings of nearly equal bytes: their numbers alternate above and below
        axes.annotate(str(number), (x, y), (5, 7 if number % 2 else -13), textcoords="offset points", color=colour)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("KV bytes in use, MiB (log scale)")
    axes.set_ylabel("score, mean over the tasks, %")
    axes.set_title("tiny on mini: accuracy against KV memory")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
