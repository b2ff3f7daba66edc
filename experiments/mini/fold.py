"""Runs of the comparison to numbers: what each setting has done, over the samples that are common, and in pairs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.mini.grid import Setting
from experiments.mini.report import markdown, plot
from experiments.place import Choice, Place, known, place
from kvbench.results.samples import read as read_samples

#: a setting that has done less than this share of the furthest one's samples stays out of the common table
ENOUGH = 0.5


def fold(
    runs: Path,
    out: Path,
    settings: Sequence[Setting],
    configs: Mapping[str, Mapping[str, Any]],
    pairs: Sequence[tuple[str, str]] = (),
    chosen: Choice | None = None,
) -> tuple[str, Place | None]:
    """Read every setting's runs, write ``table.md``, ``scores.json``, ``pairs.json``, ``plot.png``.

    Returns the table as text, and the place of the files; None where there is nothing to write.

    Settings whose runs are not finished count with what they have: the table is over the samples that all of its
    settings have done, each pair over those that its two have done.

    Args:
        runs: where the runs lie.
        out: where the files go.
        settings: the rows.
        configs: the composed configuration of each setting, by name: a run is found by its method and formats.
        pairs: names of settings whose difference is of interest.
        chosen: what the command line says about replacing files in `out`.
    """
    records = [row for setting in settings if (row := read(runs, setting, configs[setting.name]))]
    most = max((len(row["samples"]) for row in records), default=0)
    enough = [row for row in records if len(row["samples"]) >= ENOUGH * most]
    shared = whole_tasks(set.intersection(*(set(row["samples"]) for row in enough)) if enough else set())
    if not shared:
        return f"{runs} does not contain a sample that all settings have done", None
    base = next((row for row in enough if row["name"] == "fp16"), None)
    rows = [summarize(row, sorted(shared), base) for row in enough]
    by_name = {row["name"]: row for row in records}
    compared = [less(by_name[a], by_name[b]) for a, b in pairs if a in by_name and b in by_name]
    compared = [pair for pair in compared if pair["mean"]["n"]]
    missing = {row["name"]: len(row["samples"]) for row in records if row not in enough}
    missing |= {setting.name: 0 for setting in settings if setting.name not in by_name}
    new = {row["name"]: row["mean"]["n"] for row in rows}
    old = known(out / "scores.json", lambda content: {row["name"]: row["mean"]["n"] for row in content})
    where = place(out, chosen or Choice(), new, old, [out / "plot.png"])
    out = where.path
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(rows, compared, missing)
    (out / "table.md").write_text(text, encoding="utf-8")
    for name, content in (("scores", rows), ("pairs", compared)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    plot(rows, out / "plot.png")
    return text, where


def read(runs: Path, setting: Setting, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the samples that a setting has done in all its runs, finished or not; None where it has not begun.

    A setting has several runs where its tasks were run one by one. Samples of tasks and lengths that `config` does not
    ask for, and beyond its limit, are left out.
    """
    data = config["dataset"]
    samples: dict[str, Any] = {}
    environments: list[dict[str, Any]] = []
    for path in sorted(runs.glob("*/config.yaml")):
        have = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not all(same(have[group], config[group]) for group in ("model", "method", "quantizer")):
            continue
        if have["dataset"].get("seed") != data.get("seed") or have.get("decoding") != config.get("decoding"):
            continue
        rows = read_samples(path.parent / "samples.jsonl").rows
        wanted = {key: row for key, row in rows.items() if asked(row, data)}
        if wanted:
            samples |= wanted
            environments.append(json.loads((path.parent / "env.json").read_text(encoding="utf-8")))
    if not samples:
        return None
    return {"setting": setting, "name": setting.name, "samples": samples, "env": environments[0]}


def same(have: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return True if two groups mean the same; a key newer than the run has the value that changes nothing."""
    return all(have[key] == value if key in have else value in (None, False, 0) for key, value in wanted.items())


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


def summarize(row: dict[str, Any], ids: Sequence[str], base: dict[str, Any] | None) -> dict[str, Any]:
    """Score a setting over the samples `ids`, by task and over all, paired with `base`; with mean bytes."""
    samples = row["samples"]

    def cell(chosen: Sequence[str]) -> dict[str, Any]:
        answer = mean_of([score(samples[i]) for i in chosen], "score")
        if base is not None:
            answer["vs_fp16"] = mean_of([score(samples[i]) - score(base["samples"][i]) for i in chosen])
            del answer["vs_fp16"]["n"]
        return answer

    return {
        "name": row["name"],
        "family": row["setting"].family,
        "command": " ".join(row["setting"].overrides),
        "mean": cell(ids),
        "tasks": {task: cell(chosen) for task, chosen in by_task(samples, ids).items()},
        "kv_bytes": {
            "used": mean_bytes(samples, ids),
            "fp16_equivalent": sum(samples[i]["kv_bytes"]["fp16_equivalent"] for i in ids) / len(ids),
        },
        "devices": sorted({samples[i]["measured"]["device"] for i in ids}),
        "env": row["env"],
    }


def less(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return `first` less `second`, sample by sample, by task and over all, with the bytes of both."""
    one, two = first["samples"], second["samples"]
    ids = sorted(one.keys() & two.keys())
    tasks = by_task(one, ids)

    def cell(chosen: Sequence[str]) -> dict[str, Any]:
        scores = {"first": mean_of([score(one[i]) for i in chosen]), "second": mean_of([score(two[i]) for i in chosen])}
        return {
            **mean_of([score(one[i]) - score(two[i]) for i in chosen]),
            **{name: value["diff"] for name, value in scores.items()},
        }

    cells = {task: cell(chosen) for task, chosen in tasks.items()}
    return {
        "first": first["name"],
        "second": second["name"],
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


def score(row: Mapping[str, Any]) -> float:
    """Return a sample's score."""
    return float(row["scores"]["score"])


def mean_bytes(samples: Mapping[str, Any], ids: Sequence[str]) -> float:
    """Return the mean bytes of keys and values in use at the end of a sample."""
    return float(sum(samples[i]["kv_bytes"]["used"]["total"] for i in ids) / len(ids))


def mean_of(values: Sequence[float], name: str = "diff") -> dict[str, Any]:
    """Return the mean under `name`, its standard error and the number of values."""
    return {name: sum(values) / len(values), "stderr": error(values), "n": len(values)}


def error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    n = len(values)
    if n < 2:
        return math.nan
    middle = sum(values) / n
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)
