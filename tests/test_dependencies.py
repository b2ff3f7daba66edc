"""Imported packages are declared and declared ones imported; the supported versions of Python stand in one place."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

#: packages whose modules have another name
MODULES = {
    "hydra-core": "hydra",
    "pyyaml": "yaml",
    "rouge-score": "rouge_score",
    "optimum-quanto": "optimum",
    "hydra-joblib-launcher": "hydra_plugins",
    "hydra-submitit-launcher": "hydra_plugins",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "import-linter": "importlinter",
    "cuda-bindings": "cuda",
    "griffelib": "griffe",
    "nvidia-ml-py": "pynvml",
    "llama-cpp-python": "llama_cpp",
}
#: declared, and not imported by name: with the reason
USED_OTHERWISE = {
    "hydra_plugins": "found by Hydra, for launcher=joblib and launcher=submitit",
    "pytest_timeout": "found by pytest",
    "xdist": "found by pytest",
    "ruff": "a command",
    "llama_cpp_python": "a server in a process of its own, for model.serve=llamacpp_python",
    "mypy": "a command",
    "types_pyyaml": "types for mypy",
    "nbclient": "runs the notebooks for make test-slow",
    "wonderwords": "its word lists are read as files",
    "ipykernel": "the kernel of the notebooks",
    "zensical": "builds the documentation, as a command",
    "mkdocstrings_python": "found by zensical",
    "nvidia_cuda_nvrtc": "the compiler that cuda.bindings loads",
}
#: imported, and not declared: with the reason
UNDECLARED: dict[str, str] = {}


def declared(extra: str | None = None) -> set[str]:
    """Modules that an installation brings; with `extra` those of that extra alone."""
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    names = (re.match(r"[A-Za-z0-9_.-]+", line)[0].lower() for line in lines)
    modules = (MODULES.get(name, name.replace("-", "_")) for name in names)
    return {module for module in modules if module != "kvbench"}


@functools.cache
def imported(folder: str) -> set[str]:
    """Top-level modules from elsewhere that a folder's files import anywhere, also inside functions."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
                chosen = [getattr(node.args[0], name, node.args[0]) for name in ("body", "orelse")]
                found |= {each.value.partition(".")[0] for each in chosen if isinstance(each, ast.Constant)}
    return found - set(sys.stdlib_module_names) - {"kvbench", "tests", "experiments"}


EXTRAS = tuple(PROJECT["optional-dependencies"])


def test_what_the_package_imports_is_declared() -> None:
    everything = declared().union(*map(declared, EXTRAS))
    assert imported("kvbench") - everything == set(UNDECLARED)
    assert imported("experiments") - everything == set()
    assert imported("tests") - everything - {"setuptools"} == set(UNDECLARED) & imported("tests")


def test_what_is_declared_is_imported() -> None:
    used = imported("kvbench") | imported("experiments") | set(USED_OTHERWISE)
    assert declared() - used == set()
    for extra in EXTRAS:
        mine = imported("tests") if extra in ("test", "lint", "notebooks") else set()
        assert declared(extra) - used - mine == set(), extra
    assert not set(USED_OTHERWISE) & (imported("kvbench") | imported("experiments"))  # the reasons hold


def test_every_declared_package_is_pinned() -> None:
    pins = {
        line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split("\n")
    }
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra])]
    names = {re.match(r"[A-Za-z0-9_.-]+", line)[0].lower().replace("_", "-") for line in lines} - {"kvbench"}
    # each build of torch brings its own triton and CUDA; launchers are pinned where they are declared
    assert names - pins == {"triton", "cuda-bindings", "nvidia-cuda-nvrtc"}


@pytest.mark.parametrize(
    ("minor", "serves"), [(10, False), (11, True), (12, True), (13, True), (14, True), (15, False)]
)
def test_make_and_pip_take_the_same_versions_of_python(minor: int, serves: bool) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    suitable = re.search(r"^SUITABLE := (.*)$", makefile, re.MULTILINE)[1]
    code = f"import sys; sys.version_info = (3, {minor}, 1); exec({suitable!r})"
    assert (subprocess.run([sys.executable, "-c", code]).returncode == 0) is serves
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    assert (int(low) <= minor < int(high)) is serves
    assert (f"python3.{minor} " in re.search(r"for p in (.*?);", makefile)[1]) is serves
    assert "Python 3.11 to 3.14" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_make_says_what_it_needs(tmp_path: Path) -> None:
    """A Python that is too old, and one without venv (Debian packs it apart)."""
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    command = ["make", "-C", str(ROOT), "install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert (
        "kvbench needs Python 3.11 to 3.14 with its venv module (Debian, Ubuntu: apt install python3-venv)"
        in done.stdout
    )
    assert "Python 3.9.1" in done.stdout
