"""Launchers that this machine cannot serve."""

from __future__ import annotations

import shutil

import pytest

from kvbench.cli.main import main


def test_slurm_that_is_not_there_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Submitit itself ends in a traceback of 25 lines, after the sweep's folder was made."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["--multirun", "launcher=submitit", "method=fp16,kivi"]) == 2
    printed = capsys.readouterr().err
    assert "launcher=submitit: passes the jobs to SLURM, which this machine does not have (no srun)" in printed
    assert "launcher=local" in printed
    assert "Traceback" not in printed
