"""``pytest --methods=DIR``: the contract tests on methods of a folder outside the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.methods import load_method
from tests.contract import subjects

ROOT = Path(__file__).resolve().parents[2]
RIGHT = """from dataclasses import dataclass
from kvbench.methods import ScoredMethod


@dataclass(kw_only=True)
class Mine(ScoredMethod):
    def score(self, keys, values, attention):
        return values.norm(dim=-1)
"""
#: chance decides which tokens stay
WRONG = RIGHT.replace("values.norm(dim=-1)", "values[..., 0].detach().clone().uniform_()")
FIVE = "{bits: 5, group_size: head_dim, axis: token}"
PRESET = f"name: mine5\nkey: {FIVE}\nvalue: {FIVE}\n"


@pytest.fixture(autouse=True)
def given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "folder", None)
    monkeypatch.setattr(sys, "path", [*sys.path])


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_methods_of_a_folder_are_alone_under_contract(tmp_path: Path) -> None:
    """With the quantizers of the folder, the default first."""
    preset = "_target_: kvbench.methods.kivi.Kivi\ndefaults: [override /quantizer@_global_.quantizer: mine5]\n"
    files = {
        "method/contract_one.py": RIGHT,
        "method/two.yaml": preset + "takes: [int4_token, mine5]",
        "quantizer/mine5.yaml": PRESET,
    }
    subjects.choose(str(written(tmp_path, files)))
    one, two = subjects.names()
    assert [Path(one).name, Path(two).name] == ["contract_one.py", "two.yaml"]
    assert (subjects.quantizers(one), subjects.quantizers(two)) == (("none",), ("mine5", "int4_token"))
    assert load_method(two, quantizer="mine5").quantizer.key.bits == 5
    subjects.choose(None)
    assert {"kivi", "fp16"} < set(subjects.names())


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"quantizer/mine5.yaml": PRESET}, "has no method; put method/foo.yaml"),
        ({"method/foo.yaml": "_target_: not_there.Foo"}, r"method/foo\.yaml: .*cannot be imported.*not_there"),
        ({"method/foo.yaml": "takes: [int4]"}, r"method/foo\.yaml: .*_target_"),
        ({"method/contract_bad.py": "import not_there"}, r"contract_bad\.py: cannot be imported .*not_there"),
        ({"method/contract_two.py": RIGHT + RIGHT.replace("Mine", "Other")}, "it defines Mine, Other"),
        ({"method/contract_bare.py": RIGHT.replace("@dataclass(kw_only=True)\n", "")}, "a dataclass; it defines Mine"),
        ({"method/two.yaml": "_target_: kvbench.methods.kivi.Kivi\ntakes: [mine6]"}, "quantizer=none"),
    ],
)
def test_what_cannot_be_held_to_it_is_said(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    with pytest.raises(pytest.UsageError, match=rf"(?s)--methods={re.escape(str(tmp_path))}: .*{problem}"):
        subjects.choose(str(written(tmp_path, files)))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match="nowhere: there is no such folder; name one that holds"):
        subjects.choose(str(tmp_path / "nowhere"))


def run(folder: Path, *more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", f"--methods={folder}", "-p", "no:cacheprovider", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_sound_method_passes_the_contract(tmp_path: Path) -> None:
    status, said = run(written(tmp_path, {"method/mine.py": RIGHT}))
    assert status == 0 and re.search(r"\n\d\d passed, .*\d+ deselected", said), said


@pytest.mark.slow
def test_a_method_that_draws_lots_fails_it(tmp_path: Path) -> None:
    status, said = run(written(tmp_path, {"method/mine.py": WRONG}), "--tb=no")
    assert status == 1 and re.search(
        r"FAILED .*test_a_left_padded_row_equals_the_row_alone\[llama-mine-none\]", said
    ), said


@pytest.mark.slow
def test_other_tests_are_not_run(tmp_path: Path) -> None:
    """Nor where the error is in the folder."""
    status, said = run(written(tmp_path, {"method/mine.py": RIGHT}), "--collect-only")
    assert status == 0 and set(re.findall(r"^tests/(\w+)/", said, re.MULTILINE)) == {"contract"}, said
    status, said = run(tmp_path / "nowhere")
    assert status == 4 and "there is no such folder" in said, said
