"""Digests of the parts of the code: what belongs to which part, inside the package and outside."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kvbench
from kvbench import load_method
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
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules of a user, on the path."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "questions.json").write_text("[]")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    modules.own.cache_clear()
    return tmp_path


def code(method: str = "foreign_method.Foreign", task: str = "foreign_task.Ask", quantizer: str = "int2") -> dict:
    return sources.code(
        {"method": {"_target_": method}, "quantizer": {"name": quantizer}, "dataset": {"_target_": task}}
    )


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


def test_lineage_follows_imports_aliases_and_packages_that_export_again() -> None:
    own = modules.lineage("kvbench.methods.kivi.Kivi")
    assert own[0] == "kvbench.methods.kivi" and "kvbench.methods.base" in own
    assert modules.lineage("kvbench.tasks.mini.Mini")[0] == "kvbench.tasks.mini.task"
    for cls in (type(load_method("kivi")), type(load_method("quantspec")), type(load_method("cocktail"))):
        named = [base.__module__ for base in cls.__mro__ if base.__module__.startswith("kvbench")]
        assert modules.lineage(f"{cls.__module__}.{cls.__qualname__}") == list(dict.fromkeys(named))


def test_a_class_without_a_source_has_no_digest() -> None:
    typed = code("__typed_at_a_prompt__.Mine", "kvbench.tasks.mini.Mini", "none")
    assert typed["method"] is None and typed["quantizer"] is None and typed["task"] is not None


def test_every_method_has_a_digest_of_its_own() -> None:
    digests = {}
    for path in (conf_dir() / "method").glob("*.yaml"):
        target = yaml.safe_load(path.read_text())["_target_"]
        digests[target] = code(target, "kvbench.tasks.mini.Mini")["method"]
    assert len(digests) > 8 and len(set(digests.values())) == len(digests)


def test_each_module_that_serves_all_is_in_one_part() -> None:
    parts = {part: _modules_of(part) for part in sources.SHARED}
    for package in ("kvbench.cache", "kvbench.rotation", "kvbench.attention", "kvbench.decoding"):
        owners = {name: [part for part in parts if name in parts[part]] for name in modules.submodules(package)}
        none = {name for name, own in owners.items() if not own}
        assert all(len(own) <= 1 for own in owners.values())
        assert none <= {f"kvbench.attention.{name}" for name in ("check_cases", "check_kernels", "synthetic")}
    assert {"kvbench.cache.layer", "kvbench.cache.segments.packed", "kvbench.rotation.named"} <= parts["cache"]
    assert {"kvbench.attention.reference", "kvbench.attention.rope.rotary"} <= parts["attention"]
    assert {"kvbench.decoding.autoregressive", "kvbench.decoding.sampling"} <= parts["decoding"]
    assert {"kvbench.runner.prompting", "kvbench.runner.session"} <= parts["runner"]
    outputs = ("answers", "batching", "span_likelihood", "points", "prompting", "questions", "rows", "session")
    outputs += ("fidelity_samples", "fidelity_batch", "full_precision", "references", "shared_runs")
    assert parts["runner"] == {"kvbench.runner", *(f"kvbench.runner.{name}" for name in outputs)}
    left_out = {name.split(".")[2] for name in modules.submodules("kvbench.models")[1:]} - {
        name.split(".")[2] for name in parts["model"] if name != "kvbench.models"
    }
    assert left_out == {"devices", "locate", "shared", "verify"}
    assert {
        "kvbench.decoding.recorded",
        "kvbench.cache.kernels.pack",
        "kvbench.attention.triton.decode_kernel",
    } <= parts["kernels"]


def _modules_of(part: str) -> set[str]:
    packages, left_out = sources.SHARED[part]
    names = {name for package in packages for name in modules.submodules(package)}
    return {name for name in names if not modules.below(name, left_out)}


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
        "attention/triton/kernel.py": None,
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


def test_names_below_a_package_begin_with_it_and_a_dot() -> None:
    inside = [modules.below(name, ("a.b", "c")) for name in ("a.b", "a.b.d", "c.e", "a.bc", "a", "cc")]
    assert inside == [True, True, True, False, False, False]
