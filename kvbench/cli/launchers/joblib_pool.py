"""``launcher=joblib``: the jobs of a sweep in worker processes of this machine, each with its own GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvbench.cli.launchers.units import RETRIES, Execute, Unit, end_with_parent, unfinished
from kvbench.errors import ConfigError
from kvbench.runner.gate import per_gpu
from kvbench.util.progress import say
from kvbench.util.requirements import has_gpu

#: environment variable with the GPUs that a process may use
GPUS = "CUDA_VISIBLE_DEVICES"

#: lock of the GPU of this process, which it holds until it ends
_held: list[FileLock] = []
#: True once this process ends with its parent
_watched = False


def run_with_joblib(units: Sequence[Unit], options: Mapping[str, Any]) -> None:
    """Run units in worker processes. If a worker dies, all are started again, with the units that have not ended.

    The options, ``hydra.launcher``, are arguments of ``joblib.Parallel``.

    Raises:
        ConfigError: ``n_jobs`` is not a number of processes.
    """
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import BrokenProcessPool

    number = options.get("n_jobs")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not number):
        raise ConfigError(
            "hydra.launcher.n_jobs",
            number,
            "must be a whole number, 1 or greater, or -1 for one per GPU or processor",
            hint="hydra.launcher.n_jobs=2",
        )
    gpus = gpus_for(units)
    arguments = {**options, "backend": "loky"}
    if gpus:
        wanted = int(arguments.get("n_jobs") or -1)
        arguments["n_jobs"] = min(wanted, len(gpus)) if wanted > 0 else len(gpus)
    waiting, tries = list(units), 0
    while waiting:
        try:
            Parallel(**arguments)(delayed(_execute)(unit, gpus) for unit in waiting)
            return
        except BrokenProcessPool:
            before, waiting = len(waiting), unfinished(waiting)
            tries = 0 if len(waiting) < before else tries + 1
            if tries > RETRIES:
                say(f"{len(waiting)} units are given up: their worker processes died {tries} times")
                return
            say(f"a worker process died; {len(waiting)} of {len(units)} jobs are started again or continued")


def gpus_for(units: Sequence[Unit]) -> list[str]:
    """Return the GPU of each worker that this machine can serve; empty for workers on the CPU.

    A GPU is named several times if it is to have several workers (:mod:`kvbench.runner.gate`).
    """
    texts = [set(texts) for unit in units for texts in unit.overrides]
    if not has_gpu() or all("runtime.device=cpu" in one for one in texts):
        return []
    if any(text.startswith("runtime.device_map=auto") for one in texts for text in one):
        return []  # a job that spreads its model needs all of them
    names = [name for name in os.environ.get(GPUS, "").split(",") if name.strip()]
    if not names:
        import torch

        names = [str(index) for index in range(torch.cuda.device_count())]
    return [name for name in names for _ in range(per_gpu())]


def _execute(unit: Unit, gpus: Sequence[str]) -> str:
    global _watched
    if not _watched:
        _watched = True
        end_with_parent()
    if gpus and not _held:
        bind(unit.folder, gpus)
    return Execute()(unit)


def bind(folder: Path, gpus: Sequence[str]) -> str:
    """Reserve an entry of `gpus` for this process, by a lock in the sweep's folder, and return it: the name of a GPU.

    The entry is reserved until the process ends. The process must not have used CUDA before. There must be an entry for
    each process of the sweep; a GPU that several processes share has several.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        for place, name in enumerate(gpus):
            again = gpus[:place].count(name)
            lock = FileLock(folder / f".gpu-{name}{f'-{again}' if again else ''}.lock", thread_local=False)
            try:
                lock.acquire(timeout=0.05)
            except Timeout:
                continue
            _held.append(lock)
            os.environ[GPUS] = name
            return name
