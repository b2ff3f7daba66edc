"""Last steps for jobs whose results came from other machines: records, differences from fp16, loggers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench import loggers
from kvbench.cli import job, sweep
from kvbench.cli.launchers.units import Unit
from kvbench.cli.unit import refresh
from kvbench.config.logger_config import logger_of
from kvbench.config.run_config import RuntimeConfig
from kvbench.errors import KvbenchError
from kvbench.results import summary
from kvbench.results.identity import content_digest
from kvbench.results.store import RunStore
from kvbench.util.progress import say


def keep(unit: Unit, records: dict[str, bytes]) -> None:
    """Write the records of a unit's jobs to the folder of the sweep, and send their runs to their loggers.

    The records are contents by file name; none if the jobs have written them themselves.
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
            sweep.record(unit.folder, int(outcome["number"]), outcome)
        except OSError as error:
            say(
                f"job {outcome['number'] + 1}: its record cannot be written: {error.strerror or error}. Its samples "
                "are in the folder of its run; the same command again records it without repeating them"
            )
    if records:
        refresh(unit.folder)


def _results_dir(unit: Unit, overrides: list[str]) -> Path:
    """Return the folder of a job's runs on this machine; the one in its record is of the machine that ran it."""
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
        logger = loggers.load(logger_of(config["logger"]), store.run_id, config, metrics["label"], say, store.path)
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
