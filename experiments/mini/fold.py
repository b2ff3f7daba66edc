"""Runs of the comparison to numbers: what each setting has done, over the samples that are common, and in pairs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from experiments.measured import TINY, Folded, Rows, Setting, Stored
from experiments.runs import Run, composed
from experiments.stored import as_json, markdown_table
from kvbench.config.run_config import checked_config
from kvbench.results.samples import read_samples
from kvbench.runner.resolve import fitted

#: a setting that has done less than this share of the furthest one's samples stays out of the common table
ENOUGH = 0.5


def fold_mini(
    stored: Mapping[str, Stored],
    settings: Sequence[Setting],
    pairs: Sequence[tuple[str, str]] = (),
    runs: Path = Path("results/runs/mini"),
    model: str = TINY,
) -> Folded:
    """Return ``table.md``, ``scores.json``, ``pairs.json`` and ``plot.png``.

    Settings whose runs are not finished count with what they have: the table is over the samples that all of its
    settings have done, each pair over those that its two have done.
    """
    samples = {name: rows for name, done in stored.items() if (rows := done.rows["mini"])}
    most = max(map(len, samples.values()), default=0)
    enough = {name: rows for name, rows in samples.items() if len(rows) >= ENOUGH * most}
    shared = whole_tasks(set.intersection(*(set(rows) for rows in enough.values())) if enough else set())
    if not shared:
        return Folded(f"{runs} does not contain a sample that all settings have done")
    lines = [
        summarize(setting, enough[setting.name], sorted(shared), enough.get("fp16")) | {"env": stored[setting.name].env}
        for setting in settings
        if setting.name in enough
    ]
    compared = [less(a, b, samples) for a, b in pairs if a in samples and b in samples]
    compared = [pair for pair in compared if pair["mean"]["n"]]
    missing = {name: len(rows) for name, rows in samples.items() if name not in enough}
    missing |= {setting.name: 0 for setting in settings if setting.name not in samples}
    files = {"scores.json": as_json(lines), "pairs.json": as_json(compared)}
    counts = {line["name"]: line["mean"]["n"] for line in lines}
    return Folded(mini_markdown(lines, compared, missing), files, counts, partial(plot, lines, model))


def find_samples(folder: Path, run: Run) -> tuple[Rows, Mapping[str, Any]]:
    """Return the samples of all runs of a run's setting, finished or not, and the machine of the first of them."""
    return matching(folder, fitted(checked_config(composed(run.overrides))).plain)


def matching(folder: Path, config: Mapping[str, Any]) -> tuple[Rows, Mapping[str, Any]]:
    """Return the samples that all runs of a configuration's setting have done, and the machine of the first run.

    A setting has several runs where its tasks were run one by one. Samples of tasks and lengths that `config` does not
    ask for, and beyond its limit, are left out.
    """
    data = config["dataset"]
    samples: dict[str, Any] = {}
    machines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/config.yaml")):
        have = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not all(same_group(have[group], config[group]) for group in ("model", "method", "quantizer")):
            continue
        if have["dataset"].get("seed") != data.get("seed") or have.get("decoding") != config.get("decoding"):
            continue
        rows = read_samples(path.parent / "samples.jsonl").rows
        wanted = {key: row for key, row in rows.items() if asked(row, data)}
        if wanted:
            samples |= wanted
            machines.append(json.loads((path.parent / "env.json").read_text(encoding="utf-8")))
    return samples, machines[0] if machines else {}


