"""One job: what a run is called with, and what becomes of its result or its failure."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import job
from kvbench.errors import ModelError

CONFIG = {group: {"name": group} for group in ("model", "method", "quantizer", "dataset", "decoding", "runtime")}


def test_a_run_is_told_whom_to_name_itself_to_where_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of its own gets its configuration alone; a job of a sweep says its id before it starts."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("kvbench.runner.run.answer_run", lambda *given: calls.append(given) or {"status": "ok"})
    named: list[str] = []
    assert job.outcome_of_job(lambda: CONFIG)["metrics"] == {"status": "ok"}
    assert job.outcome_of_job(lambda: CONFIG, row=lambda: CONFIG, begun=named.append)["metrics"] == {"status": "ok"}
    assert calls == [(CONFIG,), (CONFIG, named.append)]


@pytest.mark.parametrize("row", [True, False])
def test_a_job_that_failed_has_a_row_where_there_is_a_table(
    row: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> Any:
        raise ModelError("no weights")

    monkeypatch.setattr("kvbench.runner.run.answer_run", fail)
    outcome = job.outcome_of_job(lambda: CONFIG, row=(lambda: CONFIG) if row else None)
    assert (outcome["status"], outcome["message"], outcome["exit_code"]) == ("error", "no weights", 1)
    assert ("metrics" in outcome) is row and capsys.readouterr().err == "error: no weights\n"
    if row:
        assert (outcome["metrics"]["status"], outcome["metrics"]["error"]) == ("error", "no weights")


@pytest.mark.parametrize(("age", "before"), [(3600.0, True), (-3600.0, False)])
def test_a_job_that_found_all_samples_stored_says_so(
    age: float, before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def finished(config: Any) -> Any:
        (tmp_path / "samples.jsonl").write_text("{}")
        at = time.time() - age
        os.utime(tmp_path / "samples.jsonl", (at, at))
        return {"status": "oom", "error": "too long", "run_dir": str(tmp_path)}

    monkeypatch.setattr("kvbench.runner.run.answer_run", finished)
    outcome = job.outcome_of_job(lambda: CONFIG, row=lambda: CONFIG)
    assert (outcome["status"], outcome["message"], outcome["before"]) == ("oom", "too long", before)
    monkeypatch.setattr("kvbench.runner.run.answer_run", lambda config: {"status": "ok", "rank": 1})
    assert job.outcome_of_job(lambda: CONFIG, row=lambda: CONFIG) == {"status": "ok", "message": ""}
