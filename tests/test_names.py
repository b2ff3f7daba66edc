"""A search finds one thing: few functions share a name, and a package has each public name and each file name once."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = ("kvbench", "experiments")
#: how many functions may share a name
MOST = 4
#: names that every program has
EVERYWHERE = {"main"}
#: names that modules share on purpose, since one caller takes any of these modules, by the modules
SHARED: Mapping[tuple[str, ...], frozenset[str]] = {
    ("attend", "refuses"): frozenset(  # kernels of a decode step, among which kvbench.attention.fused picks
        f"kvbench/attention/{module}.py"
        for module in ("codebook/decode", "cpu/decode", "cuda/decode", "triton/decode", "triton/observed")
    ),
    ("kernel_form", "launch_pack", "pack_group"): frozenset(  # kvbench.cache.kernels.pack_together.families
        f"kvbench/cache/kernels/{module}.py" for module in ("clipped", "engine", "kvarn")
    ),
    ("Ranged",): frozenset(  # kinds of an engine's format, which are part of stored names
        f"kvbench/quantizers/engine/{module}.py" for module in ("llamacpp", "sglang")
    ),
}

#: file names that sibling folders share on purpose, by the folder around them: each sibling has the same parts
SIBLINGS = {"kvbench/attention": {"decode.py"}, "kvbench/tasks": {"task.py"}}
#: file names that more than two packages share: parts that each package has (its base, its specification, its command
#: line and so on), or what one thing, such as a format, is to each of them
PARTS = {"__init__.py", "__main__.py", "base.py", "build.py", "calibrate.py", "command.py", "fidelity.py", "kvarn.py"}
PARTS |= {"load.py", "perplexity.py", "points.py", "report.py", "spec.py", "speculation.py"}

Place = tuple[str, str]  # file and name


def definitions(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each function and class of a module, and whether it is a function; members do not count."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, not isinstance(node, ast.ClassDef)


def crowded(functions: Iterable[Place]) -> dict[str, list[str]]:
    """Return the files of each name that more than :data:`MOST` functions share; an underscore is no new name."""
    files = defaultdict(list)
    for file, name in functions:
        files[name.lstrip("_")].append(file)
    return {name: places for name, places in files.items() if len(places) > MOST}


def doubled(public: Iterable[Place]) -> dict[Place, list[str]]:
    """Return the files of each public name that a package defines twice, by package and name."""
    files = defaultdict(list)
    for file, name in public:
        if not name.startswith("_"):
            files[package_of(file), name].append(file)
    return {place: places for place, places in files.items() if len(places) > 1}


def package_of(file: str) -> str:
    """Return the package of a file: the second folder of its path, if there is one, with the first."""
    parts = file.split("/")
    return "/".join(parts[: min(2, len(parts) - 1)])


def shared(file: str, name: str) -> bool:
    """Return True if a module has a name on purpose in common with others."""
    return name in EVERYWHERE or any(name in names and file in files for names, files in SHARED.items())


@pytest.fixture(scope="module")
def defined() -> list[tuple[str, str, bool]]:
    """The functions and classes of all modules, but for what modules share on purpose: file, name, if a function."""
    files = (path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py")))
    return [
        (file, name, function)
        for path in files
        for name, function in definitions(path.read_text(encoding="utf-8"))
        if not shared(file := path.relative_to(ROOT).as_posix(), name)
    ]


def test_few_functions_share_a_name(defined: list[tuple[str, str, bool]]) -> None:
    assert not crowded((file, name) for file, name, function in defined if function)


def test_a_package_has_a_public_name_once(defined: list[tuple[str, str, bool]]) -> None:
    assert not doubled((file, name) for file, name, _ in defined)


def test_what_is_shared_on_purpose_is_there() -> None:
    for names, files in SHARED.items():
        for file in files:
            assert {name for name, _ in definitions((ROOT / file).read_text(encoding="utf-8"))} >= set(names)


def test_a_package_has_a_file_name_once() -> None:
    files = [path.relative_to(ROOT).as_posix() for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))]
    named = [
        (file, name)
        for file in files
        if not (name := Path(file).name).startswith("__") and name not in SIBLINGS.get(package_of(file), ())
    ]
    assert not doubled(named)


def test_few_packages_share_a_file_name() -> None:
    files = defaultdict(set)
    for path in sorted((ROOT / "kvbench").rglob("*.py")):
        files[path.name].add(package_of(path.relative_to(ROOT).as_posix()))
    assert not {name: sorted(places) for name, places in files.items() if len(places) > 2 and name not in PARTS}


def test_names_are_told_apart() -> None:
    source = (
        "def run(): ...\nasync def wait(): ...\nclass Run:\n    def run(self): ...\nx = 1\nif x:\n    def late(): ..."
    )
    assert list(definitions(source)) == [("run", True), ("wait", True), ("Run", False)]
    files = [f"kvbench/{package}/run.py" for package in "abcd"]
    assert not crowded((file, "run") for file in files)
    assert crowded([*((file, "run") for file in files), ("experiments/e.py", "_run")]) == {
        "run": [*files, "experiments/e.py"]
    }
    twice = [("kvbench/a/b.py", "run"), ("kvbench/a/c/d.py", "run")]
    assert doubled([*twice, ("kvbench/b/b.py", "run"), ("kvbench/a/e.py", "_run")]) == {
        ("kvbench/a", "run"): ["kvbench/a/b.py", "kvbench/a/c/d.py"]
    }
    assert doubled([("experiments/a.py", "run"), ("experiments/b.py", "run"), ("experiments/b/c.py", "run")]) == {
        ("experiments", "run"): ["experiments/a.py", "experiments/b.py"]
    }
    assert shared("kvbench/attention/cuda/decode.py", "attend") and not shared("kvbench/attention/fused.py", "attend")
