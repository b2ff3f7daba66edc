"""Digests of the parts of the code: what belongs to which part, inside the package and outside."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvbench
from kvbench import load_method
from kvbench.results.code import Code
from kvbench.runner import modules, sources
from kvbench.util.confdir import conf_dir

METHOD = '''
"""A method."""
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING
import foreign_base as base
from foreign_helper import share
if TYPE_CHECKING:
    from foreign_types import Layer


@dataclass(kw_only=True)
class Foreign(base.Inner):
    """KIVI with a share."""

    def settle(self, layer, rows):
        """Settle."""
        if share(rows) > 0.5:  # half
            super().settle(layer, rows)
'''
FILES = {
    "foreign_method": METHOD,
    "foreign_base": "from kvbench.methods.kivi import Kivi\nclass Inner(Kivi):\n    x = 1\n",
    "foreign_helper": "from foreign_codes import Codes\ndef share(rows):\n    return 0.25\n",
    "foreign_codes": "from kvbench.quantizers import AffineQuantizer\nclass Codes(AffineQuantizer):\n    y = 1\n",
    "foreign_types": "z = 1\n",
    "foreign_task": "from foreign_questions import ALL\nclass Ask:\n    def samples(self): return ALL\n"
    "    scorer_version = 1\n    def score(self, sample, prediction): return {}\n",
    "foreign_questions": "import json\nALL = json.load(open('questions.json'))\n",
    "foreign_package/__init__": "",
    "foreign_package/beside": "def share(rows, half= 0.5):\n    return half\n",
    "foreign_package/inner/__init__": "from .base import Inner\n",
    "foreign_package/inner/base": "from kvbench.methods.kivi import Kivi\nclass Inner(Kivi):\n    x = 1\n",
    "foreign_package/inner/method": (
        "from . import numbers\nfrom .base import Inner\nfrom ..beside import share\n"
        "class Foreign(Inner):\n    y = share(numbers.ROWS)\n"
    ),
    "foreign_package/inner/numbers": "ROWS = 2\n",
    "foreign_package/numbers": "ROWS = 3\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules of a user, on the path."""
    for name, text in FILES.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "questions.json").write_text("[]")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    modules.own.cache_clear()
    return tmp_path


def settings(method: str, task: str, quantizer: str = "int2") -> dict[str, Any]:
    return {"method": {"_target_": method}, "quantizer": {"name": quantizer}, "dataset": {"_target_": task}}


def code(method: str = "foreign_method.Foreign", task: str = "foreign_task.Ask", quantizer: str = "int2") -> Code:
    return sources.code(settings(method, task, quantizer))


def everything(method: str, task: str) -> set[str]:
    """The names of all modules that count for a run."""
    return {name for found in sources.parts(settings(method, task)).values() for name in found}


def changed(before: dict, after: dict) -> set[str]:
    return {part for part in before if before[part] != after[part]}


def edit(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new", "parts"),
    [
        ("foreign_method.py", "> 0.5", ">= 0.5", {"method"}),
        ("foreign_method.py", '"""KIVI with a share."""', '"""Other\n    words."""', set()),
        ("foreign_method.py", "  # half", "", set()),
        ("foreign_base.py", "x = 1", "x = 2", {"method"}),
        ("foreign_helper.py", "0.25", "0.75", {"method"}),
        ("foreign_codes.py", "y = 1", "y = 2", {"quantizer"}),
        ("foreign_types.py", "z = 1", "z = 2", set()),
        ("foreign_task.py", "return ALL", "return list(ALL)", {"task"}),
        ("foreign_task.py", "return {}", "return {'score': 1.0}", {"scorer"}),
        ("foreign_task.py", "scorer_version = 1", "scorer_version = 2", {"scorer"}),
        ("foreign_questions.py", "json.load", "list or json.load", {"task"}),
        ("questions.json", "[]", "[1]", {"task"}),
    ],
)
def test_an_edit_counts_for_its_part(folder, name, old, new, parts) -> None:
    before = code()
    assert all(digest is not None and len(digest) == sources.DIGITS for digest in before.values())
    edit(folder, name, old, new)
    assert changed(before, code()) == parts


def test_nothing_is_imported(folder) -> None:
    code()
    assert not set(FILES) & set(sys.modules)


def test_the_folder_does_not_count(folder, tmp_path_factory, monkeypatch) -> None:
    before = code()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in [*folder.glob("*.py"), folder / "questions.json"]:
        shutil.move(path, elsewhere)
    monkeypatch.syspath_prepend(str(elsewhere))
    importlib.invalidate_caches()
    assert code() == before


@pytest.mark.parametrize("name", ["kivi", "quantspec", "cocktail", "h2o"])
def test_the_modules_of_all_base_classes_count(name: str) -> None:
    cls = type(load_method(name))
    named = {base.__module__ for base in cls.__mro__ if base.__module__.startswith("kvbench")}
    found = everything(f"{cls.__module__}.{cls.__qualname__}", "kvbench.tasks.mini.Mini")
    assert named <= found and "kvbench.tasks.mini.task" in found


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("foreign_package/beside.py", True),
        ("foreign_package/inner/base.py", True),
        ("foreign_package/inner/numbers.py", True),
        ("foreign_package/numbers.py", False),  # of the same name, but one package further up
    ],
)
def test_an_edit_of_what_is_imported_relatively_counts(folder: Path, name: str, counts: bool) -> None:
    before = code("foreign_package.inner.method.Foreign")
    edit(folder, name, "= ", "= 1 + ")
    assert changed(before, code("foreign_package.inner.method.Foreign")) == ({"method"} if counts else set())


