"""The record of a sweep: a file for each job, which other sweeps leave alone, and the table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvbench.cli import plan
from kvbench.cli.expand import limit
from kvbench.errors import ConfigError, KvbenchError


def outcome(number: int, **changes: object) -> dict:
    return {"status": "ok", "number": number, "overrides": ["a=1"], "message": "", **changes}


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan.TOKEN, "mine")


@pytest.mark.usefixtures("token")
def test_outcomes_come_back_in_the_order_of_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    for number in (10_000, 2, 9_999):
        plan.record(folder, number, outcome(number))
    assert sorted(path.name for path in folder.iterdir()) == ["job-0002.json", "job-10000.json", "job-9999.json"]
    outcomes = plan.outcomes(folder)
    assert [one["number"] for one in outcomes] == [2, 9_999, 10_000]
    assert outcomes[0] == {**outcome(2), "sweep": "mine"}
    assert json.loads((folder / "job-0002.json").read_text())["sweep"] == "mine"


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a record of a job"),
        (json.dumps(outcome(0, sweep="mine", status=3)), "is not a record of a job"),
        (json.dumps({"status": "ok"}), "is not a record of a job"),
        (json.dumps(outcome(0, sweep="another")), "belongs to another sweep"),
        (json.dumps(outcome(0, metrics={"a": 1})), "is not a record of a job (run_id is missing)"),
        (json.dumps(outcome(0)), ""),
        (json.dumps(outcome(0, sweep="mine")), ""),
    ],
)
def test_what_is_no_record_of_this_sweep_is_said(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "job-0000.json").write_text(content)
    lines: list[str] = []
    outcomes = plan.outcomes(tmp_path, lines.append)
    assert lines == ([f"{tmp_path / 'job-0000.json'}: {problem}; skipped"] if problem else [])
    assert len(outcomes) == (not problem)


@pytest.mark.usefixtures("token")
def test_a_record_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "job-0000.json").mkdir()
    lines: list[str] = []
    assert plan.outcomes(tmp_path, lines.append) == []
    assert "cannot be read (" in lines[0]


def test_every_sweep_has_an_id_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan.TOKEN, "")
    ids = []
    for _ in range(2):
        plan.begin()
        ids.append(os.environ[plan.TOKEN])
    assert len(set(ids)) == 2 and all(len(name) == 32 for name in ids)


def test_a_sweeps_folder_that_cannot_be_created_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(plan, "SWEEPS", tmp_path / "file")
    with pytest.raises(KvbenchError, match="cannot be created"):
        plan.new_folder()
    monkeypatch.setattr(plan, "SWEEPS", tmp_path / "sweeps")
    first = plan.new_folder()
    assert first.is_dir() and first.parent == tmp_path / "sweeps"

    def refused(self: Path, parents: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(KvbenchError, match="cannot be created: Permission denied"):
        plan.new_folder()


def test_the_table_is_kept_in_both_forms(tmp_path: Path) -> None:
    path = plan.keep_table(tmp_path / "new", "| a |", "a,b")
    assert path == tmp_path / "new" / "table.md" and path.read_text() == "| a |"
    assert (tmp_path / "new" / "table.csv").read_text() == "a,b"


@pytest.mark.parametrize(("text", "number"), [("", 7), (" ", 7), ("1", 1), (" 12 ", 12)])
def test_limits_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> None:
    monkeypatch.setenv("A_LIMIT", text)
    assert limit("A_LIMIT", 7) == number


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_limits_that_are_no_positive_whole_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("A_LIMIT", text)
    with pytest.raises(ConfigError, match=f"A_LIMIT={text}: must be a whole number, 1 or greater"):
        limit("A_LIMIT", 7)
