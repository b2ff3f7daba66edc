"""A unit of a sweep in this process: what is recorded, who sees that it runs, and when the table is written anew."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.cli import job, plan, unit
from kvbench.errors import KvbenchError
from kvbench.models import devices, shared
from kvbench.profiling import device
from kvbench.results import sweeps
from kvbench.results.sweeps import Job
from kvbench.runner import gate, shared_runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a sweep of three jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plan.TOKEN, "token")
    monkeypatch.setenv(unit.JOBS, "3")
    unit.forget()
    yield tmp_path / "s"
    unit.forget()


def metrics(label: str = "kivi") -> dict[str, Any]:
    return {"status": "ok", "label": label, "error": None}


def records(folder: Path) -> dict[int, dict[str, Any]]:
    return {outcome["number"]: outcome for outcome in plan.outcomes(folder)}


def test_a_job_is_announced_marked_and_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def run(configure: Any, *, row: Any, begun: Any) -> dict[str, Any]:
        path = sweeps.running_file(folder, 1)
        seen.append(json.loads(path.read_text()))
        begun("a-run")
        seen.append(json.loads(path.read_text()))
        seen.append((configure(), row()))
        return {"status": "oom", "message": ""}

    monkeypatch.setattr(job, "outcome_of_job", run)
    monkeypatch.setattr(job, "configuration", lambda texts, extra: ("checked", texts, extra))
    monkeypatch.setattr(job, "composed", lambda texts, extra: ("plain", texts, extra))
    value = plan.encoded([Job(number=1, overrides=("a=1", "b=2"), label="")]).strip("'")
    assert unit.run_unit(value, folder, Path("extra")) == "oom"
    assert capsys.readouterr().err == "\njob 2/3: a=1 b=2\n"
    here = {**sweeps.here(), "sweep": "token"}
    assert seen[:2] == [{**here, "run_id": None}, {**here, "run_id": "a-run"}]
    assert seen[2] == tuple((kind, ["a=1", "b=2"], Path("extra")) for kind in ("checked", "plain"))
    assert not sweeps.running_file(folder, 1).exists()
    ended = {"status": "oom", "message": "", "overrides": ["a=1", "b=2"], "number": 1}
    assert records(folder)[1] == {**ended, "sweep": "token"} and unit.outcomes == {1: ended}
    unit.forget()
    assert unit.outcomes == {}


def test_a_mark_goes_with_its_job_also_after_an_error(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), unit._running(folder, 0):
        assert sweeps.running_file(folder, 0).exists()
        raise ZeroDivisionError
    assert not sweeps.running_file(folder, 0).exists()
    folder.rmdir()
    folder.write_text("no folder")
    with unit._running(folder, 0) as note:  # it only informs those who watch
        note("a-run")


def test_an_outcome_that_cannot_be_written_is_kept_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_text("no folder")
    unit._ended(folder, 4, {"status": "ok", "number": 4})
    assert unit.outcomes == {4: {"status": "ok", "number": 4}}
    assert capsys.readouterr().err.startswith(f"job 5: its record cannot be written to {folder}: ")


@pytest.fixture
def grouped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Jobs that share a prefill: the first one fails to compose, one of the two others while it runs."""
    seen: list[Any] = []

    def composed(texts: list[str], extra: Path | None) -> dict[str, Any]:
        if texts == ["a=wrong"]:
            raise KvbenchError("a is wrong")
        return {"texts": texts, "extra": extra}

    def run_together(configs: list[Any], begun: Any, ended: Any) -> None:
        seen.extend(configs)
        for place in range(len(configs)):
            begun(place, f"run-{place}")
        running = [json.loads(path.read_text())["run_id"] for path in sorted(folder.glob("running-*.json"))]
        seen.append(running)
        ended(0, metrics())
        ended(1, RuntimeError("a bug"))

    @contextmanager
    def room(jobs: Any, extra: Any) -> Iterator[None]:
        seen.append((jobs, extra))
        yield

    monkeypatch.setattr(job, "composed", composed)
    monkeypatch.setattr(job, "failed", lambda plain, message, code: {"status": "error", "message": message})
    monkeypatch.setattr(shared_runs, "run_together", run_together)
    monkeypatch.setattr(unit, "_room", room)
    monkeypatch.setattr(unit, "refresh", lambda folder: None)
    return seen


