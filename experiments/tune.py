"""Gates of ``kvbench.tune``: searches compared on held-out texts at equal evaluations, and replayed on a grid.

``python -m experiments.tune run`` starts a process per model and budget, each of which runs all searches; processes
of a model share its evaluations, and the command goes on where it stopped. ``--write`` folds what is there. ``grid``
evaluates the recipes of a space of the bundled model once, and ``replay`` runs searches on them with many seeds
(:mod:`experiments.tune_grid`); ``time`` and ``stops`` measure what a search costs (:mod:`experiments.tune_cost`).
``page`` writes README.md, and the recipes, from the files that are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tune_cost import cost_lines, measure_stops, measure_time
from experiments.tune_grid import GRIDS, evaluate_grid, replay, replay_lines
from kvbench.methods.layer_map import forms, parse_layer_map
from kvbench.tune.aim import Aim, standard_error
from kvbench.tune.command import composed_config
from kvbench.tune.search import SEARCHES, run_search
from kvbench.tune.space import DEFAULT, layer_map, sides_of
from kvbench.util import atomic

FOLDER = Path("results/tune")
#: the caches are in float32, so that a KL divergence is that of the formats alone
EXACT_WORDS = ("model.dtype=float32",)
#: the trained model, and two variants of it with larger channels (docs/which-format.md)
MODELS = {
    "smollm2-135m-q4_1": [],
    "smollm2-135m-q4_1, outliers keys": ["model.outliers=keys"],
    "smollm2-135m-q4_1, outliers first_last": ["model.outliers=first_last"],
}
#: bits an element
BUDGETS = (4.5, 5.4, 6.5)
OURS = "adaptive"


def tune_gates_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tune", description=__doc__)
    add = parser.add_argument
    add("what", choices=("run", "one", "grid", "replay", "time", "stops", "page"), help="one: a process of run")
    add("words", nargs="*", metavar="KEY=VALUE", help="overrides for every process, such as runtime.device=cuda")
    add("--models", nargs="+", default=list(MODELS), metavar="NAME", help=f"of: {'; '.join(MODELS)}; or a preset")
    add("--bits", nargs="+", type=float, default=list(BUDGETS), metavar="X", help="budgets (default: %(default)s)")
    add("--searches", nargs="+", choices=tuple(SEARCHES), default=list(SEARCHES), metavar="NAME")
    add("--budget", type=int, default=120, metavar="N", help="evaluations of each search (default: %(default)s)")
    add("--windows", type=int, default=24, metavar="N", help="windows to search on (default: %(default)s)")
    add("--held-out", type=int, default=32, metavar="N", help="windows to compare on (default: %(default)s)")
    add("--together", type=int, default=8, metavar="N", help="windows that are scored at once (default: %(default)s)")
    add("--jobs", type=int, default=9, metavar="N", help="processes at a time (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of stops (default: %(default)s)")
    add("--grid", choices=tuple(GRIDS), default="large", metavar="NAME", help=f"of: {', '.join(GRIDS)} (%(default)s)")
    add("--store", type=Path, default=FOLDER / "store", metavar="DIR", help="evaluations and outcomes (%(default)s)")
    add("--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the tables (default: %(default)s)")
    add("--write", action="store_true", help="fold what is there, and run nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status: 1 if a process failed."""
    arguments = tune_gates_parser().parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "one":
        _one(arguments)
        return 0
    if arguments.what == "grid":
        evaluate_grid(GRIDS[arguments.grid], [*EXACT_WORDS, *arguments.words], arguments.store, arguments.out)
        return 0
    if arguments.what == "replay":
        replay(arguments.out)
        return 0
    if arguments.what in ("time", "stops"):
        for model, bits in product(arguments.models, arguments.bits):
            if arguments.what == "time":
                measure_time(model, bits, arguments.words, arguments.store, arguments.out)
            else:
                measure_stops(model, bits, arguments.words, arguments.seed, arguments.store, arguments.out)
        return 0
    if arguments.what == "page":
        outcomes = json.loads((arguments.out / "gates.json").read_text(encoding="utf-8"))
        atomic.replace_file(arguments.out / "README.md", results_page(outcomes, arguments.out).encode())
        write_recipes(outcomes, arguments.out)
        return 0
    failed, outcomes = 0 if arguments.write else _run(arguments), _outcomes(arguments.store)
    text = results_page(outcomes, arguments.out)
    print(text)
    if arguments.write:
        atomic.replace_file(arguments.out / "gates.json", (json.dumps(outcomes) + "\n").encode())
        atomic.replace_file(arguments.out / "README.md", text.encode())
        write_recipes(outcomes, arguments.out)
    return 1 if failed else 0


