"""Requirements of single choices: paths that can be looked up, and places that can be written to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.errors import ConfigError
from kvbench.util import requirements
from kvbench.util.requirements import LONGEST_NAME, Package, check_packages, check_writable, exists, has_gpu, installed


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
        ("/proc/x", False, r"cannot be used as a folder \(No such|is not writable|is a broken link"),  # even for root
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
    for missing in (os.W_OK, os.X_OK):  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda at, mode, no=missing: Path(at) != tmp_path or not mode & no)
        with pytest.raises(ConfigError, match="is not writable"):
            check_writable(str(tmp_path / "runs"), "runtime.results_dir")


def test_packages_are_looked_up_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvbench_not_imported.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "kvbench_in_memory", SimpleNamespace(__spec__=None))  # type: ignore[arg-type]
    assert installed("kvbench_not_imported") and "kvbench_not_imported" not in sys.modules
    assert installed("kvbench_in_memory")
    for missing in ("kvbench_nowhere", "kvbench_nowhere.below", "json.decoder.below"):
        assert not installed(missing)
    present = Package("json", "a.b", "c", "HINT 1")
    check_packages([present])
    absent = [Package(f"hydra_plugins.kvbench_nowhere{i}", f"a.{i}", f"v{i}", f"HINT {i}") for i in (2, 3)]
    with pytest.raises(
        ConfigError, match=r"a\.2=v2: needs the package kvbench_nowhere2, which is not installed"
    ) as error:
        check_packages([present, *absent])
    assert error.value.hint == "HINT 2"


@pytest.mark.parametrize(
    ("visible", "torch", "platform", "files", "expected"),
    [
        (None, None, "linux", True, True),
        (None, None, "linux", False, False),
        ("1", None, "linux", True, True),
        ("", None, "linux", True, False),
        (" -1 ", True, "linux", True, False),
        (None, True, "linux", False, True),  # torch knows better than the files
        (None, False, "linux", True, False),
        (None, None, "darwin", False, True),
    ],
)
def test_a_gpu_is_there_unless_it_cannot_be(visible, torch, platform, files, expected, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "nvidia0").touch()
    name = "nvidia[0-9]*" if files else "nvidia[1-9]*"
    monkeypatch.setattr(requirements, "GPU_FILES", ("/nowhere/at/all", f"{tmp_path}/{name}"))
    monkeypatch.setattr(sys, "platform", platform)
    modules = {name: module for name, module in sys.modules.items() if name != "torch"}
    if torch is not None:
        modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: torch))
    monkeypatch.setattr(sys, "modules", modules)
    assert has_gpu() is expected
