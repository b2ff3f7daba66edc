"""One run on several worker processes: its rows, its file and its end are those of a single process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.config.run_config import checked_config
from kvbench.errors import CombinationError, ConfigError
from kvbench.models import devices
from kvbench.models import load as models_load
from kvbench.parallel.crew import WorkerDiedError
from kvbench.results import load, samples
from kvbench.results.samples import MEASURED, outputs
from kvbench.runner import workers
from kvbench.runner.rerun import MARK
from kvbench.runner.run import answer_run
from tests.run_files import read
from tests.run_support import ToyTask, config
from tests.runner import workers_support

ROOT = Path(__file__).parents[2]


def rows_of(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a repetition must reproduce of each row, in the order of the file."""
    content = samples.read_samples(Path(metrics["run_dir"]) / "samples.jsonl")
    assert not content.damaged
    return [outputs(row) for row in content.rows.values()]


def settings(folder: Path, count: int | str, **dataset: Any) -> dict[str, Any]:
    deadly = {"_target_": "tests.runner.workers_support.Deadly", "limit": 7, "folder": str(folder), **dataset}
    return config(folder, dataset=deadly, runtime={"workers": count, "batch_size": 2})


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a model, in this process and in workers."""
    workers_support.light(monkeypatch.setattr)
    monkeypatch.setattr(devices, "homes", lambda runtime: ["cpu"])


def compared(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert rows_of(two) == rows_of(one), "also their order"
    for key in ("run_id", "status", "scores", "mean", "samples", "kv_bytes", "attention", "errors"):
        assert two[key] == one[key], key
    lines = (Path(two["run_dir"]) / "samples.jsonl").read_bytes().splitlines()
    assert len(lines) == 7, "none is made twice"


def test_two_workers_of_which_one_is_killed_give_the_rows_of_one_process(tmp_path: Path, light: None) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "died").touch()  # kills nobody
    one, two = (answer_run(settings(tmp_path / name, n, victim="second/3")) for name, n in (("one", 1), ("two", 2)))
    assert (tmp_path / "two" / "died").exists(), "a worker was killed"
    compared(one, two)
    assert set(two["timings"]) == {"a cpu (shared by 2 workers)"}
    assert read(two["run_dir"])["env"]["devices"] == ["cpu"] * len(two["env"]["devices"])
    before = rows_of(two)
    more = answer_run(settings(tmp_path / "two", 3, limit=9))
    assert rows_of(more)[:7] == before and more["samples"]["done"] == 9, "only the missing ones are made"


def test_times_are_repeated_on_two_workers(tmp_path: Path, light: None) -> None:
    plain = settings(tmp_path, 2)
    first = answer_run(plain)
    done = answer_run({**plain, "runtime": {**plain["runtime"], "rerun": "times"}})
    assert rows_of(done) == rows_of(first) and done["scores"] == first["scores"]
    rows = samples.read_samples(Path(done["run_dir"]) / "samples.jsonl").rows.values()
    assert len({row[MEASURED].get(MARK) for row in rows}) == 1 and next(iter(rows))[MEASURED][MARK]


def test_errors_and_memory_of_a_worker_end_a_run_as_those_of_one_process(
    tmp_path: Path, light: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, status in (("memory", "oom"), ("a bad record", "error")):
        ends = []
        for count in (1, 2):
            capsys.readouterr()
            folder = tmp_path / f"{status}{count}"
            done = answer_run(settings(folder, count, victim="second/5", error=error))
            lines = capsys.readouterr().err.splitlines()
            message = next(line for line in lines if "second/5" in line or "first/4" in line)
            ends.append((done["status"], done["oom"] and done["oom"]["bytes_asked"], done["error"], message))
            assert [entry["type"] for entry in done["errors"]] == ["ValueError"] * (status == "error")
        assert ends[0] == ends[1] and ends[0][0] == status


def test_a_sample_that_kills_every_worker_is_an_error_that_keeps_the_other_rows(tmp_path: Path, light: None) -> None:
    with pytest.raises(WorkerDiedError, match="worker processes died"):
        answer_run(settings(tmp_path, 2, victim="second/5", always=True))
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    stored = read(folder)
    assert stored["status"] == "error" and "killed by signal 9" in stored["error"]
    kept = rows_of({"run_dir": folder})
    assert stored["samples"]["done"] == len(kept) < 7
    again = answer_run(settings(tmp_path, 2))
    assert again["status"] == "ok" and rows_of(again)[: len(kept)] == kept


def test_ctrl_c_ends_the_workers_and_keeps_the_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runner.workers_support", str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    rows, end = 0, time.monotonic() + 60
    while rows < 5 and time.monotonic() < end:
        time.sleep(0.02)
        rows = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("*/samples.jsonl"))
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and b"KeyboardInterrupt" in said
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    stored = read(folder)
    assert (stored["status"], stored["samples"]["done"], rows) == ("interrupted", 5, 5)
    assert len(children) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_workers_share_gpus_or_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def number(count: int | str, device: str = "auto") -> int:
        return workers.worker_count(checked_config(config(tmp_path, runtime={"workers": count, "device": device})))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(workers, "_gpu_count", lambda: 3)
    assert [number("auto"), number(2), number("auto", "cpu"), number(5, "cpu")] == [3, 2, 1, 5]
    with pytest.raises(ConfigError, match="each worker its own GPU, but this machine has 3"):
        number(4)
    assert workers.environments(2, on_cpu=False) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-a,3")
    assert workers.environments(2, on_cpu=False) == [{"CUDA_VISIBLE_DEVICES": "6"}, {"CUDA_VISIBLE_DEVICES": "GPU-a"}]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert workers.environments(2, on_cpu=True) == [{}, {}], "the user has chosen"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert workers.environments(5, on_cpu=True) == [{"OMP_NUM_THREADS": "2"}] * 5


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({"device_map": "auto"}, "whereas runtime.device_map divides one model"),
        ({"device": "cuda:1"}, "but runtime.device=cuda:1 names a single one"),
        ({"workers": 0}, "must be"),
    ],
)
def test_workers_and_what_contradicts_them(tmp_path: Path, runtime: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_config(config(tmp_path, runtime={"device": "auto", "workers": 2, **runtime}))


def test_times_of_one_process_are_not_measured_on_several(tmp_path: Path) -> None:
    efficiency = {"_target_": "kvbench.tasks.efficiency.Efficiency", "name": "efficiency"}
    with pytest.raises(CombinationError, match="which measures a single process"):
        checked_config({**config(tmp_path, runtime={"workers": 2}), "dataset": efficiency})


def test_processor_time_of_other_processes_is_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while load.cpu_seconds([child.pid]) == 0.0:
            assert child.poll() is None
        assert load.cpu_seconds([child.pid]) > 0
    finally:
        child.kill()
        child.wait()
    assert load.cpu_seconds([child.pid]) == 0.0 == load.cpu_seconds([])


@pytest.mark.slow  # starts the model three times: 15 s on two idle processors
def test_a_real_model_on_two_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "died").touch()
    one, two = (answer_run(settings(tmp_path / name, n, victim="second/3")) for name, n in (("one", 1), ("two", 2)))
    assert (tmp_path / "two" / "died").exists()
    compared(one, two)
    assert two["env"]["devices"] == ["cpu", "cpu"]


class Answering:
    """A crew that answers at once, from a worker's own code."""

    def __init__(self, answers: list[Any], facts: dict[int, Any] | None = None) -> None:
        self.asked: list[list[Any]] = []
        self.answers, self.facts, self.pids, self.stopped = answers, facts or {}, [7, 8], False

    def outcomes(self, requests: list[Any]) -> list[tuple[int, Any]]:
        self.asked.append(requests)
        return [(number, self.answers.pop(0)) for number in range(len(requests))]

    def unseen(self) -> list[tuple[Any, Any]]:
        return [(1, ["late"]), (None, ["a plan"])]

    def stop(self) -> None:
        self.stopped = True


