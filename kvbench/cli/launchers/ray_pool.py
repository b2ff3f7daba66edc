"""``launcher=ray``: the jobs of a sweep on the machines of a Ray cluster, or in a Ray that the command starts here.

A job asks for processors and GPUs by the memory that its run is expected to take.

If the machines share no folder with this one, an actor on this machine (:class:`kvbench.results.keeper.Keeper`) sends
jobs the stored rows of their runs, and writes the rows that they send, one by one. A job whose process or machine is
lost is started again, and continues after the last row that has arrived here.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.cli import job
from kvbench.cli.launchers import units
from kvbench.cli.launchers.units import Unit, run_recorded_unit
from kvbench.config.run_config import RunConfig
from kvbench.errors import ConfigError, KvbenchError
from kvbench.results.keeper import Keeper, KeptMirror
from kvbench.results.mirror import mirrored
from kvbench.runner import gate
from kvbench.util.progress import say

#: shares of a GPU are multiples of 1 / PARTS, so that Ray can add them up exactly
PARTS = 20
#: part of a GPU's memory that is given away; the rest is for fragmentation and for what predictions leave out
USABLE = 0.92


def needs(unit: Unit, has_gpus: bool, memory: Callable[[], int | None], options: Mapping[str, Any]) -> dict[str, float]:
    """Return what a task of Ray asks for to run a unit: ``num_cpus`` and ``num_gpus``.

    `memory` returns the bytes of one of the cluster's GPUs, None if unknown; the options are ``hydra.launcher``.
    """
    configs = [_checked(texts, unit) for texts in unit.overrides]
    workers = max((_workers(config) for config in configs if config is not None), default=1)
    gpus = options["gpus"]
    if gpus == "auto":
        gpus = _gpus(configs, memory) if has_gpus else 0.0
    on_gpu = gpus > 0
    return {
        "num_cpus": float(options["cpus"]) * (1 if on_gpu else workers),
        "num_gpus": gpus * workers if on_gpu and workers > 1 else gpus,
    }


def fits(needs: Mapping[str, float], machines: Sequence[Mapping[str, float]]) -> bool:
    """Return True if at least one machine has the ``CPU`` and ``GPU`` that a task asks for (:func:`needs`)."""
    return any(
        needs["num_cpus"] <= machine.get("CPU", 0) and needs["num_gpus"] <= machine.get("GPU", 0)
        for machine in machines
    )


def _checked(texts: list[str], unit: Unit) -> RunConfig | None:
    """Return the configuration of a job; None if it is invalid, which the job itself reports."""
    try:
        return job.configuration(texts, unit.extra)
    except KvbenchError:
        return None


def _workers(config: RunConfig) -> int:
    return config.runtime.workers if isinstance(config.runtime.workers, int) else 1


def _gpus(configs: list[RunConfig | None], memory: Callable[[], int | None]) -> float:
    """Return the share of a GPU that holds the runs of a unit; 1 if they need a whole GPU, 0 if they run on the CPU.

    A run that measures times, or shares its GPU's prefill with other runs, gets a whole GPU.
    """
    known = [config for config in configs if config is not None]
    if known and all(config.runtime.device in ("cpu", "mps") for config in known):
        return 0.0
    if len(known) != 1 or known[0].task.times_only or known[0].task.single_process or _workers(known[0]) > 1:
        return 1.0
    predicted = gate.peak_bytes(known[0])
    total = memory() if predicted is not None else None
    if predicted is None or not total:
        return 1.0
    return min(1.0, math.ceil(predicted / (USABLE * total) * PARTS) / PARTS)


#: file in the folder of a sweep by which a worker finds out whether it sees that folder
PROBE = ".probe"
#: seconds in which the head of a cluster must answer
ANSWER_S = 5.0
#: records of a unit's jobs, by file name
Records = dict[str, bytes]


@dataclass
class _Attempt:
    """An attempt to run a unit, after `tries` lost attempts. Its jobs write their runs under the name `claim`."""

    unit: Unit
    tries: int
    claim: str


def run_with_ray(units: Sequence[Unit], options: Mapping[str, Any]) -> None:
    """Run units as tasks of Ray, and return once all have ended or were given up.

    conf/launcher/ray.yaml explains the options (``hydra.launcher``).

    Raises:
        KvbenchError: an option has a wrong value, or there is no Ray at the given address.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray would send statistics to its makers
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of different jobs may be equal
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keeps a warning about GPUs of CPU jobs away
    import ray

    _check_ray_options(options)
    _connect(ray, options)
    try:
        _Pool(ray, units, options).work()
    finally:
        ray.shutdown()