def same_group(have: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return True if two groups mean the same; a key newer than the run has the value that changes nothing.

    The name of the method's preset, which follows from its keys, is not compared.
    """
    keys = wanted.keys() - {"preset"}
    return all(have[key] == wanted[key] if key in have else wanted[key] in (None, False, 0) for key in keys)


def asked(row: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Return True if a sample is one of those that the data set's configuration asks for."""
    tasks, limit = data.get("tasks", "all"), data.get("limit", math.inf)
    number = int(row["id"].rsplit("/", 1)[1])
    return (tasks == "all" or row["task"] in tasks) and row["length"] in data["lengths"] and number < limit


def whole_tasks(ids: set[str]) -> set[str]:
    """Drop the tasks of which some setting has done less than half of the others (an interrupted comparison)."""
    counts = Counter(i.rsplit("/", 1)[0] for i in ids)
    most = max(counts.values(), default=0)
    return {i for i in ids if 2 * counts[i.rsplit("/", 1)[0]] > most}


def summarize(setting: Setting, samples: Rows, ids: Sequence[str], base: Rows | None) -> dict[str, Any]:
    """Score a setting over the samples `ids`, by task and over all, paired with `base`; with mean bytes."""

    def cell(chosen: Sequence[str]) -> dict[str, Any]:
        answer = mean_of([sample_score(samples[i]) for i in chosen], "score")
        if base is not None:
            answer["vs_fp16"] = mean_of([sample_score(samples[i]) - sample_score(base[i]) for i in chosen])
            del answer["vs_fp16"]["n"]
        return answer

    return {
        "name": setting.name,
        "family": setting.family,
        "command": " ".join(setting.overrides),
        "mean": cell(ids),
        "tasks": {task: cell(chosen) for task, chosen in by_task(samples, ids).items()},
        "kv_bytes": {
            "used": mean_bytes(samples, ids),
            "fp16_equivalent": sum(samples[i]["kv_bytes"]["fp16_equivalent"] for i in ids) / len(ids),
        },
        "devices": sorted({samples[i]["measured"]["device"] for i in ids}),
    }


def less(first: str, second: str, samples: Mapping[str, Rows]) -> dict[str, Any]:
    """Return one setting less another, sample by sample, by task and over all, with the bytes of both."""
    one, two = samples[first], samples[second]
    ids = sorted(one.keys() & two.keys())

    def cell(chosen: Sequence[str]) -> dict[str, Any]:
        scores = {
            "first": mean_of([sample_score(one[i]) for i in chosen]),
            "second": mean_of([sample_score(two[i]) for i in chosen]),
        }
        return {
            **mean_of([sample_score(one[i]) - sample_score(two[i]) for i in chosen]),
            **{name: value["diff"] for name, value in scores.items()},
        }

    cells = {task: cell(chosen) for task, chosen in by_task(one, ids).items()}
    return {
        "first": first,
        "second": second,
        "mean": cell(ids) if ids else {"n": 0},
        "by_task": evenly(cells),
        "tasks": cells,
        "kv_bytes": {"first": mean_bytes(one, ids), "second": mean_bytes(two, ids)} if ids else {},
    }


def evenly(tasks: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Return the mean difference over tasks of equal weight, its standard error and the number of tasks.

    The mean over all samples gives a task the weight of its samples, of which an interrupted comparison has more in
    some tasks than in others. None unless every task has the two samples that a standard error needs.
    """
    if not tasks or any(math.isnan(task["stderr"]) for task in tasks.values()):
        return None
    count = len(tasks)
    return {
        "diff": sum(task["diff"] for task in tasks.values()) / count,
        "stderr": math.sqrt(sum(task["stderr"] ** 2 for task in tasks.values())) / count,
        "n": count,
    }


def by_task(samples: Mapping[str, Any], ids: Sequence[str]) -> dict[str, list[str]]:
    """Group the samples `ids` by ``task@length``."""
    tasks: dict[str, list[str]] = {}
    for i in ids:
        tasks.setdefault(f"{samples[i]['task']}@{samples[i]['length']}", []).append(i)
    return dict(sorted(tasks.items()))


def sample_score(row: Mapping[str, Any]) -> float:
    """Return a sample's score."""
    return float(row["scores"]["score"])


def mean_bytes(samples: Mapping[str, Any], ids: Sequence[str]) -> float:
    """Return the mean bytes of keys and values in use at the end of a sample."""
    return float(sum(samples[i]["kv_bytes"]["used"]["total"] for i in ids) / len(ids))


def mean_of(values: Sequence[float], name: str = "diff") -> dict[str, Any]:
    """Return the mean under `name`, its standard error and the number of values."""
    return {name: sum(values) / len(values), "stderr": score_stderr(values), "n": len(values)}


def score_stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    n = len(values)
    if n < 2:
        return math.nan
    middle = sum(values) / n
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)


#: colours of the families, distinguishable without hue as well (markers differ)
STYLE = {
    "fp16": ("black", "*"),
    "atom": ("tab:brown", "s"),
    "kivi": ("tab:blue", "o"),
    "hf": ("tab:cyan", "P"),
    "logquant": ("tab:green", "^"),
    "cocktail": ("tab:red", "D"),
    "eviction": ("tab:gray", "x"),
    "quantspec": ("tab:purple", "v"),
    "kvquant": ("tab:olive", "h"),
}
#: families of the table of formats
STYLE |= {"plain": STYLE["eviction"], "engine": STYLE["atom"], "turboquant": STYLE["cocktail"]}
STYLE |= {"kvarn": STYLE["logquant"], "oscar": STYLE["quantspec"]}
Row = Mapping[str, Any]


def mini_markdown(rows: Sequence[Row], pairs: Sequence[Row] = (), missing: Mapping[str, int] | None = None) -> str:
    """Return a line per setting and a column per task, then the pairs, then what the table leaves out."""
    keys = list(rows[0]["tasks"])
    lengths = sorted({key.split("@")[-1] for key in keys}, key=int)
    names = [key.replace("_", " ") if len(lengths) > 1 else key.split("@")[0].replace("_", " ") for key in keys]
    cells = []
    for row in rows:
        whole, used, full = row["mean"], row["kv_bytes"]["used"], row["kv_bytes"]["fp16_equivalent"]
        figures = [
            row["name"],
            f"{100 * whole['score']:.1f} ±{100 * whole['stderr']:.1f}",
            percentage_points(whole["vs_fp16"]) if "vs_fp16" in whole else "-",
            f"{used / 2**20:.2f} MiB",
            f"{full / used:.2f}",
        ]
        cells.append([*figures, *(f"{100 * row['tasks'][key]['score']:.0f}" for key in keys)])
    counts = sorted({row["tasks"][key]["n"] for row in rows for key in keys})
    devices = sorted({device for row in rows for device in row["devices"]})
    versions = sorted({versions_of(row["env"]) for row in rows})
    lines = [
        *markdown_table(["setting", "mean", "Δ to fp16", "KV bytes", "ratio", *names], cells, "-"),
        "",
        f"Scores in percent over the samples that all settings have done: prompts of {', '.join(lengths)} tokens, "
        f"n = {', '.join(map(str, counts))} a task; ± standard error over samples, Δ paired over the same samples. "
        f"KV bytes: in use at the end of a sample, mean. {' and '.join(devices)}; {'; '.join(versions)}.",
    ]
    if missing:
        unfinished = ", ".join(f"{name} ({count} samples)" if count else name for name, count in missing.items())
        lines += ["", f"Not run, or not far enough: {unfinished}."]
    if pairs:
        lines += ["", *in_pairs(pairs)]
    return "\n".join(lines) + "\n"


def in_pairs(pairs: Sequence[Row]) -> list[str]:
    """Return a line per pair: the first less the second in points, over all samples that both have, and by task."""
    keys = sorted({key for pair in pairs for key in pair["tasks"]})
    cells = []
    for pair in pairs:
        whole, cache = pair["mean"], pair["kv_bytes"]
        shown = [
            f"{pair['first']} less {pair['second']}",
            f"{100 * whole['first']:.1f}, {100 * whole['second']:.1f}",
            percentage_points(whole),
            str(whole["n"]),
            percentage_points(pair["by_task"]) if pair["by_task"] else "-",
            f"{cache['first'] / 2**20:.2f}, {cache['second'] / 2**20:.2f}",
        ]
        cells.append(
            [*shown, *(percentage_points(pair["tasks"][key]) if key in pair["tasks"] else "-" for key in keys)]
        )
    head = ["first less second", "scores", "Δ by sample", "n", "Δ by task", "KV bytes, MiB", *keys]
    note = (
        "Differences in points, paired over the samples that both settings have done, ± standard error. By sample: a "
        "task has the weight of its samples, of which some pairs have more in some tasks than in others; by task: all "
        "tasks have the same weight."
    )
    return [*markdown_table(head, cells, "-"), "", note]


def percentage_points(difference: Row) -> str:
    """Return a difference and its standard error in percentage points."""
    return f"{100 * difference['diff']:+.1f} ±{100 * difference['stderr']:.1f}"


def versions_of(env: Row) -> str:
    """Return dtype, device and versions of a run."""
    return f"{env['dtype']}, torch {env['torch']}, transformers {env['transformers']}"


def plot(rows: Sequence[Row], model: str, pyplot: Any, folder: Path) -> None:
    """Plot score against KV bytes, both over all tasks, as ``plot.png``."""
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
    axes.set_title(f"{model} on mini: accuracy against KV memory")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "plot.png", dpi=130)
    pyplot.close(figure)
