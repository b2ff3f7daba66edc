"""A unit of a sweep: one job, or several that share a prefill, run and recorded by one process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvbench.cli import job, plan
from kvbench.cli.job import Outcome
from kvbench.parallel import launch
from kvbench.results import ranking, sweeps, tables
from kvbench.util import atomic
from kvbench.util.progress import say

#: environment variable with the number of jobs in a sweep, for messages; inherited by the workers of a launcher
JOBS = "KVBENCH_SWEEP_JOBS"
#: the table is rewritten by a job that ends if the last rewriting took less than this share of the time since then
SHARE = 0.05

#: outcomes of the jobs that ran in this process, also those whose record could not be written
outcomes: dict[int, Outcome] = {}


def run_unit(unit: str | Sequence[tuple[int, list[str]]], folder: Path, extra: Path | None) -> str:
    """Run the job of a unit, or several jobs together over one prefill; return the status of the last one.

    Each job's outcome is recorded in the folder of the sweep as soon as it ends. The model stays loaded for the next
    unit of this process. `unit` may also be the text that :func:`kvbench.cli.plan.encoded` returned.
    """
    from kvbench.loggers import in_sweep
    from kvbench.models import shared

    jobs = plan.decoded(unit) if isinstance(unit, str) else unit
    with shared.sharing(), in_sweep(folder.name):
        if len(jobs) > 1:
            return _run_sharing_prefill(jobs, folder, extra)
        number, texts = jobs[0]
        _announce(number, texts)
        with _running(folder, number) as begun, _room([texts], extra):
            outcome = job.outcome_of_job(
                lambda: job.configuration(texts, extra), row=lambda: job.composed(texts, extra), begun=begun
            )
        _ended(folder, number, {**outcome, "overrides": texts, "number": number})
        status: str = outcome["status"]
        return status


def _run_sharing_prefill(jobs: Sequence[tuple[int, list[str]]], folder: Path, extra: Path | None) -> str:
    """Run jobs that share a prefill (arguments as in :func:`run_unit`); return the status of the last one."""
    from kvbench.runner.shared_runs import run_together

    configs: list[dict[str, Any]] = []
    places: list[tuple[int, list[str]]] = []
    status, began = "error", time.time()

    def end(number: int, texts: list[str], config: dict[str, Any] | None, result: Any) -> None:
        nonlocal status

        def act() -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        outcome = job.outcome_of(act, lambda: config, began)
        _ended(folder, number, {**outcome, "overrides": texts, "number": number})
        status = outcome["status"]

    with ExitStack() as stack:
        notes = []
        for number, texts in jobs:
            _announce(number, texts)
            try:
                config = job.composed(texts, extra)
            except Exception as error:  # as for a single job, a bug must not end the sweep
                end(number, texts, None, error)
                continue
            configs.append(config)
            places.append((number, texts))
            notes.append(stack.enter_context(_running(folder, number)))
        stack.enter_context(_room([texts for _, texts in places], extra))
        run_together(
            configs,
            lambda place, name: notes[place](name),
            lambda place, result: end(*places[place], configs[place], result),
        )
    return status


@contextmanager
def _room(jobs: Sequence[Sequence[str]], extra: Path | None) -> Iterator[None]:
    """Reserve memory of the GPU inside a ``with`` block, if other jobs of the sweep use the same GPU.

    The model is freed at the end of the block, because another job may then use its memory.
    """
    from kvbench.runner import gate

    if gate.per_gpu() == 1:
        yield
        return
    from kvbench.models import shared
    from kvbench.models.devices import homes
    from kvbench.profiling.device import identity
    from kvbench.runner.gate import peak_bytes

    needs: list[int | None] = []
    device: Any = None
    for texts in jobs:
        try:
            checked = job.configuration(texts, extra)
            needs.append(peak_bytes(checked))
            device = homes(checked.runtime)[0]
        except Exception:  # the job itself reports it
            continue
    known = identity(device) if device is not None else None
    if known is None:
        yield
        return
    name, capacity = known
    needed = max((capacity if need is None else need for need in needs), default=capacity)
    with gate.entered(name, capacity, needed, say):
        try:
            yield
        finally:
            shared.free()


def _announce(number: int, texts: Sequence[str]) -> None:
    say(f"\njob {number + 1}/{os.environ.get(JOBS, '?')}: {' '.join(texts)}")


@contextmanager
def _running(folder: Path, number: int) -> Iterator[Callable[[str], None]]:
    """Mark a job as running inside a ``with`` block; yields a function that adds the id of its run."""
    path = sweeps.running_file(folder, number)

    def note(run_id: str | None = None) -> None:
        content = {**sweeps.here(), "sweep": os.environ.get(plan.TOKEN), "run_id": run_id}
        with suppress(OSError):  # it only informs those who watch
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.replace_file(path, (json.dumps(content) + "\n").encode())

    note()
    try:
        yield note
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _ended(folder: Path, number: int, outcome: Outcome) -> None:
    """Write the outcome of a job and the table; :data:`outcomes` has the outcome too, in case writing fails."""
    outcomes[number] = outcome
    try:
        plan.record(folder, number, outcome)
    except OSError as error:
        say(
            f"job {number + 1}: its record cannot be written to {folder}: {error.strerror or error}. Its samples are "
            "in the folder of its run; the same command again records it without repeating them"
        )
        return
    if launch.rank() == 0:
        refresh(folder)


def refresh(folder: Path) -> None:
    """Rewrite the table of a sweep from the records of its jobs, unless another process does so or has just done so."""
    table, began = folder / "table.md", time.time()
    lock = FileLock(folder / ".table.lock")
    try:
        with lock.acquire(timeout=0):
            spent = _read_seconds(folder)
            with suppress(FileNotFoundError):
                if began - table.stat().st_mtime < spent / SHARE:
                    return
            rows = ranking.best_first([one["metrics"] for one in plan.outcomes(folder) if one.get("metrics")])
            if rows:
                plan.keep_table(folder, tables.runs_markdown(rows), tables.runs_csv(rows))
                (folder / ".table.seconds").write_text(f"{time.time() - began:.3f}")
    except (Timeout, OSError):  # the table is written once more when the sweep ends, which reports a full disk
        pass


def _read_seconds(folder: Path) -> float:
    try:
        return float((folder / ".table.seconds").read_text())
    except (OSError, ValueError):
        return 0.0


def forget() -> None:
    """Forget the outcomes of an earlier sweep of this process."""
    outcomes.clear()
