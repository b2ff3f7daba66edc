"""Launchers without their packages: what is started again after a loss, what a job asks for, and what is gathered."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from kvbench.cli import launchers, plan
from kvbench.cli.launchers import joblib_pool, ray_pool, submitit_pool, units
from kvbench.cli.launchers.units import Unit, units_of
from kvbench.errors import ConfigError, KvbenchError
from kvbench.results.store import RunStore
from kvbench.results.sweeps import Job
from kvbench.runner.run import answer_run
from tests.run_support import config
from tests.runner.loop_support import logger

__all__ = ["logger"]

RAY = {"n_jobs": 2, "retries": 2, "cpus": 1, "gpus": "auto", "shared_folder": False, "address": None}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plan.TOKEN, "token")
    return tmp_path


def three(folder: Path, *texts: str) -> list[Unit]:
    """Three units of one job each."""
    jobs = [Job(number=i, overrides=(f"method.residual={32 * i}", *texts), label="") for i in range(1, 4)]
    values = [plan.encoded([job]).strip("'") for job in jobs]
    return units_of(values, folder, None)


def record(unit: Unit) -> None:
    plan.record(
        unit.folder, unit.numbers[0], {"status": "ok", "number": unit.numbers[0], "overrides": [], "message": ""}
    )


def test_a_unit_has_all_that_another_process_needs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_MAX_JOBS", "7")
    unit = units_of(
        [plan.encoded([Job(number=4, overrides=("a=b c", "d=[1,2]"), label="")]).strip("'")], Path("s"), None
    )[0]
    assert unit.numbers == [4] and unit.overrides == [["a=b c", "d=[1,2]"]]
    assert unit.folder == here / "s" and unit.directory == here
    assert unit.environment["KVBENCH_MAX_JOBS"] == "7" and unit.environment[plan.TOKEN] == "token"
    assert all(name.startswith("KVBENCH_") for name in unit.environment)
    assert units.unfinished([unit]) == [unit]
    record(unit)
    assert units.unfinished([unit]) == []


def test_jobs_of_hydra_become_units(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "dataset.template='Q: {question}, a|b'"
    jobs = [[Job(number=i, overrides=("method=kivi", text), label="")] for i in range(3)]
    parsed = OverridesParser.create().parse_overrides(["launcher=joblib", plan.for_hydra(jobs)])
    seen: list[Unit] = []

    class Seen(launchers.JoblibLauncher):
        def run(self, units: Sequence[Unit]) -> None:
            seen.extend(units)

    sources = [{"provider": "main", "path": "x"}, {"provider": "command-line", "path": str(here / "extra")}]
    config = OmegaConf.create({"hydra": {"sweep": {"dir": "s"}, "runtime": {"config_sources": sources}}})
    launcher = Seen(n_jobs=2, setup=OmegaConf.create(["module load cuda"]))
    assert launcher.options == {"n_jobs": 2, "setup": ["module load cuda"]}
    launcher.setup(hydra_context=None, task_function=None, config=config)  # type: ignore[arg-type]
    returned = launcher.launch(BasicSweeper.split_arguments(parsed, None)[0], 0)
    assert [one.return_value for one in returned] == ["ok"] * 3
    assert [(unit.numbers, unit.overrides) for unit in seen] == [([i], [["method=kivi", text]]) for i in range(3)]
    assert {(unit.folder, unit.extra) for unit in seen} == {(here / "s", here / "extra")}

    def refuse(self: Any, units: Any) -> None:
        raise ConfigError("hydra.launcher.gpus", 9, "is more than there are")

    monkeypatch.setattr(Seen, "run", refuse)
    assert launcher.launch(BasicSweeper.split_arguments(parsed, None)[0], 0) == []
    assert capsys.readouterr().err == "error: hydra.launcher.gpus=9: is more than there are.\n"

    def fail(self: Any, units: Any) -> None:
        raise PermissionError(13, "Permission denied", "s/.probe")

    monkeypatch.setattr(Seen, "run", fail)
    assert launcher.launch(BasicSweeper.split_arguments(parsed, None)[0], 0) == []
    assert capsys.readouterr().err == "error: s/.probe: Permission denied\n"


def test_a_lost_job_of_submitit_is_submitted_again_and_an_interrupted_sweep_leaves_no_queue(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class UncompletedJobError(RuntimeError):
        pass

    submitted: list[list[int]] = []
    cancelled: list[int] = []
    options: dict[str, Any] = {}

    class Submitted:
        def __init__(self, unit: Unit, error: BaseException | None) -> None:
            self.unit, self.error = unit, error

        def result(self) -> str:
            if self.error is not None:
                raise self.error
            return "ok"

        def cancel(self, check: bool) -> None:
            cancelled.append(self.unit.numbers[0])

    class Executor:
        def __init__(self, **arguments: Any) -> None:
            options.update(arguments)

        def update_parameters(self, **arguments: Any) -> None:
            options.update(arguments)

        def map_array(self, call: Any, waiting: list[Unit]) -> list[Submitted]:
            submitted.append([unit.numbers[0] for unit in waiting])
            fates = {2: UncompletedJobError("Job 7 failed\nwith log")} if len(submitted) < 4 + fail else {}
            return [Submitted(unit, interrupt or fates.get(unit.numbers[0])) for unit in waiting]

    interrupt: BaseException | None = None
    fail = 0
    utils = SimpleNamespace(UncompletedJobError=UncompletedJobError)
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=Executor))
    monkeypatch.setitem(sys.modules, "submitit.core", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "submitit.core.utils", utils)
    asked = {"submitit_folder": "s/.submitit/%j", "max_num_timeout": 2, "partition": "gpu", "timeout_min": 5}
    submitit_pool.run_with_submitit(three(here), asked, "slurm")
    assert submitted == [[1, 2, 3], [2], [2], [2]]
    assert options == {
        "folder": str(here / "s/.submitit/%j"),
        "cluster": "slurm",
        "slurm_max_num_timeout": 2,
        "slurm_partition": "gpu",
        "timeout_min": 5,
    }
    assert "job 3 was lost: Job 7 failed\n" in capsys.readouterr().err and not cancelled
    submitted.clear()
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    submitit_pool.run_with_submitit(three(here), {**asked, "cpus_per_task": 2}, "local")
    assert submitted[0] == [1, 2] and submitted[-1] == [3], "two at a time"
    submitted.clear()
    fail = 9
    submitit_pool.run_with_submitit(three(here), asked, "slurm")
    assert len(submitted) == units.RETRIES + 1 and "given up after 4 attempts: job 3" in capsys.readouterr().err
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        submitit_pool.run_with_submitit(three(here), asked, "slurm")
    assert cancelled == [1, 2, 3]


def test_units_without_an_outcome_are_started_again_after_a_worker_died(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import joblib
    from joblib.externals.loky.process_executor import BrokenProcessPool

    calls: list[list[list[int]]] = []

    class Parallel:
        def __init__(self, **options: Any) -> None:
            assert options == {"n_jobs": 2, "backend": "loky"}

        def __call__(self, tasks: Any) -> None:
            waiting = [arguments[0] for _, arguments, _ in tasks]
            calls.append([unit.numbers for unit in waiting])
            if len(calls) == 1:
                record(waiting[0])
            raise BrokenProcessPool("killed")

    monkeypatch.setattr(joblib, "Parallel", Parallel)
    joblib_pool.run_with_joblib(three(here / "s", "runtime.device=cpu"), {"n_jobs": 2})
    assert calls == [[[1], [2], [3]]] + [[[2], [3]]] * (units.RETRIES + 1)
    printed = capsys.readouterr().err
    assert "a worker process died; 2 of 3 jobs are started again or continued" in printed
    assert f"2 units are given up: their worker processes died {units.RETRIES + 1} times" in printed


@pytest.mark.parametrize("number", [0, "two", 1.5])
def test_the_number_of_workers_is_checked(here: Path, number: Any) -> None:
    with pytest.raises(ConfigError, match=f"hydra.launcher.n_jobs={number}: must be a whole number"):
        joblib_pool.run_with_joblib(three(here / "s"), {"n_jobs": number})


def test_each_worker_gets_a_gpu_of_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib_pool, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert joblib_pool.gpus_for(three(here)) == ["4", "7"]
    assert joblib_pool.gpus_for(three(here, "runtime.device=cpu")) == []
    assert joblib_pool.gpus_for(three(here, "runtime.device_map=auto")) == []
    monkeypatch.setattr(joblib_pool, "_held", [])
    assert [joblib_pool.bind(here, ["4", "7"]) for _ in range(2)] == ["4", "7"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    for lock in joblib_pool._held:
        lock.release()


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "WATCH_S", 0.01)
    child = os.fork()
    if not child:
        grandchild = os.fork()
        if not grandchild:
            units.end_with_parent()
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.005)
        os._exit(0)
    os.waitpid(child, 0)
    worker, end = Path("/proc") / (tmp_path / "pid").read_text(), time.monotonic() + 20
    while worker.exists() and "Z" not in (worker / "stat").read_text().split()[2] and time.monotonic() < end:
        time.sleep(0.01)
    assert not worker.exists() or "Z" in (worker / "stat").read_text().split()[2]


class Lost(Exception):
    """Stands for Ray's error about a process or machine that is lost."""


