"""kill -9 at random moments, and two processes on one run: the rows are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.results import samples
from kvbench.results.samples import outputs
from tests.kill_driver import RACE, SAMPLES

ROOT = Path(__file__).parents[2]
KILLS = 20


@pytest.fixture(scope="module")
def driven(tmp_path_factory) -> dict:
    """Return what the driver printed, with its folder and the messages of the race."""
    folder = tmp_path_factory.mktemp("driven")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_driver", str(folder), str(KILLS), "0"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    driven = json.loads(done.stdout.splitlines()[-1])
    assert driven["whole"]["status"] == "ok"
    return {**driven, "folder": folder, "messages": done.stderr.partition(f"{RACE}\n")[2]}


def rows_of(run_dir: Path | str) -> dict:
    stored = samples.read_samples(Path(run_dir) / "samples.jsonl")
    assert not stored.damaged
    return {name: outputs(row) for name, row in stored.rows.items()}


def same_metrics(one: dict, other: dict) -> None:
    for key in ("status", "run_id", "scores", "mean", "samples", "kv_bytes", "attention"):
        assert one[key] == other[key], key


@pytest.mark.slow  # 13 s
def test_killed_twenty_times_and_resumed(driven):
    undisturbed, killed = driven["whole"], driven["kill"]
    assert killed["status"] == 0
    assert sum(map(len, killed["rounds"])) == KILLS
    assert any(0 < progress < SAMPLES for kills in killed["rounds"] for progress in kills), killed
    for number, kills in enumerate(killed["rounds"]):
        assert kills == sorted(kills), "a kill lost rows that were there"
        directory = driven["folder"] / "kill" / str(number) / undisturbed["run_id"]
        assert rows_of(directory) == rows_of(undisturbed["run_dir"])
        same_metrics(json.loads((directory / "metrics.json").read_text()), undisturbed)


@pytest.mark.slow  # shares its runs with the test above
def test_two_processes_on_one_run(driven):
    undisturbed = driven["whole"]
    assert driven["race"] == [0, 0]
    assert "is working on run" in driven["messages"]
    directory = driven["folder"] / "race" / undisturbed["run_id"]
    assert rows_of(directory) == rows_of(undisturbed["run_dir"])
    assert len((directory / "samples.jsonl").read_bytes().splitlines()) == SAMPLES, "a sample was done twice"
    same_metrics(json.loads((directory / "metrics.json").read_text()), undisturbed)
