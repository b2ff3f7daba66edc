"""Processor time of samples of the papers' items: ``python -m experiments.real time`` (:mod:`experiments.real.costs`).

The run in the middle of each class (of QuantSpec's γ, or the sizes of LogQuant's windows) is begun in a fresh folder,
in a process with one thread, and left after ``--samples`` of its samples.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments import session
from experiments.data import Plan
from experiments.item import Computed, Item
from experiments.measured import Folded, keep_measured_table
from experiments.place import choice
from experiments.real.costs import FILE, MEASURED, SHORT, counts_of, key_of, reckoned, sources_of, time_markdown
from experiments.real.floors import bound_task
from experiments.real.plan import PARTS, plan_of
from experiments.registry import chosen_items
from experiments.runs import Run, composed, identify
from experiments.stored import as_json, content
from kvbench.config.run_config import checked_config
from kvbench.errors import DataError, KvbenchError
from kvbench.results.environment import environment
from kvbench.util import atomic

#: rows of each set in items that the plan has no time for on two cores, as they were measured on GPUs
ROWS = {"cocktail": 12, "logquant": 10}
#: what follows the data of runs that compare with fp16's answers
KL = ", KL"
Class = Mapping[str, Any]
#: runs of an item by class
Groups = Mapping[str, list[Run]]


def data_name(run: Run) -> str:
    """Return the data of a run in short: data set, task, length, and what is measured where that is no score."""
    given = run.given
    task, length = (given.get(key, "").strip("[]") for key in ("dataset.tasks", "dataset.lengths"))
    name = given.get("dataset.over", given["dataset"])
    kind = KL if "dataset.over" in given else ""
    return f"{name}{'/' + task if task else ''}{'@' + length if length else ''}{kind}"


def method_name(run: Run) -> str:
    """Return the method of a run, and QuantSpec's draft where it is another's."""
    return " ".join(filter(None, (run.given["method"], run.given.get("method.draft"))))


def timed_run(run: Run, number: int, before: Run | None = None) -> Class:
    """Return the processor seconds of a run's beginning (model, data) and of each of its first samples.

    The run is made in a fresh folder with one thread and batches of one, and left after `number` samples. `before` is
    made there first, untimed: fp16, whose answers a run of ``dataset=fidelity/answers`` compares with.
    """
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if before is not None:
            _first_samples(before, number, folder)
        return _first_samples(run, number, folder)


def _first_samples(run: Run, number: int, folder: str) -> dict[str, Any]:
    from kvbench.results.identity import run_id
    from kvbench.results.store import RunStore
    from kvbench.runner import resolve
    from kvbench.runner.run import RunSteps

    texts = [text for text in run.overrides if not text.startswith("runtime.results_dir=")]
    began = time.process_time()
    checked = checked_config(composed((*texts, f"runtime.results_dir={folder}")))
    name = run_id(resolve.material(checked))
    store = RunStore(checked.runtime.results_dir, name)
    samples: list[dict[str, Any]] = []
    with store.hold():
        steps = RunSteps(resolve.fitted(checked), store, None).steps()
        batch = next(steps)
        start = time.process_time() - began
        while True:
            batch.session._first = False  # no census of live tensors, which a run's first sample alone has
            began = time.process_time()
            rows = batch.rows()
            seconds = round(time.process_time() - began, 2)
            (row,) = rows
            samples.append({"seconds": seconds, "prompt": row["prompt_tokens"], "answer": len(row.get("tokens", ()))})
            if len(samples) == number or not batch.left:
                break
            batch = steps.send(rows)
        steps.close()
    return {"setting": " ".join(parts_of(run)[0]), "start": round(start, 2), "samples": samples}


def timed_item(item: Item, plan: Plan) -> Class:
    """Return the processor seconds of a study of attention over the plan's number of prompts, model included."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        folded = session.folded_of(item, replace(plan, runs=Path(folder)), {})
        seconds = time.process_time() - began
    if not any(cell.ours is not None for cell in folded.cells):
        raise KvbenchError(session.empty(item, folded, plan))
    return {"prompts": plan.limit, "seconds": round(seconds, 2)}


def timed_load(model: str) -> Class:
    """Return the processor seconds of loading the model."""
    import torch

    from kvbench.models.load import load_model

    torch.set_num_threads(1)
    run = Run(("method=fp16", f"model={model}", "dataset=mini", "runtime.device=cpu"), model, "mini")
    config = checked_config(composed((*run.overrides, "runtime.arithmetic=float32")))
    began = time.process_time()
    load_model(config.model, config.runtime)
    return {"seconds": round(time.process_time() - began, 2)}


def timed_imports() -> Class:
    """Return the processor seconds in which a new process imports what a run needs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import kvbench.runner.session, kvbench.models.load, torch, transformers"
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)}


def runs_here(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the runs that this machine has data, encoder and calibration for.

    Data are looked for once for all settings, and what a setting needs once for all data.
    """
    for run in runs:
        setting, data = parts_of(run)
        if identify(Run(("method=fp16", *data), run.model, run.data))[0] and _is_ready(setting, run):
            yield run


