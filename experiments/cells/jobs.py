"""Jobs that fill the missing cells of time and memory: what to measure, how long it takes, in order of value.

A job of points is one call of ``python -m kvbench.bench memory`` at one prompt length and batch; a job of speculation
is one of ``python -m kvbench.bench speculation`` at one context, with plain decoding in it for the speed-up. Seconds
and memory are predicted by a roofline, with fixed times for loading, compiling and capturing as seen on one H200.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from experiments.cells.states import answered, places, stored_source, timed_items
from experiments.fold import forced
from experiments.fold.analytic import length
from experiments.fold.grid import Source
from experiments.fold.points import OLDER, TRITON, canonical
from experiments.item import Column, Computed, Grid
from experiments.predict import ASSUMED, GPU
from experiments.runs import RANDOM, TEXTS
from experiments.speculation import MODELS
from kvbench.bench.choices import shape_of
from kvbench.bench.prediction import Case, PredictedRow
from kvbench.config.setting import parse_setting
from kvbench.profiling.roofline import gpu_named

GIB = 2**30
#: seconds of a new model (random weights, first long prefill, first compilation), of a new setting with it (kernels),
#: of a new batch (captured and compiled again), and of any point
LOAD, SETTING, BATCH, POINT = 10.0, 3.0, 2.0, 1.5
#: seconds to compile the kernel for runs in place, which is larger than the others
IN_PLACE = 20.0
#: seconds of KVQuant's calibration, once for a model (121 and 130 for two models of 7B, on a host that was busy)
CALIBRATE = 125.0
#: measured seconds of prefill and of decode steps as multiples of the roofline's
SLOWER_PREFILL, SLOWER_STEPS = 1.6, 1.2
#: seconds of a case of speculation, without decoding: its cache, weights in 4 bits, graphs and compilation
CASE = {"plain": 5.0, "quantspec": 22.0, "kv": 18.0, "weights": 18.0, "streamingllm": 18.0, "snapkv": 18.0}
#: tokens that a case decodes: with each gamma a block, then blocks with the best
GAMMAS, BLOCKS, TOKENS = (4, 2), 3, 64


@dataclass(frozen=True)
class Job:
    """A measurement and the cells that it fills.

    Args:
        item: the items with its cells, the first of which names it.
        model: preset of the model.
        data: ``efficiency`` or ``speculation``.
        command: arguments of ``python -m kvbench.bench``.
        calibrate: arguments of ``python -m kvbench.calibrate`` that must have run before; empty: none.
        cells: number of cells that it is expected to fill, with those of larger batches where memory ends.
        again: number of cells that it measures again, which older code had filled (:func:`stale`).
        more: value of the job beyond its cells: a comparison that the paper makes rests on it.
        seconds: expected time on one H200, without loading the model.
        ends: what it is a batch of, with the batch: once memory has ended, larger batches are not tried.
    """

    item: tuple[str, ...]
    model: str
    data: str
    command: tuple[str, ...]
    calibrate: tuple[str, ...]
    cells: int
    seconds: float
    ends: tuple[str, int] | None = None
    again: int = 0
    more: int = 0

    @property
    def value(self) -> float:
        """Return what the job is worth: its cells, and half of those that it measures again."""
        return self.cells + self.again / 2 + self.more

    def as_dict(self) -> dict[str, Any]:
        """Return the job for a JSON file."""
        return asdict(self)


@dataclass(frozen=True)
class _Point:
    """A point of time and memory that several cells may show."""

    model: str
    setting: str
    prompt: int
    batch: int
    new_tokens: int
    memory_gb: float | None
    options: tuple[str, ...]


def stale(source: Source) -> bool:
    """Return True if steps of a point are slower in its file than they are now, so that others cannot stand beside it.

    They are from before the kernel for products of 2 to 16 rows, or eager, from before one that reads runs in place
    (Table V without module II), or from before the CUDA kernel read LogQuant's W = 42.
    """
    return bool(source.rows) and source.note.endswith((OLDER, "eager", TRITON))


def wanted_points() -> tuple[dict[_Point, list[str]], dict[_Point, list[str]]]:
    """Return the points that no file has, each with the item of every cell that shows it; and the stale ones."""
    missing: dict[_Point, list[str]] = defaultdict(list)
    again: dict[_Point, list[str]] = defaultdict(list)
    for item in timed_items():
        for model, row, column in places(item) if isinstance(item, Grid) else ():
            if column.figure in forced.FIGURES:
                continue
            source = stored_source(model, row, column)
            assert row.setting is not None
            at = (column.prompt, column.batch, column.new_tokens, column.memory_gb, column.options)
            point = _Point(model.preset, row.timed or row.setting, *at)
            if source is None:
                missing[point].append(item.id)
            elif stale(source):
                again[point].append(item.id)
    return missing, again


def point_jobs() -> list[Job]:
    """Return a job for each point that no file has, and for the stale ones.

    Where memory should end, only the smallest batch has all cells.
    """
    points, again = wanted_points()
    rows: dict[tuple[Any, ...], list[_Point]] = defaultdict(list)
    for point in sorted(points, key=lambda point: point.batch):
        rows[point.model, canonical(point.setting), point.prompt, point.new_tokens, point.memory_gb].append(point)
    jobs = []
    for key, own in rows.items():
        name, ended = "/".join(map(str, key)), False
        for number, point in enumerate(own):
            seconds, peak = _cost(point)
            fits = peak <= (point.memory_gb or gpu_named(GPU).memory_gib)
            filled = [point] if fits else own[number:]
            items = [item for one in filled for item in points[one]]
            if ended:  # a smaller batch should have ended memory already: tried if it did not
                items = []
            ended = ended or not fits
            jobs.append(_point_job(point, items or points[point][:1], len(items), seconds, name))
    for point, items in again.items():
        job = _point_job(point, items, 0, _cost(point)[0], "")
        if "reorder=false" in point.setting:
            job = replace(job, cells=len(items), seconds=job.seconds + IN_PLACE, more=10)
        else:
            job = replace(job, again=len(items))
        jobs.append(replace(job, ends=None))
    return jobs


def _point_job(point: _Point, items: Sequence[str], cells: int, seconds: float, name: str) -> Job:
    new = ("--new-tokens", str(point.new_tokens), "--repeats", "1")
    limit = () if point.memory_gb is None else ("--memory-limit-gb", f"{point.memory_gb:g}")
    compiled = ("--compile",) if "runtime.compile=true" in point.options else ()
    at = ("--contexts", str(point.prompt), "--batches", str(point.batch))
    return Job(
        tuple(dict.fromkeys(items)),
        point.model,
        "efficiency",
        ("memory", "--model", point.model, "--settings", point.setting, *at, *new, *limit, *compiled),
        ("--model", point.model, "--text", *TEXTS, *RANDOM, "--bits", "4")
        if point.setting.split(":")[0] == "kvquant"
        else (),
        cells,
        round(seconds, 1),
        (name, point.batch),
    )


def _cost(point: _Point) -> tuple[float, float]:
    """Return the seconds that a point should take, and its peak in GiB."""
    row = predicted(point.model, point.setting, point.prompt, point.batch, point.new_tokens)
    decoding = (point.new_tokens - 1) * row.expected_tpot_s
    reading, peak = SLOWER_PREFILL * row.ttft_s, max(row.decode_peak_bytes, row.prefill_peak_bytes) / GIB + 0.5
    room = point.memory_gb or gpu_named(GPU).memory_gib
    if peak > room:  # memory ends while the prompts are read
        return POINT + reading * room / peak, peak
    return POINT + BATCH * (point.batch > 1) + reading + SLOWER_STEPS * decoding, peak


@cache
def predicted(model: str, setting: str, prompt: int, batch: int, new_tokens: int) -> PredictedRow:
    """Return the roofline's times and bytes of a point."""
    args = Namespace(**ASSUMED, new_tokens=new_tokens)
    case = Case(shape_of(model), parse_setting(setting).load(), batch, prompt, gpu_named(GPU), args)
    return case.row(model, model, None)


