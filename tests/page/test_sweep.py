"""A sweep on the page: all its jobs, with their states, whether they have a run or not."""

from __future__ import annotations

import json
import os

import pytest

from experiments.page.made import row, run_id, write
from kvbench.cli import report
from kvbench.cli.report_page import reader
from kvbench.page.data import Report
from kvbench.page.sweep import FollowedSweep
from kvbench.results import sweeps
from kvbench.results.store import find_runs
from kvbench.results.sweeps import Sweep
from tests.page.report_support import data_of
from tests.publish.sweep_support import TOKEN, put, write_sweep


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def built(results, *arguments):
    file = results / "report.html"
    assert report.main(["--html", str(file), *arguments]) == 0
    return data_of(file.read_text())


def test_all_jobs_are_shown_with_their_states(results, capsys, monkeypatch):
    stores = [write(results / "runs", number) for number in (1, 2)]
    write(results / "runs", 5)  # of another sweep
    folder = write_sweep(results, stores)
    going = write(results / "runs", 3, unfinished=True)
    sweeps.running_file(folder, 3).write_text(json.dumps({**sweeps.here(), "sweep": TOKEN, "run_id": going.run_id}))
    monkeypatch.chdir(results.parent)
    data = built(results, "--sweep", "tod")
    assert {run["id"] for run in data["runs"]} == {run_id(1), run_id(2), run_id(3)}
    shown = data["sweep"]
    assert shown["command"] == "python -m kvbench --multirun method=kivi method.residual=32,64"
    assert data["runs"][0]["command"].startswith("python -m kvbench model=tiny")
    assert [job[2] for job in shown["jobs"]] == ["done", "done", "failed", "running"]
    command = "python -m kvbench method=kivi method.residual=32"
    assert shown["jobs"][0] == [1, "setting 0", "done", run_id(1), "ok", command]
    assert shown["jobs"][2][3:5] == [None, "error"] and shown["jobs"][2][6] == "ValueError: a bad value"
    assert shown["jobs"][3][3] == going.run_id and shown["driven"] is False


def test_a_sweep_without_a_run_is_shown(results, capsys):
    write_sweep(results, [])
    data = built(results, "--results", str(results / "runs"), "--sweep", "today")
    assert data["runs"] == [] and [job[2] for job in data["sweep"]["jobs"]] == ["failed", "missing"]
    assert report.main(["--results", str(results / "runs"), "--figures", "x", "--sweep", "today"]) == 1
    assert "no finished job of the sweep today has a run" in capsys.readouterr().err


def test_a_damaged_manifest_is_named(results, capsys):
    folder = write_sweep(results, [])
    (folder / sweeps.MANIFEST).write_text("{")
    assert report.main(["--results", str(results / "runs"), "--html", "x.html", "--sweep", "today"]) == 1
    assert "is not the manifest of a sweep" in capsys.readouterr().err


def test_the_page_follows_the_jobs(results):
    folder = write_sweep(results, [write(results / "runs", 1)])
    followed = FollowedSweep(Sweep.open(folder))
    shown = Report(lambda: find_runs(results / "runs"), reader(), results / "runs", results, sweep=followed)
    before = shown.signature()
    assert shown.signature() == before
    job = {**sweeps.here(), "sweep": TOKEN, "run_id": run_id(2)}
    sweeps.running_file(folder, 2).write_text(json.dumps(job))
    during = shown.signature()
    assert during != before and followed.run_ids() == {run_id(1), run_id(2)}
    assert shown.data()["sweep"]["jobs"][2][2] == "running"
    os.unlink(sweeps.running_file(folder, 2))
    put(folder, 2, metrics=write(results / "runs", 2, rows=[row(0, 1.0)]).metrics())
    assert shown.signature() != during
    data = shown.data()
    assert data["sweep"]["jobs"][2][2] == "done" and len(data["runs"]) == 2


def test_messages_are_shortened_and_commands_are_whole_or_left_out(results):
    folder = write_sweep(results, [], command=("x=[1,2]", "y" * 10_000))
    put(folder, 0, status="error", message=f"{'y' * 10_000}\nmore")
    data = FollowedSweep(Sweep.open(folder)).data()
    assert data["command"].startswith("python -m kvbench 'x=[1,2]' yyy") and len(data["command"]) > 10_000
    assert len(data["jobs"][0][6]) <= 200
    longer = write_sweep(results, [], "longer", command=("x" * 30_000,))
    assert FollowedSweep(Sweep.open(longer)).data()["command"] == ""
