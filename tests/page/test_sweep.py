"""A sweep on the page: all its jobs, with their states, whether they have a run or not."""

from __future__ import annotations

import json
import os

import pytest

from experiments.page.made import row, run_id, write_made_run
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
    stores = [write_made_run(results / "runs", number) for number in (1, 2)]
    write_made_run(results / "runs", 5)  # of another sweep
    folder = write_sweep(results, stores)
    going = write_made_run(results / "runs", 3, unfinished=True)
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
    folder = write_sweep(results, [write_made_run(results / "runs", 1)])
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
    put(folder, 2, metrics=write_made_run(results / "runs", 2, rows=[row(0, 1.0)]).metrics())
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


def test_texts_of_a_sweep_have_their_lengths(results):
    name = "n" * 121
    job = sweeps.Job(number=0, overrides=("x" * 1182,), label="l" * 161)
    longer = sweeps.Job(number=1, overrides=("x" * 1183,), label="l" * 160)
    more = {"id": name, "created": "c" * 41, "launcher": "k" * 41, "jobs": (job, longer)}
    data = FollowedSweep(Sweep.open(write_sweep(results, [], **more))).data()
    half = {"id": 57, "created": 17, "launcher": 17}  # of a text that is cut, before and after the dots
    assert {key: data[key] for key in half} == {
        key: f"{more[key][0] * n} ... {more[key][0] * n}" for key, n in half.items()
    }
    shown = {entry[0]: entry for entry in data["jobs"]}
    assert shown[1][1] == "l" * 77 + " ... " + "l" * 77 and shown[2][1] == "l" * 160
    assert len(shown[1][5]) == 1200 and len(shown[2]) == 3, "a longer command is left out"
    exact = {**more, "id": "n" * 120, "created": "c" * 40, "launcher": "k" * 40}
    data = FollowedSweep(Sweep.open(write_sweep(results, [], "exact", **exact))).data()
    assert {key: data[key] for key in half} == {key: exact[key] for key in half}


def test_a_pair_of_which_one_run_is_gone_is_left_out(results):
    stores = [write_made_run(results / "runs", number) for number in (1, 2)]
    pairs = [(run_id(1), run_id(2)), (run_id(1), run_id(9)), (run_id(9), run_id(2))]
    shown = Report(lambda: stores, reader(), results / "runs", results, pairs=pairs)
    assert [pair["runs"] for pair in shown.data()["pairs"]] == [[run_id(1), run_id(2)]]
