"""The jobs of a sweep on the terminal."""

from __future__ import annotations

import json

import pytest

from experiments.page.made import run_id, write_made_run
from kvbench.cli import report
from kvbench.results import sweeps
from tests.publish.sweep_support import TOKEN, put, write_sweep


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def test_a_sweep_is_a_table_and_its_other_jobs_are_named(results, capsys):
    write_sweep(results, [write_made_run(results / "runs", number) for number in (1, 2)])
    assert report.main(["--sweep", "tod"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("kivi int2") >= 1 and "sweep today: 4 jobs, 2 done, 1 failed, 1 not started" in printed
    assert "job 3 failed: setting 2: ValueError: a bad value" in printed
    assert "python -m kvbench --resume today" in printed


def test_a_finished_sweep_ends_well(results, capsys):
    store = write_made_run(results / "runs", 1)
    folder = write_sweep(results, [store])
    for number in (1, 2):
        put(folder, number, metrics=store.metrics())
    assert report.main(["--sweep", "today"]) == 0
    assert "3 jobs, 3 done" in capsys.readouterr().out


def test_a_sweep_is_watched_until_no_process_works_on_it(results, capsys, monkeypatch):
    store = write_made_run(results / "runs", 1)
    folder = write_sweep(results, [store])
    running = sweeps.running_file(folder, 2)
    running.write_text(json.dumps({**sweeps.here(), "sweep": TOKEN, "run_id": run_id(2)}))
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:  # at the first look after the first one, nothing has changed
            running.unlink()
            put(folder, 2, metrics=store.metrics())

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.main(["--sweep", "today", "--watch"]) == 1
    printed = capsys.readouterr().out
    assert len(looks) == 2 and printed.count("sweep today: 3 jobs") == 2
    assert "1 done, 1 running, 1 failed" in printed and "2 done, 1 failed" in printed


@pytest.mark.parametrize("arguments", [["--watch"], ["--watch", "--html"], ["--watch", "--sweep", "today", "--serve"]])
def test_watching_needs_a_sweep_alone(results, capsys, arguments):
    assert report.main(arguments) == 2
    assert "--watch: needs --sweep ID" in capsys.readouterr().err