FACTS = {
    number: {
        "device": f"cuda:{number}",
        "machine": {"device": f"GPU {number}", "dtype": "bfloat16"},
        "layout": {"devices": [f"GPU {number}"], "layout": "one device"},
    }
    for number in (1, 0)
}


def test_batches_of_the_plan_are_asked_for_and_come_back_with_their_samples() -> None:
    samples_ = list(ToyTask(limit=3).samples())
    names = [sample.id for sample in samples_]
    plan, rows, error = [[names[2]], names[:2]], [{"id": names[2]}], ValueError("bad")
    crew = Answering([plan, rows, error], FACTS)
    team = workers.Workers(crew, samples_)  # type: ignore[arg-type]
    assert team.device == "cuda:1" and team.machine.device == "GPU 1", "those of the worker that was ready first"
    assert team.order() == [names[2], *names[:2]] and team.pids == [7, 8]
    assert list(team.outcomes()) == [([samples_[2]], rows), (samples_[:2], error)]
    assert crew.asked == [[{"plan": names}], [{"rows": [names[2]]}, {"rows": names[:2]}]]
    assert team.unseen() == [(samples_[:2], ["late"])], "a plan is no batch"
    assert team.layout() == {"devices": ["GPU 0", "GPU 1"], "layout": "one device"}
    team.stop()
    assert crew.stopped
    with pytest.raises(ValueError, match="no plan"):
        workers.Workers(Answering([ValueError("no plan")], FACTS), samples_)  # type: ignore[arg-type]


