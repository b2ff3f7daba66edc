"""What a search of ``kvbench.tune`` costs: its whole time, and the windows that stopping recipes early saves.

``python -m experiments.tune time --models tiny`` runs the command of 120 settings in a process of its own, and adds a
row to ``times.json``. ``stops`` runs the same search with and without stopping, and adds a row to ``stops.json``:
what both found and how many windows each scored. ``stops`` goes on where it was interrupted (and takes the
evaluations of ``time``); the time of an interrupted search is not taken.

``stops`` also counts errors of the rule on the recipes that were scored on all windows: of all pairs in which one would
become the best after the other, with windows in random order, the share that is stopped.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.results.environment import cpu_name
from kvbench.tune.aim import Aim, Scored, standard_error
from kvbench.tune.command import composed_config
from kvbench.tune.search import run_search
from kvbench.tune.space import DEFAULT, Recipe, layer_map
from kvbench.util import atomic

#: settings of both: those of the command by default
WORDS, BUDGET, WINDOWS, HELD_OUT, TOGETHER = ("model.dtype=float32",), 120, 16, 16, 4
#: of the rule's errors: random orders of windows
ORDERS = 20


def place_of(store: Path, model: str) -> Path:
    """Return the folder of a model's evaluations."""
    return store / "cost" / model


