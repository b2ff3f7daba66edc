"""A sweep of 24 jobs on two workers: one is killed, then the command itself; the same command again completes it.

With a load of 13 on two processors, the undisturbed sweep took 5 minutes, joblib 9 and Ray 9; submitit, which starts a
process per job, takes longest. An idle machine is faster.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launch_support import GRID, JOBS, LAUNCHERS, Command, inject, kill, lines, records, runs, workers

pytestmark = pytest.mark.slow

#: part of the message of the job whose write fails, as on a full disk
FULL = "no space left on the disk"
NEEDS = {"joblib": "joblib", "submitit_local": "hydra_plugins.hydra_submitit_launcher", "ray": "ray"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Runs of the same jobs, one after the other in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = Command(folder, ["launcher=local", *GRID])
    assert command.ended() == 0, command.text()
    return runs(folder)


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_a_disturbed_sweep_has_the_results_of_an_undisturbed_one(
    launcher: str, tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    if find_spec(NEEDS[launcher]) is None:
        pytest.skip(f"launcher={launcher} needs the package {NEEDS[launcher]}")
    inject(tmp_path)
    arguments = [*LAUNCHERS[launcher], *GRID]
    first = Command(tmp_path, arguments)
    first.until(lambda: lines(tmp_path) >= 3 and bool(workers(first.process.pid, launcher)))
    kill(workers(first.process.pid, launcher)[-1])
    first.until(lambda: len(records(tmp_path)) >= 8 and any(FULL in one["message"] for one in records(tmp_path)))
    kill(first.process.pid)
    first.ended()
    before = lines(tmp_path)
    second = Command(tmp_path, arguments)
    assert second.ended() == 0, second.text()
    assert lines(tmp_path) > before
    assert f"{JOBS} jobs: {JOBS} ok" in second.text()
    assert runs(tmp_path) == undisturbed
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results/runs/*/*.json*")}
    third = Command(tmp_path, arguments)
    assert third.ended() == 0, third.text()
    assert f"{JOBS} ok ({JOBS} of them were already done)" in third.text()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("results/runs/*/*.json*")} == stamps
    assert "job 1/" not in third.text(), "nothing is started"
