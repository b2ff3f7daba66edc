"""Workers of a sweep: what a unit runs in another process, how many there are, and what becomes of their results."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cli import launchers, plan, unit
from kvbench.cli.launchers import joblib_pool, ray_pool, units
from kvbench.errors import KvbenchError
from tests.cli.test_launchers import RAY, here, three

__all__ = ["here"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of a unit's jobs in this process."""
    calls: list[Any] = []

    def run_unit(value: str, folder: Path, extra: Path | None) -> str:
        calls.append((value, folder, extra))
        (folder / "job-0001.json").write_bytes(b"one")
        (folder / "other.txt").write_bytes(b"no record")
        return "oom"

    monkeypatch.setattr(unit, "run_unit", run_unit)
    return calls


def test_a_unit_runs_with_the_environment_and_modules_of_the_process_that_starts_it(
    here: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = units.units_of(["value"], here, here / "extra")
    one = units.Unit(one.value, one.folder, one.extra, one.directory, {"KVBENCH_TEST_ONLY": "7"})
    monkeypatch.setenv("KVBENCH_TEST_ONLY", "1")
    monkeypatch.setattr(sys, "path", ["a"])
    for _ in range(2):
        assert units.Execute()(one) == "oom"
        assert os.environ["KVBENCH_TEST_ONLY"] == "7" and sys.path == [str(here / "extra"), "a"]
    assert ran == [("value", here, here / "extra")] * 2
    plain = units.Unit("value", here, None, here, {})
    assert (
        units.run_recorded_unit(plain, here) == "oom" and sys.path == [str(here / "extra"), "a"] and ran[2][2] is None
    )


def test_a_unit_that_slurm_ends_is_submitted_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = SimpleNamespace(DelayedSubmission=lambda *given: given)
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(helpers=helpers))
    execute, (one, *_) = units.Execute(), three(here)
    assert execute.checkpoint(one) == (execute, one)


@pytest.mark.parametrize(
    ("launcher", "pool", "more"),
    [
        (launchers.JoblibLauncher, "joblib_pool.run_with_joblib", ()),
        (launchers.SlurmLauncher, "submitit_pool.run_with_submitit", ("slurm",)),
        (launchers.SubmititLocalLauncher, "submitit_pool.run_with_submitit", ("local",)),
        (launchers.RayLauncher, "ray_pool.run_with_ray", ()),
    ],
)
def test_each_launcher_hands_its_units_and_options_to_its_pool(
    launcher: Any, pool: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(f"kvbench.cli.launchers.{pool}", lambda *arguments: given.append(arguments))
    launcher(a=1).run(["unit"])
    assert given == [(["unit"], {"a": 1}, *more)]


@pytest.mark.parametrize(
    ("asked", "gpus", "workers"),
    [(-1, 3, 3), (2, 3, 2), (4, 3, 3), (None, 3, 3), (3, 3, 3), (-1, 0, -1), (2, 0, 2)],
)
def test_no_more_workers_than_gpus(
    here: Path, monkeypatch: pytest.MonkeyPatch, asked: Any, gpus: int, workers: int
) -> None:
    import joblib

    given: list[Any] = []

    class Parallel:
        def __init__(self, **options: Any) -> None:
            given.append(options)

        def __call__(self, tasks: Any) -> None:
            given.append([arguments for _, arguments, _ in tasks])

    names = [str(n) for n in range(gpus)]
    monkeypatch.setattr(joblib, "Parallel", Parallel)
    monkeypatch.setattr(joblib_pool, "gpus_for", lambda waiting: names)
    waiting = three(here)
    joblib_pool.run_with_joblib(waiting, {"n_jobs": asked, "verbose": 0, "backend": "threading"})
    options, tasks = given
    assert options == {"n_jobs": workers, "verbose": 0, "backend": "loky"}
    assert tasks == [(one, names) for one in waiting]


def test_gpus_that_no_variable_names_are_counted_and_each_may_have_several_workers(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joblib_pool, "has_gpu", lambda: True)
    monkeypatch.setenv(joblib_pool.GPUS, " ,")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert joblib_pool.gpus_for(three(here)) == ["0", "1"]
    monkeypatch.setattr(joblib_pool, "per_gpu", lambda: 2)
    assert joblib_pool.gpus_for(three(here)) == ["0", "0", "1", "1"]
    mixed = [*three(here, "runtime.device=cpu"), *three(here)]
    assert joblib_pool.gpus_for(mixed) == ["0", "0", "1", "1"], "some of the jobs need a GPU"
    monkeypatch.setattr(joblib_pool, "has_gpu", lambda: False)
    assert joblib_pool.gpus_for(three(here)) == []


def test_workers_of_one_gpu_hold_different_places_on_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib_pool, "_held", held := [])
    monkeypatch.setenv(joblib_pool.GPUS, "")
    folder = here / "new"
    assert [joblib_pool.bind(folder, ["3", "3", "5", "5"]) for _ in range(4)] == ["3", "3", "5", "5"]
    places = [Path(lock.lock_file).name for lock in held]
    assert places == [".gpu-3.lock", ".gpu-3-1.lock", ".gpu-5.lock", ".gpu-5-1.lock"]
    held[1].release()
    assert joblib_pool.bind(folder, ["3", "3", "5", "5"]) == "3" == os.environ[joblib_pool.GPUS]
    for lock in held:
        lock.release()


