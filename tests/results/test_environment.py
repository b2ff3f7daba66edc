"""The environment of a run: what is asked of the machine, and what stands in its place if nothing is known."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.results import environment as module
from kvbench.results.environment import commit, cpu_name, environment
from kvbench.util.version import __version__


def test_the_environment_has_the_device_the_machine_and_the_versions() -> None:
    computed = environment("cuda:0", "A GPU", {"dtype": "bfloat16", "arithmetic": "float32"})
    assert (computed["device"], computed["device_name"]) == ("cuda:0", "A GPU")
    assert (computed["dtype"], computed["arithmetic"]) == ("bfloat16", "float32")
    assert (computed["cpu"], computed["cpu_count"]) == (cpu_name(), os.cpu_count())
    assert (computed["platform"], computed["python"]) == (platform.platform(), platform.python_version())
    assert (computed["kvbench"], computed["commit"]) == (__version__, commit())
    for name in ("torch", "transformers", "tokenizers", "numpy"):
        assert computed[name] == metadata.version(name)
    assert "triton" in computed
    bare = environment()
    assert (bare["device"], bare["device_name"], bare["dtype"]) == (None, cpu_name(), None)


@pytest.fixture
def fresh():
    """Forget what was asked before and after."""
    functions = (cpu_name, commit, module._version)
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_the_processor_is_named_by_the_kernel_or_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor : 0\nmodel name\t: A CPU: 2 GHz \nmodel name : another\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **named: text)
    assert cpu_name() == "A CPU: 2 GHz"
    cpu_name.cache_clear()
    monkeypatch.setattr(Path, "read_text", lambda self, **named: "processor : 0\n")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert cpu_name() == "riscv64"
    cpu_name.cache_clear()

    def none(self: Path, **named: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", none)
    monkeypatch.setattr(platform, "processor", lambda: "a processor")
    assert cpu_name() == "a processor"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"rev-parse": "abc\n", "status": ""}, "abc"),
        ({"rev-parse": "abc\n", "status": " M file\n"}, "abc+"),
        ({"rev-parse": None}, None),
        ({"rev-parse": "abc\n", "status": None}, "abc"),
    ],
)
def test_a_commit_has_a_mark_if_tracked_files_were_edited(monkeypatch: pytest.MonkeyPatch, answers, expected) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **named: object) -> SimpleNamespace:
        asked.append(command)
        text = answers[command[3]]
        return SimpleNamespace(stdout=text or "", returncode=int(text is None))

    monkeypatch.setattr(Path, "exists", lambda self: self.name == ".git")
    monkeypatch.setattr(subprocess, "run", run)
    assert commit() == expected
    assert asked[0][:3] == ["git", "-C", str(Path(module.__file__).resolve().parents[2])]
    if expected is not None:
        assert asked[1][3:] == ["status", "--porcelain", "--untracked-files=no"]


@pytest.mark.usefixtures("fresh")
def test_there_is_no_commit_without_a_clone_or_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert commit() is None
    commit.cache_clear()
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("git was asked"))
    assert commit() is None


@pytest.mark.usefixtures("fresh")
def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(metadata, "version", version)
    computed = environment()
    assert computed["triton"] is None and computed["torch"] == "1.2"
