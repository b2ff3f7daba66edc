"""Requirements of single choices: paths that can be looked up, and places that can be written to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench.errors import ConfigError
from kvbench.util.requirements import LONGEST_NAME, check_writable, exists


def test_a_path_exists_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert exists(str(tmp_path), "model.path")
    assert exists(str(tmp_path / "file"), "model.path")
    assert not exists(str(tmp_path / "nothing"), "model.path")
    assert not exists(str(tmp_path / "file" / "below"), "model.path")
    assert not exists(str(tmp_path / "dangling"), "model.path")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert exists("~/file", "model.path")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-this-name/x", "loop"])
def test_a_path_that_cannot_be_looked_up_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"^model\.path=(.|\n)*cannot be accessed") as refusal:
        exists(name, "model.path")
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("place", ["new", "new/and/deeper", "there", "~/results"])
def test_folders_that_can_be_made_pass_and_are_not_made(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("there").mkdir()
    check_writable(place, "runtime.results_dir")
    check_writable(f"{place}/runs.csv", "logger.path", file=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


@pytest.mark.parametrize(
    ("place", "file", "problem"),
    [
        ("", False, "must name a folder"),
        ("s3://bucket/runs", False, "is a URL, not a folder"),
        ("s3://bucket/runs.csv", True, "is a URL, not a file"),
        ("taken/below", False, "is a file, not a folder"),
        ("dangling/below", False, "is a broken link"),
        ("x" * 300, False, "has a name longer than|File name too long"),  # by the version of Python
        ("x" * (LONGEST_NAME + 1), True, f"has a name longer than {LONGEST_NAME} bytes"),
        ("there", True, "is a folder, not a file"),
        (os.devnull, True, "is a device or pipe, not a file"),
        ("~nobody-of-this-name/x", False, "cannot be used as a folder"),
    ],
)
def test_places_that_cannot_be_written_to_are_refused(
    place: str, file: bool, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    Path("there").mkdir()
    Path("dangling").symlink_to("nothing")
    with pytest.raises(ConfigError, match=problem) as refusal:
        check_writable(place, "logger.path", file=file)
    assert refusal.value.key == "logger.path"
    assert refusal.value.hint


def test_a_folder_without_rights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match="is not writable"):
        check_writable(str(tmp_path / "runs"), "runtime.results_dir")