def _check_ray_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that has a wrong type or value."""
    for key, kinds, least, rule in (
        ("n_jobs", int, -1, "a whole number, 1 or greater, or -1 for one per processor"),
        ("retries", int, 0, "a whole number, 0 or greater"),
        ("cpus", (int, float), 0, "a number of processors"),
    ):
        value = options[key]
        if isinstance(value, bool) or not isinstance(value, kinds) or value < least or (key == "n_jobs" and not value):
            raise ConfigError(f"hydra.launcher.{key}", options[key], f"must be {rule}")
    if options["shared_folder"] not in ("auto", True, False):
        raise ConfigError("hydra.launcher.shared_folder", options["shared_folder"], allowed=("auto", "true", "false"))
    gpus = options["gpus"]
    if gpus != "auto" and (isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or gpus < 0):
        raise ConfigError("hydra.launcher.gpus", gpus, "must be auto or a number of GPUs per job, such as 1 or 0.5")


def _connect(ray: Any, options: Mapping[str, Any]) -> None:
    """Connect to the cluster at ``hydra.launcher.address``, or start Ray on this machine."""
    address = options["address"]
    common = {"log_to_driver": True, "logging_level": "ERROR", "configure_logging": True}
    if address is None:
        count = options["n_jobs"] if options["n_jobs"] > 0 else os.cpu_count() or 1
        ray.init(address="local", num_cpus=count, include_dashboard=False, **common)
        return
    try:
        host, _, port = str(address).removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), ANSWER_S).close()
        ray.init(address=address, **common)
    except (OSError, RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KvbenchError(
            f"hydra.launcher.address={address}: there is no Ray cluster at this address ({first}).\n"
            "  hint: start one with `ray start --head`, or leave the address out to use this machine only"
        ) from error


class _Pool:
    """The tasks of a sweep, and the actor that gathers their results."""

    def __init__(self, ray: Any, units: Sequence[Unit], options: Mapping[str, Any]) -> None:
        self._ray, self._units, self._options = ray, list(units), options
        self._attempts: dict[Any, _Attempt] = {}
        self._keeper = self._task = None
        self._has_gpus = bool(ray.cluster_resources().get("GPU"))
        self._memory: int | None = None
        self._names = (f"{uuid.uuid4().hex[:8]}-{number}" for number in itertools.count(1))

    def work(self) -> None:
        """Start a task for each unit, wait for them, and start those again whose process or machine is lost."""
        ray = self._ray
        folder = self._units[0].folder
        token = uuid.uuid4().hex
        (folder / PROBE).write_text(token)
        gathers = self._options["shared_folder"] is not True
        if gathers:
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            actor = ray.remote(num_cpus=0, scheduling_strategy=here)(Keeper)
            self._keeper = actor.remote(self._units[0].directory)
        probe = token if self._options["shared_folder"] == "auto" else None
        self._task = ray.remote(max_retries=0)(_execute)
        for unit in self._units:
            self._start(_Attempt(unit, 0, next(self._names)), probe)
        try:
            while self._attempts:
                for reference in ray.wait(list(self._attempts), num_returns=1)[0]:
                    self._ended(reference, self._attempts.pop(reference), probe)
        finally:
            (folder / PROBE).unlink(missing_ok=True)

    def _gpu_memory(self) -> int | None:
        """Return the memory in bytes of one of the cluster's GPUs, which are assumed to be alike; asks only once."""
        if self._memory is None:
            self._memory = self._ray.get(self._ray.remote(num_cpus=0, num_gpus=0.01)(_gpu_memory).remote())
        return self._memory

    def _start(self, attempt: _Attempt, probe: str | None) -> None:
        assert self._task is not None
        asked = needs(attempt.unit, self._has_gpus, self._gpu_memory, self._options)
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not attempt.tries and not fits(asked, machines):
            job = (
                f"job {attempt.unit.numbers[0] + 1} asks for {asked['num_cpus']:g} CPUs and {asked['num_gpus']:g} GPUs"
            )
            if self._options["address"] is None:
                say(f"{job}, which Ray does not have here; not started. See hydra.launcher.n_jobs, cpus and gpus")
                return
            say(f"{job}, which no machine of the cluster has; it waits for one that has them")
        task = self._task.options(**asked)
        self._attempts[task.remote(attempt.unit, attempt.claim, self._keeper, probe)] = attempt

    def _ended(self, reference: Any, attempt: _Attempt, probe: str | None) -> None:
        """Record the outcome of a task that has ended; start its unit again if its process or machine is lost."""
        ray, unit = self._ray, attempt.unit
        try:
            records: Records = ray.get(reference)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            if self._keeper is not None:
                ray.get(self._keeper.withdraw.remote(attempt.claim))
            reason = (str(error).strip().splitlines() or [""])[0]
            number, tries = unit.numbers[0] + 1, attempt.tries + 1
            if tries > self._options["retries"]:
                say(f"job {number} is given up after {tries} attempts: {type(error).__name__}: {reason}")
                return
            say(f"job {number} was lost ({type(error).__name__}) and is started again: {reason}")
            self._start(_Attempt(unit, tries, next(self._names)), probe)
            return
        units.keep_unit_records(unit, records)


def _execute(unit: Unit, claim: str, keeper: Any, probe: str | None) -> Records:
    """Run a unit in a task of Ray, and return its jobs' records if the task does not see the folder of the sweep.

    Args:
        claim: name of this attempt.
        keeper: the actor that gathers results; None if the machines share a folder.
        probe: content of a file in the folder of the sweep, by which a shared folder is recognised; None: the
            folder is taken not to be shared.
    """
    import ray

    if unit.directory.is_dir():
        os.chdir(unit.directory)
    if keeper is None or (probe is not None and _seen(unit.folder, probe)):
        run_recorded_unit(unit, unit.folder)
        return {}
    with tempfile.TemporaryDirectory(prefix="kvbench-") as scratch:
        records = Path(scratch) / "sweep"
        records.mkdir()

        def calls(name: str, *arguments: Any) -> dict[str, Any]:
            answer: dict[str, Any] = ray.get(getattr(keeper, name).remote(*arguments))
            return answer

        with mirrored(KeptMirror(calls, claim, Path(scratch) / "runs")):
            run_recorded_unit(unit, records)
        return {path.name: path.read_bytes() for path in sorted(records.glob("job-*.json"))}


def _gpu_memory() -> int | None:
    """Return the memory in bytes of the first GPU of this process, which is a task of Ray; None without a GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _seen(folder: Path, probe: str) -> bool:
    try:
        return (folder / PROBE).read_text() == probe
    except OSError:
        return False