def test_the_class_of_an_option_counts(folder: Path) -> None:
    """``method.press`` names a class of the user's."""
    press = settings("kvbench.methods.press.Press", "foreign_task.Ask")
    press["method"] |= {"press": "foreign_helper.Mine"}
    before = sources.code(press)
    edit(folder, "foreign_helper.py", "0.25", "0.75")
    assert changed(before, sources.code(press)) == {"method"}


def test_a_class_without_a_source_has_no_digest() -> None:
    typed = code("__typed_at_a_prompt__.Mine", "kvbench.tasks.mini.Mini", "none")
    assert typed["method"] is None and typed["quantizer"] is None and typed["task"] is not None


def test_every_method_has_a_digest_of_its_own() -> None:
    digests = {}
    for path in (conf_dir() / "method").glob("*.yaml"):
        target = yaml.safe_load(path.read_text())["_target_"]
        digests[target] = code(target, "kvbench.tasks.mini.Mini")["method"]
    assert len(digests) > 8 and len(set(digests.values())) == len(digests)


INSIDE = '''
import pathlib, sys
import kvbench
from kvbench.runner.stored import OlderCodeError
from kvbench.runner.run import answer_run
root = pathlib.Path(kvbench.__file__).parent
assert str(root).startswith(sys.argv[1]), root
sys.path.insert(0, sys.argv[2])
from tests.run_support import config

def settings(limit):
    made = config(sys.argv[1] + "/runs", dataset={"limit": limit})
    made["dataset"] = {"_target_": "kvbench.tasks.mini.Mini", "name": "mini", "tasks": ["needle"], "lengths": [512],
                       "limit": limit}
    made["model"] |= {"max_length": 4096}
    return made

first = answer_run(settings(1))
print("first", first["status"], first["samples"]["done"])
for name in sys.argv[3:]:
    name, harmless = name.rstrip("!"), name.endswith("!")
    path = root / name
    text = path.read_text()
    future = "from __future__ import annotations"
    assert future in text, name
    edited = text.replace(future, future + "; FURTHER = 1")
    if harmless:
        edited = text.replace('"""', '"""Reworded. ', 1) + "# end"
    path.write_text(edited)
    again = answer_run(settings(1))
    refused = "-"
    try:
        if again["status"] == "older":
            answer_run(settings(2))
            refused = "mixed"
    except OlderCodeError:
        refused = "refused"
    print(name, again["status"], ",".join((again["older"] or {"parts": []})["parts"]) or "-", refused, sep="|")
    path.write_text(text)
print("last", answer_run(settings(1))["status"])
'''


@pytest.mark.slow  # 8 s
def test_edits_inside_the_package_are_named_too(tmp_path: Path) -> None:
    """A copy of the package, edited file by file between the same commands."""
    package = Path(kvbench.__file__).parent
    shutil.copytree(package, tmp_path / "kvbench", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(conf_dir(), tmp_path / "conf")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    expected = {
        "methods/kivi.py": "method",
        "methods/kivi.py!": None,
        "methods/base.py": "method",
        "methods/h2o.py": None,
        "quantizers/affine.py": "quantizer",
        "tasks/mini/task.py": "task",
        "tasks/mini/task.py!": None,
        "cache/layer.py": "cache",
        "cache/layer.py!": None,
        "attention/reference.py": "attention",
        "attention/rope/rotary.py": "attention",
        "decoding/sampling.py": "decoding",
        "runner/prompting.py": "runner",
        "attention/triton/decode_kernel.py": None,
        "decoding/rounds.py": None,
        "cli/report.py": None,
    }
    done = subprocess.run(
        [sys.executable, "-c", INSIDE, str(tmp_path), str(root), *expected],
        env=environment, capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "first ok 1" and lines[-1] == "last ok"
    marks = [
        [name.rstrip("!"), *(("older", part, "refused") if part else ("ok", "-", "-"))]
        for name, part in expected.items()
    ]
    assert [line.split("|") for line in lines[1:-1]] == marks


def test_the_quantizers_count_where_a_quantizer_is_chosen() -> None:
    fp16 = {"method": {"_target_": "kvbench.methods.fp16.FP16"}, "dataset": {"_target_": "kvbench.tasks.mini.Mini"}}
    chosen = sources.code({**fp16, "quantizer": {"name": "int2"}})
    assert chosen["quantizer"] is not None
    for without in ({}, {"quantizer": None}, {"quantizer": {"name": "none"}}, {"quantizer": {"name": None}}):
        found = sources.code({**fp16, **without})
        assert found["quantizer"] != chosen["quantizer"] and found["method"] == chosen["method"]
        assert "storage" not in found
    auto = sources.code({**fp16, "model": {"dtype": "auto"}})
    assert auto["storage"] == "16 bits"
    assert sources.code({**fp16, "method": {"_target_": None}})["method"] is None
    assert sources.code({**fp16, "dataset": {}})["scorer"] is None