class Ray:
    """As much of Ray as the pool uses; `fates` are what becomes of the attempts, in their order."""

    def __init__(self, fates: Sequence[Exception | dict[str, bytes]]) -> None:
        self.fates, self.started, self.withdrawn = list(fates), [], []
        self.exceptions = SimpleNamespace(RayTaskError=ZeroDivisionError, RayError=Lost)
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        )
        keeper = SimpleNamespace(withdraw=SimpleNamespace(remote=lambda claim: self.withdrawn.append(claim) or {}))
        self.actor = SimpleNamespace(remote=lambda directory: keeper)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": self.cluster_resources()}, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def remote(self, **options: Any) -> Any:
        return lambda target: self.actor if isinstance(target, type) else SimpleNamespace(options=self.task)

    def task(self, **needs: Any) -> Any:
        def remote(unit: Unit, claim: str, keeper: Any, probe: str | None) -> int:
            self.started.append((unit.numbers, claim, needs))
            return len(self.started) - 1

        return SimpleNamespace(remote=remote)

    def wait(self, references: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        if not isinstance(reference, int):
            return reference
        fate = self.fates[reference]
        if isinstance(fate, Exception):
            raise fate
        return fate


def test_a_lost_task_of_ray_is_started_again_under_another_claim_and_given_up_in_the_end(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[tuple[list[int], dict[str, bytes]]] = []
    monkeypatch.setattr(units, "keep_unit_records", lambda unit, records: kept.append((unit.numbers, records)))
    monkeypatch.setattr(ray_pool, "needs", lambda *_: {"num_cpus": 1.0, "num_gpus": 0})
    (here / "s").mkdir()
    ray: Any = Ray([Lost("a node died\nmore"), {"a": b"1"}, Lost("x"), {"b": b"2"}, Lost("y"), Lost("z")])
    ray_pool._Pool(ray, three(here / "s"), RAY).work()
    assert [numbers for numbers, _, _ in ray.started] == [[1], [2], [3], [1], [3], [3]]
    claims = [claim for _, claim, _ in ray.started]
    assert len(set(claims)) == 6 and ray.withdrawn == [claims[0], claims[2], claims[4], claims[5]]
    assert kept == [([2], {"a": b"1"}), ([1], {"b": b"2"})]
    printed = capsys.readouterr().err
    assert "job 2 was lost (Lost) and is started again: a node died\n" in printed
    assert "job 4 is given up after 3 attempts: Lost: z" in printed
    assert not (here / "s" / ray_pool.PROBE).exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_jobs": "two"}, "hydra.launcher.n_jobs=two: must be a whole number"),
        ({"gpus": -1}, "hydra.launcher.gpus=-1: must be auto or a number"),
        ({"shared_folder": "maybe"}, "hydra.launcher.shared_folder=maybe"),
        ({"cpus": True}, "must be a number of processors"),
        ({"n_jobs": 0}, "hydra.launcher.n_jobs=0: must be a whole number, 1 or greater"),
        ({"retries": -1}, "hydra.launcher.retries=-1: must be a whole number, 0 or greater"),
    ],
)
def test_options_of_ray_are_checked(wrong: dict[str, Any], message: str) -> None:
    ray_pool._check_ray_options(RAY)
    with pytest.raises(ConfigError, match=message):
        ray_pool._check_ray_options({**RAY, **wrong})