def write_recipes(outcomes: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write the recipes of the adaptive search."""
    for one in outcomes:
        if one["search"] == OURS and "kl" in one:
            name = f"{one['model'].replace(', ', '-').replace(' ', '-')}-{one['budget']:g}"
            path = out / "recipes" / name / "recipe.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.replace_file(path, (json.dumps(recipe_of(one), indent=1) + "\n").encode())


def _place(store: Path, model: str) -> Path:
    return store / model.replace(", ", "-").replace(" ", "-")


def _outcome_path(store: Path, model: str, bits: float, search: str) -> Path:
    return _place(store, model) / f"{bits:g}-{search}.json"


def _run(arguments: argparse.Namespace) -> int:
    """Run a process for each model and budget whose outcome is missing, and return how many failed."""
    shared = [
        f"--{name}={getattr(arguments, name.replace('-', '_'))}"
        for name in ("budget", "windows", "held-out", "together", "store")
    ]
    commands = []
    for number, bits in enumerate(arguments.bits):
        for model in arguments.models:
            missing = [
                name for name in _rotated(arguments.searches, number)
                if not _outcome_path(arguments.store, model, bits, name).exists()
            ]  # fmt: skip
            if missing:
                one = [sys.executable, "-m", "experiments.tune", "one", *arguments.words, *shared]
                commands.append([*one, "--models", model, "--bits", str(bits), "--searches", *missing])
    with ThreadPoolExecutor(arguments.jobs) as pool:
        codes = list(pool.map(lambda command: subprocess.run(command, check=False).returncode, commands))
    return sum(code != 0 for code in codes)


def _rotated(names: Sequence[str], by: int) -> list[str]:
    """Return names beginning with another one, so that processes of a model evaluate different recipes at first."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def _one(arguments: argparse.Namespace) -> None:
    """Run all searches for one model and budget, and store the outcome of each as it ends."""
    from kvbench.tune.session import Tuning

    (model,), (bits,) = arguments.models, arguments.bits
    preset, words = model.partition(",")[0], [*EXACT_WORDS, *MODELS.get(model, []), *arguments.words]
    config = composed_config([f"model={preset}", *words], arguments.windows + arguments.held_out)
    evaluations = _place(arguments.store, model) / "evaluations.jsonl"
    tuning = Tuning(config, arguments.windows, arguments.held_out, arguments.together, evaluations)
    aim = Aim(tuning.space(DEFAULT), bits)
    for search in arguments.searches:
        best, scores = run_search(
            aim, search, arguments.budget, 0, lambda recipe, top: tuning.evaluate(aim, recipe, top)
        )
        outcome: dict[str, Any] = {"model": model, "budget": bits, "search": search, "evaluations": len(scores),
                                   "stopped": sum(scored.stopped for scored in scores),
                                   "windows": arguments.windows, "together": arguments.together,
                                   "machine": tuning.store.header["machine"][0]}  # fmt: skip
        if best is not None:
            layers = aim.space.expand(best.recipe)
            kl, p99 = tuning.test(layers)
            outcome |= {"bits": aim.space.bits(best.recipe), "search_kl": best.mean, "kl": [float(x) for x in kl],
                        "p99": p99, "layers": layer_map(layers)}  # fmt: skip
        atomic.replace_file(_outcome_path(arguments.store, model, bits, search), json.dumps(outcome).encode())
        print(f"{model}, {bits:g} bits, {search}: {len(scores)} evaluations, {tuning.evaluated} new", flush=True)


def _outcomes(store: Path) -> list[dict[str, Any]]:
    """Return the stored outcomes, by model, budget and search."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(store.glob("*/*-*.json"))]
    order = {name: number for number, name in enumerate(MODELS)}
    return sorted(
        found, key=lambda one: (order.get(one["model"], 99), one["budget"], list(SEARCHES).index(one["search"]))
    )


def recipe_of(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``recipe.json`` of an outcome."""
    kl, entries = np.array(outcome["kl"]), parse_layer_map(outcome["layers"])
    layers = [sides_of(str(form)) for form in forms(outcome["layers"], 1 + max(entry.last for entry in entries))]
    return {
        "kvbench": 1,
        "kind": "recipe",
        "model": outcome["model"],
        "budget_bits": outcome["budget"],
        "budget_kl": None,
        "bits": outcome["bits"],
        "kl": {
            "mean": float(kl.mean()),
            "se": standard_error(kl),
            "p99": outcome["p99"],
            "windows": len(kl),
            "held_out": True,
        },
        "search_kl": {"mean": outcome["search_kl"]},
        "evaluations": outcome["evaluations"],
        "search": outcome["search"],
        "layers": [{"keys": keys, "values": values} for keys, values in layers],
    }


def _about_stops(outcomes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why no recipe was stopped, if none was."""
    if any(one["stopped"] for one in outcomes):
        return []
    lines = ["", "No recipe was stopped early, as that can only happen between two batches of windows: these searches",
             "scored all windows in one."]  # fmt: skip
    if any("together" not in one for one in outcomes):
        lines[-1] += " Their settings were not kept; since then an outcome has them (`windows`, `together`)."
        lines.append("Stopping is measured below.")
    return lines


def verdicts(outcomes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each model and budget how the adaptive search compares with the best baseline on held-out windows.

    ``difference`` is its mean KL divergence minus that of the baseline whose held-out mean is the least, ``error`` the
    paired standard error over windows.
    """
    cells: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for one in outcomes:
        if "kl" in one:
            cells.setdefault((one["model"], one["budget"]), {})[one["search"]] = one
    rows = []
    for (model, budget), cell in cells.items():
        others = {name: one for name, one in cell.items() if name != OURS}
        if OURS not in cell or not others:
            continue
        best = min(others, key=lambda name: float(np.mean(others[name]["kl"])))
        paired = np.array(cell[OURS]["kl"]) - np.array(others[best]["kl"])
        rows.append({"model": model, "budget": budget, "baseline": best, "difference": float(paired.mean()),
                     "error": standard_error(paired)})  # fmt: skip
    return rows


def results_page(outcomes: Sequence[Mapping[str, Any]], out: Path) -> str:
    """Return the page of all files of a folder as Markdown."""
    return "\n".join([gates_page(outcomes), *replay_lines(out), "", *cost_lines(out), ""])


def gates_page(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with all outcomes and the verdicts as Markdown."""
    lines = [
        "# Searches for a format per layer",
        "",
        "Made by `python -m experiments.tune run`, folded with `--write`. KL divergence in nats; errors are standard",
        "errors over windows. Bits are those of 16-bit storage. The layers of each recipe and the KL divergence of",
        "each window are in gates.json.",
        *_about_stops(outcomes),
        "",
        "| model | budget, bits | search | evaluations | stopped early | bits | KL, search | KL, held out | 99 % |",
        "|:--|--:|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for one in outcomes:
        start = f"| {one['model']} | {one['budget']:g} | {one['search']} | {one['evaluations']} | {one['stopped']} |"
        if "kl" not in one:
            lines.append(f"{start} - | - | - | - |")
            continue
        kl = np.array(one["kl"])
        lines.append(f"{start} {one['bits']:.3f} | {one['search_kl']:.4g} | {kl.mean():.4g} ±{standard_error(kl):.2g} "
                     f"| {one['p99']:.3g} |")  # fmt: skip
    rows = verdicts(outcomes)
    worse = sum(row["difference"] > 2 * row["error"] for row in rows)
    better = sum(row["difference"] < -2 * row["error"] for row in rows)
    lines += [
        "",
        "## Against the best baseline of each line",
        "",
        f"In {len(rows)} cases the adaptive search is better by more than two paired errors in {better}, and worse in",
        f"{worse}. The baseline is the one that is best on the held-out windows.",
        "",
        "| model | budget, bits | best baseline | difference of KL | paired error | verdict |",
        "|:--|--:|:--|--:|--:|:--|",
    ]
    for row in rows:
        gap, clear = row["difference"], 2 * row["error"]
        verdict = "equal" if not gap else "better" if gap < -clear else "worse" if gap > clear else "not decided"
        lines.append(f"| {row['model']} | {row['budget']:g} | {row['baseline']} | {row['difference']:+.3g} "
                     f"| {row['error']:.2g} | {verdict} |")  # fmt: skip
    machines = sorted({one["machine"] for one in outcomes})
    return "\n".join([*lines, "", f"Measured on {', '.join(machines)}.", ""])


if __name__ == "__main__":
    raise SystemExit(main())