def made_up(checked: Any, team: None, kind: str = "cpu") -> Any:
    session = workers_support.MadeUp()
    session.task, session.device = checked.task, torch.device(kind)  # type: ignore[assignment]
    return nullcontext(session)


@pytest.mark.parametrize(
    ("kind", "count", "shown"),
    [("cpu", 2, "a cpu (shared by 2 workers)"), ("cpu", 1, "a cpu"), ("meta", 2, "a cpu")],
)
def test_a_worker_answers_with_a_plan_and_with_rows(tmp_path: Path, kind: str, count: int, shown: str) -> None:
    plain = settings(tmp_path, 1)
    argument = {"config": plain, "count": count}
    with workers.serve(argument, 0, lambda checked, team: made_up(checked, team, kind)) as served:
        dtypes = workers_support.MadeUp.machine.dtypes()
        layout = {"devices": ["cpu"], "layout": "one device"}
        assert served.facts == {"device": kind, "machine": {"device": shown, **dtypes}, "layout": layout}
        names = [sample.id for sample in checked_config(plain).task.samples()]
        plan = served.answer({"plan": names[:5]})
        assert sorted(name for batch in plan for name in batch) == sorted(names[:5])
        assert max(map(len, plan)) == 2
        rows = served.answer({"rows": names[3:1:-1]})
        assert [row["id"] for row in rows] == names[3:1:-1]
        assert {row[MEASURED]["device"] for row in rows} == {shown}


def test_a_worker_gives_the_tokenizer_to_a_task_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(models_load, "load_tokenizer", lambda model: f"tokenizer of {model.name}")
    monkeypatch.setattr(workers_support.Deadly, "bind", lambda self, tokenizer: bound.append(tokenizer))
    for needed in (False, True):
        monkeypatch.setattr(workers_support.Deadly, "needs_tokenizer", needed, raising=False)
        with workers.serve({"config": settings(tmp_path, 1), "count": 1}, 0, made_up):
            pass
        assert bound == ["tokenizer of toy"] * needed


def test_workers_start_with_the_configuration_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    samples_ = list(ToyTask(limit=2).samples())

    def crew(*arguments: Any) -> Any:
        started.append(arguments)
        return nullcontext(Answering([[[sample.id for sample in samples_]]], FACTS))

    monkeypatch.setattr(workers, "Crew", crew)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = {**settings(tmp_path, 3), "logger": {"name": "csv", "path": str(tmp_path / "x.csv")}}
    checked = checked_config(given)
    with workers.open_workers(checked, samples_, 3) as team:
        assert team.order() == [sample.id for sample in samples_]
    ((server, argument, places),) = started
    assert server == workers.SERVER and places == [{}, {}] and argument["count"] == 2, "no more workers than samples"
    runtime = {**checked.plain["runtime"], "workers": 1}
    assert argument["config"] == {**checked.plain, "runtime": runtime, "logger": {"name": "none"}}


def test_processors_are_divided_and_empty_names_of_gpus_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers.environments(2, on_cpu=True) == [{"OMP_NUM_THREADS": "1"}] * 2
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert workers.environments(4, on_cpu=True) == [{"OMP_NUM_THREADS": "1"}] * 4
    monkeypatch.setattr(workers, "_gpu_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " ,")
    assert workers.environments(3, on_cpu=False) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setattr(workers, "_gpu_count", lambda: 0)
    assert workers.environments(1, on_cpu=False) == [{"OMP_NUM_THREADS": "3"}]


def test_gpus_are_counted_where_torch_can_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for usable, count in ((True, 4), (False, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert workers._gpu_count() == count
        checked = checked_config(config(tmp_path, runtime={"workers": "auto", "device": "auto"}))
        assert workers.worker_count(checked) == max(count, 1)
    all_ = checked_config(config(tmp_path, runtime={"workers": 4, "device": "auto"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert workers.worker_count(all_) == 4, "each has its own"
