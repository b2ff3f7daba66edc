"""A unit of a sweep as a launcher sends it to another process, and the storage of the records that come back."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench import loggers
from kvbench.cli import job, plan
from kvbench.cli.unit import refresh
from kvbench.config.logger_config import logger_of
from kvbench.config.run_config import RuntimeConfig
from kvbench.errors import KvbenchError
from kvbench.results import summary
from kvbench.results.identity import content_digest
from kvbench.results.store import RunStore
from kvbench.util.progress import say

#: beginning of the names of environment variables that jobs get from the process that starts them
PREFIX = "KVBENCH_"
#: attempts to run a unit whose process or machine is lost, besides the first one
RETRIES = 3
#: seconds between two looks at whether the process that started a worker still runs
WATCH_S = 0.5


@dataclass(frozen=True)
class Unit:
    """Jobs of a sweep that run in one process, one after the other or together.

    Args:
        value: numbers and overrides of the jobs (:func:`kvbench.cli.plan.encoded`).
        folder: folder of the sweep, absolute.
        extra: folder given by ``--config-dir``, absolute; None if it is not given.
        directory: working folder of the process that starts the jobs.
        environment: environment variables of that process that are about kvbench.
    """

    value: str
    folder: Path
    extra: Path | None
    directory: Path
    environment: Mapping[str, str]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the jobs."""
        return [number for number, _ in plan.decoded(self.value)]

    @property
    def overrides(self) -> list[list[str]]:
        """Overrides of each job."""
        return [texts for _, texts in plan.decoded(self.value)]


def units_of(values: Sequence[str], folder: Path, extra: Path | None) -> list[Unit]:
    """Return the units of a sweep that this process starts, from `values`: the encoded jobs of each unit."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    here = Path.cwd()
    return [Unit(value, folder.absolute(), extra and extra.absolute(), here, environment) for value in values]


class Execute:
    """Callable that runs a unit in another process; submitit calls :meth:`checkpoint` if SLURM ends the job early."""

    def __call__(self, unit: Unit) -> str:
        """Run the jobs of a unit, and return the status of the last one."""
        return run_recorded_unit(unit, unit.folder)

    def checkpoint(self, unit: Unit) -> Any:
        """Ask submitit to submit the same unit again, after SLURM has ended it; it continues where it was."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, unit)


def run_recorded_unit(unit: Unit, folder: Path) -> str:
    """Run the jobs of a unit in this process, record them in `folder`, and return the status of the last one."""
    from kvbench.cli.unit import run_unit

    os.environ.update(unit.environment)
    if unit.extra is not None and str(unit.extra) not in sys.path:
        sys.path.insert(0, str(unit.extra))
    return run_unit(unit.value, folder, unit.extra)


def end_with_parent() -> None:
    """Make this process end soon after the process that started it, even if that one is killed.

    Rows that are finished are on disk; the job's run is unlocked for the command that continues the sweep.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="kvbench-parent", daemon=True).start()


def unfinished(units: Sequence[Unit]) -> list[Unit]:
    """Return the units with a job that has not recorded an outcome in the folder of the sweep."""
    token = os.environ[plan.TOKEN]
    return [unit for unit in units if any(plan.outcome(unit.folder, number, token) is None for number in unit.numbers)]


def keep_unit_records(unit: Unit, records: dict[str, bytes]) -> None:
    """Write the records of a unit's jobs to the folder of the sweep, and send their runs to their loggers.

    `records` maps file names to contents; it is empty if the jobs have written their files themselves.
    """
    for data in records.values():
        outcome: dict[str, Any] = json.loads(data)
        metrics = outcome.get("metrics") or {}
        if isinstance(metrics.get("run_id"), str):
            store = RunStore(_results_dir(unit, outcome["overrides"]), metrics["run_id"], say)
            paired = _paired(store)
            if paired is not None:
                outcome["metrics"] = {**paired, "run_dir": str(store.path)}
                _deliver(store, paired)
        try:
            plan.record(unit.folder, int(outcome["number"]), outcome)
        except OSError as error:
            say(
                f"job {outcome['number'] + 1}: its record cannot be written: {error.strerror or error}. Its samples "
                "are in the folder of its run; the same command again records it without repeating them"
            )
    if records:
        refresh(unit.folder)


def _results_dir(unit: Unit, overrides: list[str]) -> Path:
    """Return the folder of runs for a job on this machine; the job's record names the folder where the job ran."""
    try:
        return Path(job.composed(overrides, unit.extra)["runtime"]["results_dir"])
    except KvbenchError:  # an invalid configuration has no run
        return Path(RuntimeConfig().results_dir)


def _paired(store: RunStore) -> dict[str, Any] | None:
    """Return the metrics of a run, with its differences from fp16 if the fp16 run is on this machine by now."""
    fp16 = summary.baseline(store)
    if fp16 is not None:
        summary.pair_siblings(fp16)
    return store.metrics()


def _deliver(store: RunStore, metrics: dict[str, Any]) -> None:
    """Send a run to the logger that its configuration names, unless the logger has it already."""
    config = store.config()
    if config is None:
        return
    try:
        logger = loggers.load_logger(
            logger_of(config["logger"]), store.run_id, config, metrics["label"], say, store.path
        )
    except (KvbenchError, KeyError) as error:
        say(f"run {store.run_id}: its logger cannot be used ({error})")
        return
    place, digest = logger.destination(), content_digest(metrics)
    if place is not None and store.deliveries().get(place) == digest:
        return
    logger.begin(list(store.samples().rows.values()))
    logger.finish(metrics)
    place = logger.destination()
    if place is not None and not logger.failed:
        with suppress(KvbenchError):  # then it is sent once more
            store.record_delivery(place, digest, logger.local)