def test_jobs_that_share_a_prefill_have_records_of_their_own(
    folder: Path, grouped: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [(0, ["a=wrong"]), (1, ["a=1"]), (2, ["a=2"])]
    assert unit.run_unit(jobs, folder, Path("x")) == "error"
    assert grouped[0] == ([["a=1"], ["a=2"]], Path("x"))
    assert grouped[1:3] == [{"texts": [f"a={n}"], "extra": Path("x")} for n in (1, 2)]
    assert grouped[3] == ["run-0", "run-1"] and not list(folder.glob("running-*.json"))
    found = records(folder)
    assert [found[n]["status"] for n in range(3)] == ["error", "ok", "error"]
    assert [found[n]["overrides"] for n in range(3)] == [["a=wrong"], ["a=1"], ["a=2"]]
    assert found[0]["message"] == "a is wrong" and "a bug" in found[2]["message"]
    printed = capsys.readouterr().err
    assert all(f"job {n + 1}/3: {jobs[n][1][0]}" in printed for n in range(3))


def test_the_status_of_jobs_together_is_that_of_the_last(folder: Path, grouped: list[Any]) -> None:
    assert unit._run_sharing_prefill([(0, ["a=1"]), (1, ["a=2"])], folder, None) == "error"
    assert records(folder)[0]["status"] == "ok"


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU of 100 bytes for two jobs at once, of which each needs as many bytes as its override says."""
    seen: list[Any] = []

    @contextmanager
    def entered(name: str, capacity: int, needed: int, say: Any) -> Iterator[None]:
        seen.append((name, capacity, needed))
        yield
        seen.append("left")

    def configuration(texts: list[str], extra: Any) -> Any:
        if texts == ["wrong"]:
            raise KvbenchError("wrong")
        return SimpleNamespace(need=None if texts == ["unknown"] else int(texts[0]), runtime="runtime")

    monkeypatch.setattr(gate, "per_gpu", lambda: 2)
    monkeypatch.setattr(gate, "entered", entered)
    monkeypatch.setattr(job, "configuration", configuration)
    monkeypatch.setattr(gate, "peak_bytes", lambda checked: checked.need)
    monkeypatch.setattr(devices, "homes", lambda runtime: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(device, "identity", lambda home: ("card", 100) if home == "cuda:0" else None)
    monkeypatch.setattr(shared, "free", lambda: seen.append("free"))
    return seen


@pytest.mark.parametrize(
    ("jobs", "needed"),
    [
        ([["10"], ["30"], ["20"]], 30),
        ([["10"], ["unknown"]], 100),
        ([["10"], ["wrong"]], 10),
    ],
)
def test_jobs_on_one_gpu_reserve_what_the_largest_needs(reserved: list[Any], jobs: Any, needed: int) -> None:
    with unit._room(jobs, None):
        assert reserved == [("card", 100, needed)]
    assert reserved[1:] == ["free", "left"], "the model's memory is then another job's"
    del reserved[:]
    with pytest.raises(ZeroDivisionError), unit._room(jobs, None):
        raise ZeroDivisionError
    assert "free" in reserved


def test_nothing_is_reserved_for_a_single_worker_or_without_a_gpu(
    reserved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with unit._room([["wrong"]], None):
        assert reserved == []
    with monkeypatch.context() as patch:
        patch.setattr(device, "identity", lambda home: None)
        with unit._room([["10"]], None):
            assert reserved == []
    monkeypatch.setattr(gate, "per_gpu", lambda: 1)
    with unit._room([["10"]], None):
        pass
    assert reserved == []


@pytest.mark.parametrize(("seconds", "written"), [("1.0", True), ("6.0", False), ("damaged", True), (None, True)])
def test_the_table_takes_at_most_a_twentieth_of_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: str | None, written: bool
) -> None:
    """It is 100 seconds old: after a rewriting of one second, 20 seconds had to pass; of six seconds, 120."""
    folder.mkdir()
    monkeypatch.setattr(unit.ranking, "best_first", lambda rows: rows)
    monkeypatch.setattr(unit.tables, "runs_markdown", lambda rows: f"{len(rows)} rows")
    monkeypatch.setattr(unit.tables, "runs_csv", lambda rows: "csv")
    now = unit.time.time()
    unit.refresh(folder)
    assert not (folder / "table.md").exists(), "no row, no table"
    for number in range(2):
        plan.record(
            folder,
            number,
            {"status": "ok", "number": number, "overrides": [], "message": ""}
            | ({"metrics": metrics()} if number else {}),
        )
    (folder / "table.md").write_text("old")
    os.utime(folder / "table.md", (now - 100, now - 100))
    if seconds is not None:
        (folder / ".table.seconds").write_text(seconds)
    unit.refresh(folder)
    assert (folder / "table.md").read_text() == ("1 rows" if written else "old")
    assert (folder / "table.csv").exists() == written
    if written:
        assert 0 <= float((folder / ".table.seconds").read_text()) < 60


def test_a_table_that_another_process_writes_is_left_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    plan.record(folder, 0, {"status": "ok", "number": 0, "overrides": [], "message": "", "metrics": metrics()})
    monkeypatch.setattr(unit.tables, "runs_markdown", lambda rows: "rows")
    monkeypatch.setattr(unit.tables, "runs_csv", lambda rows: "csv")
    monkeypatch.setattr(unit.ranking, "best_first", lambda rows: rows)
    with unit.FileLock(folder / ".table.lock"):
        unit.refresh(folder)
        assert not (folder / "table.md").exists()
    unit.refresh(folder)
    assert (folder / "table.md").read_text() == "rows"


@pytest.mark.parametrize(("rank", "written"), [(0, True), (1, False)])
def test_one_of_several_processes_writes_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, written: bool
) -> None:
    called: list[Path] = []
    monkeypatch.setattr(unit.launch, "rank", lambda: rank)
    monkeypatch.setattr(unit, "refresh", called.append)
    unit._ended(folder, 0, {"status": "ok", "number": 0})
    assert called == [folder] * written


def test_a_thousand_sweeps_of_one_second_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Second:
        @staticmethod
        def now() -> Any:
            return SimpleNamespace(strftime=lambda form: "t")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "datetime", Second)
    assert [plan.new_folder().name for _ in range(3)] == ["t", "t_2", "t_3"]
    taken: list[str] = []

    class Taken:
        def __truediv__(self, name: str) -> Any:
            def mkdir(parents: bool) -> None:
                taken.append(name)
                raise FileExistsError

            return SimpleNamespace(mkdir=mkdir, is_dir=lambda: True)

    with monkeypatch.context() as patch:
        patch.setattr(plan, "SWEEPS", Taken())
        with pytest.raises(KvbenchError, match="a thousand sweeps with the name"):
            plan.new_folder()
    assert taken == ["t", *(f"t_{number}" for number in range(2, 1000))]
    monkeypatch.setattr(plan, "SWEEPS", tmp_path / "file" / "sweeps")
    (tmp_path / "file").write_text("")
    with pytest.raises(KvbenchError, match="cannot be created"):
        plan.new_folder()
    monkeypatch.setattr(plan, "SWEEPS", tmp_path / "file")
    with pytest.raises(KvbenchError, match="cannot be created"):
        plan.new_folder()


def test_records_and_tables_are_written_where_they_are_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of another sweep, and damaged ones, are said and skipped; jobs come in the order of their numbers."""
    for number in (10, 2):
        plan.record(folder, number, {"status": "ok", "number": number, "overrides": [], "message": ""})
    (folder / "job-0003.json").write_text("{")
    (folder / "job-0004.json").write_text("[]")
    (folder / "job-0005.json").write_text(json.dumps({"status": "ok", "number": 5, "sweep": "other"}))
    (folder / "job-0006.json").mkdir()
    said: list[str] = []
    assert [outcome["number"] for outcome in plan.outcomes(folder, said.append)] == [2, 10]
    assert len(said) == 4 and "is not JSON; skipped" in said[0] and "is not a record of a job" in said[1]
    assert "cannot be read (Is a directory)" in said[3]
    assert plan.outcome(folder, 2, "token") == records(folder)[2] and plan.outcome(folder, 2, "other") is None
    assert plan.outcome(folder, 3, "token") is None and plan.outcome(folder, 7, "token") is None
    path = plan.keep_table(folder / "more", "markdown", "csv")
    assert path.name == "table.md" and path.read_text() == "markdown"
    assert (folder / "more" / "table.csv").read_text() == "csv"
    plan.begin()
    first = os.environ[plan.TOKEN]
    plan.begin()
    assert len(first) == 32 and os.environ[plan.TOKEN] != first
