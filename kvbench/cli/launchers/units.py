"""Unit of a sweep as a launcher sends it to another process, with all that the process needs to run it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.cli import plan

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
    """Return the units of a sweep that this process starts, from the encoded jobs of each."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    here = Path.cwd()
    return [Unit(value, folder.absolute(), extra and extra.absolute(), here, environment) for value in values]


class Execute:
    """A call of a unit in another process; an object with a method that submitit calls if SLURM ends the job early."""

    def __call__(self, unit: Unit) -> str:
        """Run the jobs of a unit, and return the status of the last one."""
        return run(unit, unit.folder)

    def checkpoint(self, unit: Unit) -> Any:
        """Ask submitit to submit the same unit again, after SLURM has ended it; it continues where it was."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, unit)


def run(unit: Unit, folder: Path) -> str:
    """Run the jobs of a unit in this process, record them in `folder`, and return the status of the last one."""
    from kvbench.cli.unit import run_unit

    os.environ.update(unit.environment)
    if unit.extra is not None and str(unit.extra) not in sys.path:
        sys.path.insert(0, str(unit.extra))
    return run_unit(unit.value, folder, unit.extra)


def end_with_parent() -> None:
    """End this process soon after the one that started it, which may be killed before it can end its workers.

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
    from kvbench.cli import sweep

    token = os.environ[sweep.TOKEN]
    return [unit for unit in units if any(sweep.outcome(unit.folder, number, token) is None for number in unit.numbers)]
