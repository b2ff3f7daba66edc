"""Searches that are killed end like searches that are not; and what they reach on a grid, with many seeds."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.tune_grid import GRIDS, Replay, compared, hypervolume

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [
    *(sys.executable, "-m", "kvbench.tune", "model=tiny", "model.dtype=float32", "dataset.window=96"),
    *("dataset.prefill=64", "--bits", "5.4", "--budget", "24", "--windows", "4", "--held-out", "2", "--together", "2"),
]
KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_end_like_none(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*COMMAND, "--out", str(whole)], check=True, cwd=ROOT, capture_output=True)
    draws, done, kills = random.Random(0), 0, 0
    lines = whole.joinpath("evaluations.jsonl").read_bytes().count(b"\n")
    while kills < KILLS:
        process = subprocess.Popen(
            [*COMMAND, "--out", str(killed)], cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        store = killed / "evaluations.jsonl"
        goal = done + (lines - done) * draws.uniform(0.02, 0.2)
        while process.poll() is None and (not store.exists() or store.read_bytes().count(b"\n") < goal):
            time.sleep(0.01)
        assert process.poll() is None, "the search ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        if kills % 3 == 0:  # also one whose last line was cut
            with store.open("r+b") as handle:
                handle.truncate(store.stat().st_size - 5)
        done = store.read_bytes().count(b"\n")
    subprocess.run([*COMMAND, "--out", str(killed)], check=True, cwd=ROOT, capture_output=True)
    assert (killed / "recipe.json").read_bytes() == (whole / "recipe.json").read_bytes()
    assert (killed / "evaluations.jsonl").read_bytes() == (whole / "evaluations.jsonl").read_bytes()


def test_hypervolume_is_the_area_below_the_reference_point() -> None:
    import numpy as np

    points = np.array([(1.0, 3.0), (2.0, 1.0), (2.5, 2.0), (5.0, 0.5)])
    assert hypervolume(points, np.array((4.0, 4.0))) == pytest.approx(3 * 1 + 2 * 2)
    assert hypervolume(points, np.array((1.0, 1.0))) == 0.0


@pytest.mark.slow
def test_no_less_hypervolume_than_random_on_the_small_grid() -> None:
    """Both reach the whole front of this space with some seeds, and are then equal."""
    grid = GRIDS["small"]
    replay = Replay(grid, json.loads((ROOT / "results" / "tune" / grid.file).read_text(encoding="utf-8")))
    pairs = compared(replay, 30)
    assert sum(ours >= other for ours, other in pairs) >= 16
    assert sum(ours > other for ours, other in pairs) >= 12