def parts_of(run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the overrides of a run's setting, and all others, of which the first names the model."""
    place = run.overrides.index(f"model={run.model}")
    return run.overrides[:place], run.overrides[place:]


_ready: dict[tuple[str, ...], bool] = {}


def _is_ready(setting: tuple[str, ...], run: Run) -> bool:
    if setting not in _ready:
        try:
            checked_config(composed(run.overrides)).method.ready()
            _ready[setting] = bool(identify(run)[0])
        except KvbenchError:
            _ready[setting] = False
    return _ready[setting]


def sample_count(run: Run) -> int:
    """Return the number of samples of a run, warm-up prompts of its data set included."""
    return _count(Run(("method=fp16", *parts_of(run)[1]), run.model, run.data))


@cache
def _count(run: Run) -> int:
    return len(list(bound_task(run).next_samples({})))


def planned_items(arguments: argparse.Namespace) -> Iterator[tuple[Item, Plan]]:
    """Yield the items of the plan, or those of ``--items``, each with its choices on two cores."""
    here = argparse.Namespace(**{**vars(arguments), "device": "cpu"})
    for part in PARTS:
        for name in part.items:
            if not arguments.items or name in arguments.items:
                number = arguments.prompts or part.laptop or ROWS[name.partition("/")[0]]
                yield chosen_items([name])[0], plan_of(here, number)


def groups_of(item: Item, plan: Plan) -> Groups:
    """Return the runs of an item that can be made here, by class."""
    groups: dict[str, list[Run]] = {}
    for run in runs_here(session.item_runs(item, plan)):
        groups.setdefault(key_of(data_name(run), method_name(run)), []).append(run)
    return groups


def jobs_of(
    items: Iterable[tuple[Item, Plan, Groups]], number: int
) -> Iterator[tuple[str, Callable[..., Class], tuple[Any, ...]]]:
    """Yield what is measured for some items, `number` samples of each class: name, function, arguments."""
    runs: dict[str, list[Run]] = {}
    for item, plan, groups in items:
        for key, own in groups.items():
            runs.setdefault(key, []).extend(own)
        if isinstance(item, Computed):
            yield item.id, timed_item, (item, replace(plan, limit=2 * number))
    wanted = {source for key in runs for source in sources_of(key)}
    for data, methods in MEASURED.items():
        for method in methods:
            key, base = key_of(data, method), key_of(data, "fp16")
            if key in wanted and key in runs:
                own = list(dict.fromkeys(runs[key]))
                first = runs[base][0] if data.endswith(KL) and key != base else None
                yield key, timed_run, (own[len(own) // 2], number * (2 if data in SHORT else 1), first)


def measure(arguments: argparse.Namespace, items: Sequence[tuple[Item, Plan, Groups]]) -> dict[str, Class]:
    """Measure what is missing below ``--runs``, ``--jobs`` at a time, and return all classes by name."""
    from joblib import Parallel, delayed

    folder = arguments.runs / "time"
    folder.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[str, Callable[..., Class], tuple[Any, ...]]] = [
        ("load", timed_load, (arguments.model,)),
        ("imports", timed_imports, ()),
    ]
    jobs += jobs_of(items, arguments.samples)
    if not arguments.fold_only:
        left = [job for job in jobs if not file_of(folder, job[0]).exists()]
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the workers
        parallel = Parallel(n_jobs=arguments.jobs, return_as="generator_unordered", pre_dispatch="all", batch_size=1)
        for name, outcome in parallel(delayed(_named)(*job) for job in left):
            print(f"{name}: {outcome}", flush=True)
            if "error" not in outcome:
                atomic.replace_file(file_of(folder, name), as_json(outcome).encode())
    paths = {name: file_of(folder, name) for name, *_ in jobs}
    return {name: content(path) for name, path in paths.items() if path.exists()}


def _named(name: str, function: Callable[..., Class], arguments: tuple[Any, ...]) -> tuple[str, Class]:
    try:
        outcome = function(*arguments)
        return name, {**outcome, "load": round(os.getloadavg()[0], 1)}
    except KvbenchError as error:
        return name, {"error": str(error).splitlines()[0]}


def file_of(folder: Path, name: str) -> Path:
    """Return the file of a class."""
    return folder / f"{''.join(sign if sign.isalnum() else '-' for sign in name)}.json"


def described(items: Iterable[tuple[Item, Plan, Groups]]) -> Iterator[dict[str, Any]]:
    """Yield the items with the runs of each class: all, those that no earlier item has, and their samples."""
    earlier: set[Run] = set()
    for item, plan, groups in items:
        parts: list[dict[str, Any]] = []
        for key, own in groups.items():
            new = len(set(own) - earlier)
            with suppress(DataError):  # texts that are all shorter than the prompts: these runs cannot be made either
                parts.append({"class": key, "runs": len(own), "new": new, "samples": sample_count(own[0])})
            earlier.update(own)
        runs = sum(part["runs"] for part in parts)
        missing = len(session.item_runs(item, plan)) - runs
        yield {"id": item.id, "n": plan.limit, "runs": runs, "not_here": missing, "groups": parts}


def machine_here() -> dict[str, Any]:
    """Return processor, versions and date of this measurement."""
    env, flags = environment("cpu"), Path("/proc/cpuinfo")
    amx = flags.exists() and "amx_tile" in flags.read_text(encoding="utf-8")
    versions = {key: env[key] for key in ("torch", "transformers", "python", "commit")}
    return {"cpu": env["cpu"], "amx": amx, "cores": os.cpu_count(), **versions, "date": time.strftime("%Y-%m-%d")}


def make_time(arguments: argparse.Namespace) -> int:
    """Measure what is missing, write ``time.json`` and its table, and return the exit status."""
    items = [(item, plan, groups_of(item, plan)) for item, plan in planned_items(arguments)]
    classes = measure(arguments, items)
    if arguments.run_only:
        return 0
    lines = [reckoned(line, classes) for line in described(items)]
    whole = {"model": arguments.model, "machine": machine_here(), "classes": classes, "items": lines}
    folded = Folded(time_markdown(whole), {FILE: as_json(whole)}, counts_of(whole))

    def before(folder: Path) -> Mapping[str, int] | None:
        path = folder / FILE
        return counts_of(content(path)) if path.exists() else None

    return keep_measured_table(folded, arguments.out / "time", choice(arguments), before, arguments.model)
