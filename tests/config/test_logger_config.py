"""The `logger` group: three loggers, each checked before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.config.logger_config import CsvLogger, NoLogger, WandbLogger, logger_of
from kvbench.errors import ConfigError


def test_each_name_has_its_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert logger_of({"name": "none"}) == NoLogger(name="none")
    assert logger_of({"name": "csv", "path": "a.csv"}) == CsvLogger(name="csv", path="a.csv")
    wandb = logger_of({"name": "wandb", "tags": ["a", "b"], "mode": "offline"})
    assert isinstance(wandb, WandbLogger)
    assert (wandb.tags, wandb.mode, wandb.project) == (("a", "b"), "offline", "kvbench")
    assert [package.module for package in wandb.packages()] == ["wandb"]


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"name": "cvs"}, "logger.name=cvs"),
        ({}, "logger.name"),
        ({"name": "none", "path": "x"}, r"logger\.path=x: no such key"),
        ({"name": "csv", "path": " "}, r"logger\.path='': must name a file"),
        ({"name": "csv", "path": "there"}, "is a folder, not a file"),
        ({"name": "csv", "path": "notes.csv"}, "has no column run_id"),
        ({"name": "wandb", "project": ""}, "must not be empty"),
        ({"name": "wandb", "dir": "notes.csv/x"}, "is a file, not a folder"),
        ({"name": "wandb", "mode": "on"}, r"logger\.mode=on"),
    ],
)
def test_a_wrong_logger_is_refused(
    group: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("notes.csv").write_text("who,what\nme,mine\n")
    with pytest.raises(ConfigError, match=problem):
        logger_of(group)


def test_a_file_of_runs_or_an_empty_one_is_written_to(tmp_path: Path) -> None:
    for number, text in enumerate(("", "\n", "label,run_id,score\nx,1-2,0.5\n")):
        path = tmp_path / f"{number}.csv"
        path.write_text(text)
        logger_of({"name": "csv", "path": str(path)})