def measure_time(model: str, bits: float, words: Sequence[str], store: Path, out: Path) -> None:
    """Run a search as a user does, and add its row to ``times.json``."""
    place = place_of(store, model) / f"{bits:g}"
    if (place / "evaluations.jsonl").exists():
        raise SystemExit(f"{place}: a search has begun here, and its time is lost; remove the folder to take it again")
    command = [sys.executable, "-m", "kvbench.tune", f"model={model}", *WORDS, *words, "--bits", f"{bits:g}",
               "--budget", str(BUDGET), "--out", str(place)]  # fmt: skip
    load, before, began = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = (place / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    row = {
        "model": model, "bits": bits, "budget": BUDGET, "words": [*WORDS, *words],
        "wall_s": round(time.perf_counter() - began, 1),
        "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "windows": sum(len(json.loads(line)["kl"]) for line in lines[1:]),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), "cores": os.cpu_count(),
        "nice": os.nice(0), "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "machine": cpu_name(), "versions": {name: version(name) for name in ("torch", "transformers", "optuna")},
        "said": ended.stderr.strip().splitlines()[-1].partition(";")[0],
    }  # fmt: skip
    _add_row(out / "times.json", row, ("model", "bits"))


def measure_stops(model: str, bits: float, words: Sequence[str], seed: int, store: Path, out: Path) -> None:
    """Run a search with and without stopping, and add its row to ``stops.json``."""
    from kvbench.tune.session import Tuning

    config = composed_config([f"model={model}", *WORDS, *words], WINDOWS + HELD_OUT)
    evaluations = place_of(store, model) / f"{bits:g}" / "evaluations.jsonl"
    tuning = Tuning(config, WINDOWS, HELD_OUT, TOGETHER, evaluations)
    aim = Aim(tuning.space(DEFAULT), bits)
    row: dict[str, Any] = {"model": model, "bits": bits, "seed": seed, "budget": BUDGET,
                           "machine": tuning.store.header["machine"][0]}  # fmt: skip
    kl, whole = {}, dict[Recipe, Scored]()
    evaluate = partial(tuning.evaluate, aim)
    for name, how in (("stopping", evaluate), ("whole", lambda recipe, _: evaluate(recipe, None))):
        best, scores = run_search(aim, "adaptive", BUDGET, seed, how)
        assert best is not None
        layers = aim.space.expand(best.recipe)
        kl[name], p99 = tuning.test(layers)
        whole |= {one.recipe: one for one in scores if not one.stopped and aim.admits(one.recipe)}
        row[name] = {"windows": sum(len(one.kl) for one in scores), "stopped": sum(one.stopped for one in scores),
                     "search_kl": best.mean, "kl": float(kl[name].mean()), "p99": p99,
                     "layers": layer_map(layers)}  # fmt: skip
    paired = kl["stopping"] - kl["whole"]
    row |= {"difference": float(paired.mean()), "error": standard_error(paired),
            "rule": rule_errors(aim, list(whole.values()))}  # fmt: skip
    _add_row(out / "stops.json", row, ("model", "bits", "seed"))


def rule_errors(aim: Aim, scores: Sequence[Scored]) -> dict[str, int]:
    """Return in how many pairs a recipe beats the best before it, or does not, and how many of each are stopped."""
    rng, looks = np.random.default_rng(0), -(-WINDOWS // TOGETHER) - 1
    counts = dict.fromkeys(("better", "better_stopped", "worse", "worse_stopped"), 0)
    for _ in range(ORDERS):
        order = rng.permutation(WINDOWS)
        shuffled = [Scored(one.recipe, one.kl[order], one.p99) for one in scores]
        for best, one in permutations(shuffled, 2):
            name = "better" if aim.rank(one) < aim.rank(best) else "worse"
            counts[name] += 1
            counts[f"{name}_stopped"] += any(
                aim.hopeless(one.recipe, one.kl[: TOGETHER * (look + 1)], best, looks) for look in range(looks)
            )
    return counts


def _add_row(path: Path, row: dict[str, Any], keys: Sequence[str]) -> None:
    """Put a row into a file, in place of one with the same values of `keys`."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [one for one in rows if any(one[key] != row[key] for key in keys)]
    rows = sorted([*rows, row], key=lambda one: [str(one[key]) for key in keys])
    atomic.replace_file(path, (json.dumps(rows, indent=1) + "\n").encode())


def cost_lines(out: Path) -> list[str]:
    """Return the sections about both files of a folder, as Markdown."""
    times, stops = (
        json.loads((out / name).read_text(encoding="utf-8")) if (out / name).exists() else []
        for name in ("times.json", "stops.json")
    )
    lines = []
    if times:
        lines += [
            "## Time of a whole search",
            "",
            f"`python -m kvbench.tune` with {BUDGET} settings, from start to end (`python -m experiments.tune time`).",
            "Load: how many processes wanted the cores before it began and at its end. Beside other work the wall time",
            "says little, and the processor's time more. Limits: 40 minutes for tiny, 180 for the trained model.",
            "",
            "| model | bits | settings | windows | wall time, min | processor's time, min | threads | load | machine |",
            "|:--|--:|--:|--:|--:|--:|--:|--:|:--|",
            *(_time_line(row) for row in times),
            "",
        ]
    if stops:
        sums = {name: sum(row["rule"][name] for row in stops) for name in stops[0]["rule"]}
        lines += [
            "## What stopping saves",
            "",
            f"The adaptive search with {BUDGET} settings and {WINDOWS} windows, {TOGETHER} at a time, with and without",
            f"stopping recipes early, and the recipes that both find on {HELD_OUT} held-out windows",
            "(`python -m experiments.tune stops`).",
            "",
            "| model | bits | seed | windows, stopping | all | stopped | KL, held out | KL, all windows | difference |",
            "|:--|--:|--:|--:|--:|--:|--:|--:|--:|",
            *(_stops_line(row) for row in stops),
            "",
            "The rule itself, on all pairs of recipes that were scored on all windows, in random orders of these: of",
            f"{sums['better']:,} pairs in which one beats the best before it, {sums['better_stopped']:,} are stopped "
            f"({100 * sums['better_stopped'] / sums['better']:.2g} %;",
            f"if differences are normal, at most 1 %), and of {sums['worse']:,} others "
            f"{100 * sums['worse_stopped'] / sums['worse']:.0f} %.",
        ]
    return lines


def _time_line(row: Mapping[str, Any]) -> str:
    return (f"| {row['model']} | {row['bits']:g} | {row['budget']} | {row['windows']} | {row['wall_s'] / 60:.1f} "
            f"| {row['processor_s'] / 60:.1f} | {row['threads']} of {row['cores']} "
            f"| {row['load'][0]:g}, {row['load'][1]:g} | {row['machine']} |")  # fmt: skip


def _stops_line(row: Mapping[str, Any]) -> str:
    ours, whole = row["stopping"], row["whole"]
    gap = "the same recipe" if ours["layers"] == whole["layers"] else f"{row['difference']:+.2g} ±{row['error']:.1g}"
    return (f"| {row['model']} | {row['bits']:g} | {row['seed']} | {ours['windows']} | {whole['windows']} "
            f"| {ours['stopped']} | {ours['kl']:.4g} | {whole['kl']:.4g} | {gap} |")  # fmt: skip