def test_a_worker_watches_its_parent_and_takes_a_gpu_once(
    here: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(joblib_pool, "_watched", False)
    monkeypatch.setattr(joblib_pool, "_held", held := [])
    monkeypatch.setattr(joblib_pool, "end_with_parent", lambda: done.append("watch"))
    monkeypatch.setattr(joblib_pool, "bind", lambda folder, gpus: held.append(1) or done.append((folder, gpus)))
    one = three(here)[0]
    assert joblib_pool._execute(one, []) == "oom" and done == ["watch"], "a worker on the CPU takes none"
    for _ in range(2):
        assert joblib_pool._execute(one, ["4"]) == "oom"
    assert done == ["watch", (here, ["4"])] and len(ran) == 3


class Ray:
    """As much of Ray as starting and leaving it takes; tasks return what they are given."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def init(self, **options: Any) -> None:
        self.asked.append(options)

    def shutdown(self) -> None:
        self.asked.append("left")

    def get(self, answer: Any) -> Any:
        return answer


COMMON = {"log_to_driver": True, "logging_level": "ERROR", "configure_logging": True}


@pytest.mark.parametrize(("asked", "processors"), [(3, 3), (1, 1), (-1, 6)])
def test_a_ray_of_this_command_has_as_many_processors_as_jobs(
    asked: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    ray = Ray()
    ray_pool._connect(ray, {**RAY, "n_jobs": asked})
    assert ray.asked == [{"address": "local", "num_cpus": processors, "include_dashboard": False, **COMMON}]


def test_a_cluster_is_asked_before_ray_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, connected = Ray(), []

    def connect(place: tuple[str, int], seconds: float) -> Any:
        connected.append((place, seconds))
        return SimpleNamespace(close=lambda: connected.append("closed"))

    monkeypatch.setattr(socket, "create_connection", connect)
    for address in ("ray://head:10001", "auto"):
        ray_pool._connect(ray, {**RAY, "address": address})
    assert connected == [(("head", 10001), 5.0), "closed"]
    assert ray.asked == [{"address": address, **COMMON} for address in ("ray://head:10001", "auto")]
    ray.init = lambda **options: (_ for _ in ()).throw(ConnectionError("\n"))  # type: ignore[method-assign]
    with pytest.raises(KvbenchError, match=r"address=auto: there is no Ray .*\(ConnectionError\)"):
        ray_pool._connect(ray, {**RAY, "address": "auto"})


def test_ray_is_left_whatever_happens(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray, worked = Ray(), []
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "1")

    class Pool:
        def __init__(self, *given: Any) -> None:
            worked.append(given)

        def work(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_pool, "_Pool", Pool)
    waiting = three(here)
    with pytest.raises(KeyboardInterrupt):
        ray_pool.run_with_ray(waiting, RAY)
    assert ray.asked[-1] == "left" and worked == [(ray, waiting, RAY)]
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0" and os.environ["RAY_DEDUP_LOGS"] == "1"
    del ray.asked[:]
    with pytest.raises(KvbenchError, match="retries"):
        ray_pool.run_with_ray(waiting, {**RAY, "retries": -1})
    assert ray.asked == [], "options are checked before Ray starts"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("n_jobs", (-1, 1)),
        ("retries", (0,)),
        ("cpus", (0, 0.5)),
        ("gpus", (0, 0.5, "auto")),
        ("shared_folder", ("auto", True)),
    ],
)
def test_options_of_ray_at_their_limits(key: str, values: tuple[Any, ...]) -> None:
    for value in values:
        ray_pool._check_ray_options({**RAY, key: value})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("n_jobs", (-2, True, 1.0)),
        ("retries", (0.5,)),
        ("cpus", (-0.5,)),
        ("gpus", (True, "one", -0.5)),
        ("shared_folder", (None,)),
    ],
)
def test_options_of_ray_beyond_their_limits(key: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(KvbenchError, match=f"hydra.launcher.{key}"):
            ray_pool._check_ray_options({**RAY, key: value})


@pytest.mark.parametrize("shared", ["no keeper", "seen", "another probe", "no probe", "not looked for"])
def test_a_task_writes_into_the_sweeps_folder_only_if_it_sees_it(
    shared: str, here: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (one, *_) = three(elsewhere)
    monkeypatch.chdir(elsewhere)

    class Mirror:
        def __init__(self, calls: Any, claim: str, folder: Path) -> None:
            asked.append((calls("write", 1, 2), claim, folder.name))

    monkeypatch.setitem(sys.modules, "ray", Ray())
    monkeypatch.setattr(ray_pool, "KeptMirror", Mirror)
    monkeypatch.setattr(ray_pool, "mirrored", lambda mirror: nullcontext())
    keeper = SimpleNamespace(write=SimpleNamespace(remote=lambda *given: {"given": given}))
    if shared in ("seen", "another probe", "not looked for"):
        (one.folder / ray_pool.PROBE).write_text("token" if shared != "another probe" else "other")
    found = ray_pool._execute(
        one, "claim", None if shared == "no keeper" else keeper, None if shared == "not looked for" else "token"
    )
    assert Path.cwd() == one.directory == here
    if shared in ("no keeper", "seen"):
        assert (found, asked, ran[0][1]) == ({}, [], elsewhere)
    else:
        assert found == {"job-0001.json": b"one"} and asked == [({"given": (1, 2)}, "claim", "runs")]
        assert ran[0][1] != elsewhere and not ran[0][1].exists(), "a folder of its own, which is gone"


def test_the_memory_of_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_pool._gpu_memory() is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = {0: SimpleNamespace(total_memory=80), 1: SimpleNamespace(total_memory=40)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert ray_pool._gpu_memory() == 80
    asked: list[Any] = []

    def remote(**options: Any) -> Any:
        asked.append(options)
        return lambda function: SimpleNamespace(remote=function)

    ray = SimpleNamespace(cluster_resources=lambda: {"GPU": 2.0}, remote=remote, get=lambda answer: answer)
    pool = ray_pool._Pool(ray, [], RAY)
    assert [pool._gpu_memory() for _ in range(2)] == [80, 80] and asked == [{"num_cpus": 0, "num_gpus": 0.01}]
    assert pool._has_gpus and not ray_pool._Pool(SimpleNamespace(cluster_resources=lambda: {}), [], RAY)._has_gpus


def test_what_a_job_needs_is_the_most_of_its_unit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(workers: Any, device: str = "cuda", **task: Any) -> Any:
        facts = {"times_only": False, "single_process": False, **task}
        return SimpleNamespace(runtime=SimpleNamespace(workers=workers, device=device), task=SimpleNamespace(**facts))

    monkeypatch.setattr(ray_pool.gate, "peak_bytes", lambda one: 460)
    one = SimpleNamespace(overrides=[["a"], ["b"]], extra=None)

    def needs(*configs: Any, gpus: Any = "auto", cpus: float = 2) -> tuple[float, float]:
        given = iter(configs)
        one.overrides = [[str(n)] for n in range(len(configs))]
        monkeypatch.setattr(ray_pool, "_checked", lambda texts, unit: next(given))
        asked = ray_pool.needs(one, True, lambda: 1000, {**RAY, "gpus": gpus, "cpus": cpus})  # type: ignore[arg-type]
        return asked["num_cpus"], asked["num_gpus"]

    assert needs(checked(1)) == (2.0, 0.5), "460 of 920 bytes that a GPU of 1000 has for jobs"
    assert needs(checked("auto")) == (2.0, 0.5) and needs(checked(1), checked(1)) == (2.0, 1.0)
    assert needs(checked(1, single_process=True)) == needs(checked(1, times_only=True)) == (2.0, 1.0)
    assert needs(checked(2), checked(3)) == (2.0, 3.0) and needs(checked(2), gpus=0.5) == (2.0, 1.0)
    assert needs(checked(4, "mps"), checked(1, "cpu")) == (8.0, 0.0) and needs(checked(4), gpus=0) == (8.0, 0)
    assert needs(None) == (2.0, 1.0) and needs(checked(1, "cpu"), None) == (2.0, 0.0)
    assert needs(checked(1, "cpu"), checked(1)) == (2.0, 1.0)


@pytest.fixture
def stored(here: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A run that a job on another machine has sent, its fp16 run, and a logger."""
    seen = SimpleNamespace(calls=[], config={"logger": {}}, place="there", deliveries={}, failed=False, folders=[])

    def run_store(folder: Path, name: str, say: Any) -> Any:
        seen.folders.append(folder)
        return SimpleNamespace(
            path=folder / name,
            run_id=name,
            config=lambda: seen.config,
            metrics=lambda: {"run_id": name, "label": "kivi"},
            deliveries=lambda: seen.deliveries,
            samples=lambda: SimpleNamespace(rows={"a": 1, "b": 2}),
            record_delivery=lambda *given: seen.calls.append(("recorded", *given)),
        )

    def load(options: Any, name: str, config: Any, label: str, say: Any, path: Path, *more: Any) -> Any:
        if seen.config["logger"] is None:
            raise KvbenchError("no such logger")
        return SimpleNamespace(
            destination=lambda: seen.place,
            begin=lambda rows: seen.calls.append(("begin", rows)),
            finish=lambda metrics: seen.calls.append(("finish", metrics["label"])),
            failed=seen.failed,
            local=False,
        )

    def composed(texts: list[str], extra: Path | None) -> dict[str, Any]:
        if texts == ["method=none"]:
            raise KvbenchError("no such method")
        return {"runtime": {"results_dir": texts[0].partition("=")[2]}}

    monkeypatch.setattr(units.job, "composed", composed)
    monkeypatch.setattr(units, "RunStore", run_store)
    monkeypatch.setattr(units.summary, "baseline", lambda store: None)
    monkeypatch.setattr(units.loggers, "load_logger", load)
    monkeypatch.setattr(units, "logger_of", lambda options: options)
    monkeypatch.setattr(units, "content_digest", lambda metrics: "digest")
    monkeypatch.setattr(units, "refresh", lambda folder: seen.calls.append(("table", folder)))
    return seen


def outcome(**more: Any) -> bytes:
    content = {"status": "ok", "number": 2, "overrides": ["runtime.results_dir=mine"], "message": "", **more}
    return json.dumps(content).encode()


def test_a_gathered_job_without_a_run_is_recorded(here: Path, stored: SimpleNamespace) -> None:
    (one, *_) = three(here / "s")
    for metrics in (None, {"run_id": None}, {"label": "x"}):
        units.keep_unit_records(one, {"job-0002.json": outcome(metrics=metrics)})
        found = plan.outcome(here / "s", 2, "token")
        assert found is not None and found["metrics"] == metrics
    assert stored.calls == [("table", here / "s")] * 3
    units.keep_unit_records(one, {})
    assert len(stored.calls) == 3


@pytest.mark.parametrize(
    "kind", ["new", "sent before", "sent with other content", "failed", "nowhere", "no configuration"]
)
def test_a_gathered_run_is_sent_once(kind: str, here: Path, stored: SimpleNamespace) -> None:
    stored.deliveries = {"sent before": {"there": "digest"}, "sent with other content": {"there": "old"}}.get(kind, {})
    stored.failed, stored.place = kind == "failed", None if kind == "nowhere" else "there"
    stored.config = None if kind == "no configuration" else stored.config
    units.keep_unit_records(three(here / "s")[0], {"job-0002.json": outcome(metrics={"run_id": "a-run"})})
    sent = [("begin", [1, 2]), ("finish", "kivi")] * (kind not in ("sent before", "no configuration"))
    recorded = [("recorded", "there", "digest", False)] * (kind in ("new", "sent with other content"))
    assert stored.calls == [*sent, *recorded, ("table", here / "s")]
    found = plan.outcome(here / "s", 2, "token")
    assert found is not None and found["metrics"]["run_dir"] == "mine/a-run" and stored.folders == [Path("mine")]


def test_a_gathered_run_with_a_wrong_logger_or_a_full_disk_is_said(
    here: Path, stored: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.config = {"logger": None}
    one = three(here / "s")[0]
    units.keep_unit_records(one, {"a": outcome(metrics={"run_id": "a-run"})})
    assert "run a-run: its logger cannot be used (no such logger)" in capsys.readouterr().err
    stored.config = {}
    units.keep_unit_records(one, {"a": outcome(metrics={"run_id": "a-run"})})
    assert "its logger cannot be used" in capsys.readouterr().err

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan, "record", full)
    units.keep_unit_records(one, {"a": outcome()})
    assert "job 3: its record cannot be written: No space left on device." in capsys.readouterr().err
    units.keep_unit_records(one, {"a": outcome(overrides=["method=none"], metrics={"run_id": "a-run"})})
    assert stored.folders[-1] == Path("results/runs"), "of a wrong configuration, the default folder"


def test_a_gathered_fp16_run_is_paired_with_its_siblings(
    here: Path, stored: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    paired: list[Any] = []
    monkeypatch.setattr(units.summary, "baseline", lambda store: "fp16")
    monkeypatch.setattr(units.summary, "pair_siblings", paired.append)
    units.keep_unit_records(three(here / "s")[0], {"a": outcome(metrics={"run_id": "a-run"})})
    assert paired == ["fp16"]