def test_a_job_that_no_machine_can_run_is_not_waited_for_in_silence(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {1: 1.0, 2: 2.5, 3: 2.0}  # the machine that runs has two processors
    monkeypatch.setattr(ray_pool, "needs", lambda unit, *_: {"num_cpus": asked[unit.numbers[0]], "num_gpus": 0.0})
    monkeypatch.setattr(units, "keep_unit_records", lambda unit, records: None)
    (here / "s").mkdir()
    ray: Any = Ray([{}, {}, {}])
    ray_pool._Pool(ray, three(here / "s"), RAY).work()
    assert [numbers for numbers, _, _ in ray.started] == [[1], [3]]
    assert "job 3 asks for 2.5 CPUs and 0 GPUs, which Ray does not have here; not started" in capsys.readouterr().err
    ray = Ray([{}, {}, {}])
    ray_pool._Pool(ray, three(here / "s"), {**RAY, "address": "auto"}).work()
    assert [numbers for numbers, _, _ in ray.started] == [[1], [2], [3]]
    assert "which no machine of the cluster has; it waits for one that has them" in capsys.readouterr().err


def test_a_gpu_and_its_processors_must_be_on_one_machine() -> None:
    machines = [{"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert ray_pool.fits({"num_cpus": 2.0, "num_gpus": 1.0}, machines)
    assert ray_pool.fits({"num_cpus": 8.0, "num_gpus": 0}, machines)
    assert not ray_pool.fits({"num_cpus": 4.0, "num_gpus": 0.5}, machines)


def test_a_cluster_that_does_not_answer_is_one_message() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(KvbenchError, match=f"address={address}: there is no Ray cluster at this address"):
            ray_pool._connect(None, {**RAY, "address": address})


def test_a_job_asks_for_the_share_of_a_gpu_that_holds_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(
        texts: Sequence[str], gpus: Any = "auto", memory: int | None = 1000, has_gpus: bool = True
    ) -> dict[str, float]:
        job = Job(number=0, overrides=tuple(texts), label="")
        (unit,) = units_of([plan.encoded([job]).strip("'")], here, None)
        return ray_pool.needs(unit, has_gpus, lambda: memory, {**RAY, "gpus": gpus})

    monkeypatch.setattr(ray_pool.gate, "peak_bytes", lambda checked: 300)
    base = ["method=fp16", "logger=none"]
    assert asked(base) == {"num_cpus": 1.0, "num_gpus": 0.35}, "300 of 920 bytes, rounded up to a twentieth"
    assert asked(base, memory=200)["num_gpus"] == 1.0, "too large: it finds out by itself"
    assert asked(base, memory=None)["num_gpus"] == 1.0
    assert asked(base, has_gpus=False)["num_gpus"] == 0.0 == asked([*base, "runtime.device=cpu"])["num_gpus"]
    assert asked(base, gpus=0.5)["num_gpus"] == 0.5
    assert asked([*base, "dataset=efficiency"])["num_gpus"] == 1.0, "times are measured"
    assert asked([*base, "runtime.workers=3", "runtime.device=cpu"]) == {"num_cpus": 3.0, "num_gpus": 0.0}
    assert asked([*base, "runtime.workers=3"])["num_gpus"] == 3.0
    assert asked([*base, "method.nothing=1"])["num_gpus"] == 1.0, "the job itself reports it"


def test_a_gathered_run_is_paired_recorded_and_logged(here: Path, logger: Any) -> None:
    runs = here / "results" / "runs"
    kivi, fp16 = (answer_run(config(runs, name)) for name in ("kivi", "fp16"))
    stale = {**kivi, "baseline": None, "run_dir": "/scratch/elsewhere"}
    RunStore(runs, kivi["run_id"]).write_metrics({key: value for key, value in stale.items() if key != "run_dir"})
    logger.calls.clear()
    outcome = {
        "status": "ok",
        "number": 2,
        "overrides": [f"runtime.results_dir={runs}"],
        "message": "",
        "metrics": stale,
    }
    (unit, *_) = three(here / "s")
    units.keep_unit_records(unit, {"job-0002.json": json.dumps(outcome).encode()})
    stored = plan.outcome(here / "s", 2, "token")
    assert stored is not None and stored["metrics"]["run_dir"] == str(runs / kivi["run_id"])
    assert stored["metrics"]["baseline"] == fp16["run_id"], "fp16 was not on the machine that ran it"
    assert [kind for kind, _ in logger.calls] == ["begin", "finish"] and len(logger.of("begin")[0]) == 4
    assert (here / "s" / "table.md").is_file()
    units.keep_unit_records(unit, {})
