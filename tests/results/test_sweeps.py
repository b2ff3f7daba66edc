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
