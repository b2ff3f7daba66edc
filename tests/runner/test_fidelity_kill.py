"""Runs over long answers, killed in the middle of them: references and rows are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.results import samples
from kvbench.results.samples import outputs
from tests.kill_driver import ANSWERS

ROOT = Path(__file__).parents[2]
KILLS = 10


@pytest.mark.slow  # 35 s of processor time
def test_long_answers_resume_at_the_sample_after_ten_kills(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_driver", str(tmp_path), str(KILLS), "0", "answers"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    driven = json.loads(done.stdout.splitlines()[-1])
    whole, killed = driven["whole"], driven["kill"]
    assert killed["status"] == 0 and sum(map(len, killed["rounds"])) == KILLS
    assert any(0 < progress < ANSWERS for kills in killed["rounds"] for progress in kills), killed
    expected = rows_of(Path(whole["run_dir"]))
    assert len(expected) == ANSWERS and all(len(row["fidelity"]["kld"]) == 399 for row in expected.values())
    for number, kills in enumerate(killed["rounds"]):
        assert kills == sorted(kills), "a kill lost rows that were there"
        folder = tmp_path / "kill" / str(number)
        assert rows_of(folder / whole["run_id"]) == expected
        assert references(folder) == references(tmp_path / "whole") and len(references(folder)) == ANSWERS


def rows_of(run: Path) -> dict:
    stored = samples.read_samples(run / "samples.jsonl")
    assert not stored.damaged
    return {name: outputs(row) for name, row in stored.rows.items()}


def references(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("references/*/*.safetensors")}