def speculation_jobs() -> list[Job]:
    """Return a job for each context of a model at which speeds at a forced acceptance are missing."""
    wanted: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    names = {shape_of(name): name for name in MODELS}  # models of the same dimensions share their points

    def want(model: str, case: str, context: int, item: str) -> None:
        shared = names.setdefault(shape_of(model), model)
        wanted[shared, context][case].append(item)

    for item in timed_items():
        if isinstance(item, Computed):
            for preset in (model.preset for model in item.models):
                for context in item.options["contexts"]:
                    column = Column(length(context), "efficiency", prompt=context, batch=1)
                    for case in forced.CASES.values():
                        if not answered(forced.forced_source(preset, case, column)):
                            want(preset, case, context, item.id)
            continue
        assert isinstance(item, Grid)
        for model, row, column in places(item):
            if column.figure in forced.FIGURES and stored_source(model, row, column) is None:
                want(model.preset, forced.case_of(str(row.setting)), column.prompt, item.id)
    return [_speculation_job(model, context, cases) for (model, context), cases in wanted.items()]


def _speculation_job(model: str, context: int, cases: dict[str, list[str]]) -> Job:
    from kvbench.bench.speculation_bench import CASES

    ordered = [case for case in CASES if case in cases or case == "plain"]
    items = [item for case in ordered for item in cases.get(case, ())]
    row = predicted(model, "fp16", context, 1, 2)
    tokens = TOKENS * (len(GAMMAS) + BLOCKS + 1)
    seconds = sum(CASE[case] for case in ordered) + len(ordered) * tokens * row.expected_tpot_s
    command = ("speculation", "--points", f"{model}:1:{context}", "--cases", *ordered, "--gammas", *map(str, GAMMAS))
    command += ("--side-gammas", *map(str, GAMMAS), "--blocks", str(BLOCKS), "--tokens", str(TOKENS), "--no-auto")
    return Job(
        tuple(dict.fromkeys(items)),
        model,
        "speculation",
        command,
        (),
        len(items),
        round(seconds, 1),
    )


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs so that cells come fastest, models being loaded seldom: the best value a second, model by model.

    A model's jobs are taken from the best down, as long as the next one is worth more than loading another model.
    """
    left, ordered, current = list(jobs), list[Job](), ""
    settings: set[tuple[str, str]] = set()

    def value(job: Job) -> float:
        new = _model_and_setting(job) not in settings
        more = LOAD * (job.model != current) + (SETTING + CALIBRATE * bool(job.calibrate)) * new
        return job.value / (job.seconds + more)

    def stay(job: Job) -> float:  # what a new model costs is shared by all that its jobs fill
        if job.model == current:
            return value(job)
        own = sorted((one for one in left if one.model == job.model), key=value, reverse=True)[:10]
        return sum(one.value for one in own) / (LOAD + sum(one.seconds + SETTING / 2 for one in own))

    while left:
        best = max(left, key=lambda job: (stay(job), value(job)))
        left.remove(best)
        ordered.append(best)
        current = best.model
        settings.add(_model_and_setting(best))
    return ordered


def _model_and_setting(job: Job) -> tuple[str, str]:
    found = re.search(r"--settings (\S+)", " ".join(job.command))
    return job.model, found[1] if found else job.data


def all_jobs() -> list[Job]:
    """Return all jobs in order of value: cells a second."""
    return in_order([*point_jobs(), *speculation_jobs()])
