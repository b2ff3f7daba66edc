"""``launcher=submitit``: jobs of a sweep as SLURM jobs; ``launcher=submitit_local``: as processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvbench.cli.launchers.units import RETRIES, Execute, Unit
from kvbench.util.progress import say

#: options that submitit takes for any kind of executor; all others have the executor's name in front
COMMON = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name"),
    "stderr_to_stdout",
)


def run_with_submitit(units: Sequence[Unit], options: Mapping[str, Any], kind: Literal["slurm", "local"]) -> None:
    """Run units as jobs of submitit. A job that is lost (its node failed, or it was killed) is submitted again.

    The options, ``hydra.launcher``, are those of Hydra's plugin for submitit. All jobs are submitted at once for
    ``slurm``. For ``local``, which would start all of them, only as many are submitted at a time as this machine has
    processors for (``cpus_per_task``).
    """
    options = dict(options)
    at_once = len(units)
    if kind == "local":
        at_once = max(1, (os.cpu_count() or 1) // (options.pop("cpus_per_task", None) or 1))
    executor = _executor(options, kind)
    for first in range(0, len(units), at_once):
        _finish(executor, list(units[first : first + at_once]))


def _finish(executor: Any, waiting: list[Unit]) -> None:
    """Submit units, and wait until all have ended or were given up."""
    from submitit.core.utils import UncompletedJobError

    for attempt in range(RETRIES + 1):
        if attempt:
            say(f"{len(waiting)} jobs were lost; submitting them again")
        jobs = executor.map_array(Execute(), waiting)
        lost = []
        try:
            for unit, job in zip(waiting, jobs, strict=True):
                try:
                    job.result()
                except UncompletedJobError as error:
                    say(f"job {unit.numbers[0] + 1} was lost: {str(error).splitlines()[0]}")
                    lost.append(unit)
        except BaseException:
            for job in jobs:  # an interrupted sweep leaves nothing in the queue
                job.cancel(check=False)
            raise
        waiting = lost
        if not waiting:
            return
    numbers = ", ".join(str(unit.numbers[0] + 1) for unit in waiting)
    say(f"given up after {RETRIES + 1} attempts: job {numbers}")


def _executor(options: Mapping[str, Any], kind: str) -> Any:
    import submitit

    options = dict(options)
    folder = options.pop("submitit_folder")
    once = {f"{kind}_{key}": options.pop(key) for key in ("max_num_timeout",) if key in options}
    executor = submitit.AutoExecutor(folder=str(Path(folder).absolute()), cluster=kind, **once)
    executor.update_parameters(**{key if key in COMMON else f"{kind}_{key}": value for key, value in options.items()})
    return executor
