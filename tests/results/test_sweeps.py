"""The files of a sweep: manifest, records of jobs, and the state of each job that follows from them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvbench.errors import KvbenchError
from kvbench.results import ranking, sweeps
from kvbench.results.sweeps import Job, Manifest, Sweep

CONFIG = {
    "model": {"name": "tiny"},
    "method": {"_target_": "kvbench.methods.kivi.Kivi", "residual": 32},
    "quantizer": {"name": "int2"},
    "dataset": {"name": "mini"},
    "decoding": {},
    "runtime": {},
}


def manifest(folder: Path, count: int = 3, **changes: object) -> Manifest:
    jobs = tuple(
        Job(number=i, overrides=("method=kivi", f"method.residual={32 * (i + 1)}"), label=f"residual={32 * (i + 1)}")
        for i in range(count)
    )
    about = {
        "id": folder.name,
        "token": "mine",
        "command": ("--multirun", "method=kivi", "method.residual=32,64,96"),
        "created": "2026-01-02T03:04:05",
        "results_dir": "results/runs",
        "launcher": "local",
        "jobs": jobs,
    }
    return Manifest(**{**about, **changes})


def put(folder: Path, number: int, status: str = "ok", **changes: object) -> None:
    metrics = {**ranking.failed(CONFIG, ""), "run_id": f"run-{number}", "status": status}
    content = {"number": number, "status": status, "overrides": [], "message": "", "sweep": "mine", "metrics": metrics}
    sweeps.job_file(folder, number).write_text(json.dumps({**content, **changes}))


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest(tmp_path).write(tmp_path)
    assert Sweep.open(tmp_path).manifest == manifest(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read"),
        ("{", "is not the manifest of a sweep"),
        ("[]", "is not the manifest of a sweep"),
        ('{"version": 1}', "is not the manifest of a sweep"),
        ('{"version": 2}', "has version 2, but this kvbench reads versions up to 1"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_one_message(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / sweeps.MANIFEST).write_text(text)
    with pytest.raises(KvbenchError, match=problem):
        Sweep.open(tmp_path)


def test_states_follow_from_the_files_of_jobs(tmp_path: Path) -> None:
    manifest(tmp_path, 8).write(tmp_path)
    put(tmp_path, 0)
    put(tmp_path, 1, "oom")
    put(tmp_path, 2, "error", message="why")
    put(tmp_path, 3, "interrupted")
    put(tmp_path, 4, sweep="another")
    running = {**sweeps.here(), "sweep": "mine", "run_id": "known"}
    sweeps.running_file(tmp_path, 5).write_text(json.dumps(running))
    sweeps.running_file(tmp_path, 6).write_text(json.dumps({**running, "pid": 2**22 + 1}))  # no such process
    sweeps.running_file(tmp_path, 7).write_text(json.dumps({**running, "host": "elsewhere"}))
    sweep = Sweep.open(tmp_path)
    states = [entry.state for entry in sweep.progress()]
    assert states == ["done", "done", "failed", "missing", "missing", "running", "missing", "running"]
    assert sweep.counts() == {"done": 2, "running": 2, "failed": 1, "missing": 3}
    assert [entry.run_id for entry in sweep.progress()][:6] == ["run-0", "run-1", "run-2", "run-3", None, "known"]
    assert sweep.progress()[2].message == "why"
    assert [run["run_id"] for run in sweep.runs()] == ["run-0", "run-1", "run-2"]
    assert sweeps.run_ids(tmp_path) == {f"run-{number}" for number in range(5)}


def test_a_sweep_is_driven_while_its_process_lives(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, manifest(tmp_path))
    assert not sweep.driven()
    (tmp_path / sweeps.DRIVER).write_text(json.dumps(sweeps.here()))
    assert sweep.driven()
    (tmp_path / sweeps.DRIVER).write_text(json.dumps({**sweeps.here(), "pid": 2**22 + os.getpid()}))
    assert not sweep.driven()


def test_the_newest_sweep_of_a_command_is_found(tmp_path: Path) -> None:
    for name, created, command in (
        ("a", "2026-01-01", ("x",)),
        ("b", "2026-01-03", ("x",)),
        ("c", "2026-01-02", ("x",)),
        ("d", "2026-01-09", ("y",)),
    ):
        (tmp_path / name).mkdir()
        manifest(tmp_path / name, created=created, command=command).write(tmp_path / name)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / sweeps.MANIFEST).write_text("{")
    sweep = sweeps.newest(tmp_path, ["x"])
    assert sweep is not None and sweep.manifest.id == "b"
    assert sweeps.newest(tmp_path, ["z"]) is None
    assert sweeps.newest(tmp_path / "none", ["x"]) is None


def test_a_sweep_is_found_by_its_id_or_the_beginning_of_it(tmp_path: Path) -> None:
    home = tmp_path / "sweeps"
    with pytest.raises(KvbenchError, match=r"there is no sweep a in [^;]*$"):
        sweeps.named_sweep(home, "a")
    for name in ("2026-01", "2026-01-b", "2027-01"):
        (home / name).mkdir(parents=True)
    (home / "2028-file").touch()
    assert sweeps.named_sweep(home, "2026-01") == home / "2026-01", "a whole id is no beginning"
    assert sweeps.named_sweep(home, "2026-01-") == home / "2026-01-b"
    assert sweeps.named_sweep(home, "2027") == home / "2027-01"
    with pytest.raises(KvbenchError, match=r"2 sweeps: 2026-01, 2026-01-b"):
        sweeps.named_sweep(home, "2026")
    for name in ("2028", "", "01"):
        with pytest.raises(KvbenchError, match="the newest one is 2027-01"):
            sweeps.named_sweep(home, name)


def test_a_sweep_elsewhere_is_named_by_its_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine"
    elsewhere.mkdir()
    with pytest.raises(KvbenchError):
        sweeps.named_sweep(tmp_path / "sweeps", str(elsewhere))
    manifest(elsewhere).write(elsewhere)
    assert sweeps.named_sweep(tmp_path / "sweeps", str(elsewhere)) == elsewhere


def test_a_sweep_is_called_by_its_id_in_the_usual_place_and_by_its_path_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in ((sweeps.SWEEPS / "s", "s"), (Path("other") / "s", str(tmp_path / "other" / "s"))):
        folder.mkdir(parents=True)
        manifest(folder).write(folder)
        assert Sweep.open(folder).name == name


@pytest.mark.parametrize(("count", "text"), [(0, "0 jobs"), (1, "1 job"), (2, "2 jobs")])
def test_jobs_in_words(count: int, text: str) -> None:
    assert sweeps.in_words(count) == text


RECORDED = {"status": "ok", "number": 3, "overrides": [], "message": ""}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"metrics": None}, ""),
        ({"sweep": "mine", "metrics": {"no": "run"}}, ""),
        ({"sweep": "other"}, "belongs to another sweep"),
        ({"metrics": {"no": "run"}}, "is not a record of a job ("),
        ({"status": None}, "is not a record of a job"),
        ({"number": "3"}, "is not a record of a job"),
        ({"overrides": ()}, "is not a record of a job"),
        ({"message": 1}, "is not a record of a job"),
    ],
)
def test_a_file_that_is_no_record_of_a_job_is_told(changes: dict[str, object], told: str) -> None:
    given = sweeps.job_record_problem({**RECORDED, **changes}, "mine")
    assert given.startswith(told) and bool(given) == bool(told) and given.endswith(")") == told.endswith("(")
    valid = {**ranking.failed(CONFIG, ""), "run_id": "a", "status": "ok"}
    assert sweeps.job_record_problem({**RECORDED, "metrics": valid}, "mine") == ""


def test_files_of_jobs_are_numbered_with_four_digits(tmp_path: Path) -> None:
    assert sweeps.job_file(tmp_path, 7) == tmp_path / "job-0007.json"
    assert sweeps.running_file(tmp_path, 12345) == tmp_path / "running-12345.json"


def test_ids_of_runs_are_those_of_whole_records(tmp_path: Path) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2, metrics=None)
    put(tmp_path, 3, metrics=[1])
    put(tmp_path, 4, metrics={"run_id": 4})
    put(tmp_path, 5)
    (tmp_path / "job-0006.json").write_text("{")
    (tmp_path / "other-0007.json").write_text(json.dumps({"metrics": {"run_id": "other"}}))
    assert sweeps.run_ids(tmp_path) == {"run-1", "run-5"}
