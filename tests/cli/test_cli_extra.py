"""``--config-dir``: a file in it that cannot be a choice is named, with what is wrong and where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import extra
from kvbench.cli.main import main

KIVI = "# mine\n_target_: kvbench.methods.kivi.Kivi\ntakes: [int2]\nresidual: 32\n"
DEFAULT = "defaults:\n  - override /quantizer@_global_.quantizer: int2\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

WRONG: list[tuple[str, str | bytes, str]] = [
    ("no YAML", "a: [b\n: ]", "is not YAML, line"),
    ("tabs", "a:\n\t- b: 1\n", "is not YAML, line 2"),
    ("a key twice", KIVI + "residual: 64\n", "has the key residual twice; line 5 repeats it"),
    ("a nested key twice", KIVI + "deep: {a: 1, a: 2}\n", "has the key a twice"),
    ("not UTF-8", "# k\xfc\n".encode("latin1"), "is not UTF-8 text (byte 3)"),
    ("a scalar", "hello", "contains a str instead of keys"),
    ("a list", "- a\n", "contains a list instead of keys"),
    ("empty", "", "is empty"),
    ("a comment alone", "# nothing\n", "is empty"),
    ("a number as key", "1: 2\n", "has the key 1"),
    ("aliases of aliases", BOMB + KIVI, "KVBENCH_MAX_YAML_VALUES=50000"),
    ("large", "".join(f"k{i}: 1\n" for i in range(3000)), "more than 5000 values"),
    ("large in bytes", "# " + "x" * 300_000, "more than 5000 values"),
    ("deep", "a: " + "[" * 40 + "]" * 40, "groups nested more than 32 levels deep"),
    ("very deep", "a: " + "[" * 5000 + "]" * 5000, "groups nested more than"),
    ("its own alias", "a: &a [*a]\n", "alias to a group that contains the alias itself"),
    ("a NUL", b"a: \x00b\n", "is not YAML"),
    ("two documents", KIVI + "---\n" + KIVI, "is not YAML"),
    ("an object", "a: !!python/name:os.system\n", "is not YAML"),
    ("global", "# @package _global_\ndecoding:\n  temperature: 1.0\n", "writes to _global_"),
    ("global, further down", KIVI + "# @package _global_\n", "writes to _global_"),
    ("another group", "# @package model\nname: x\n", "writes to model"),
    ("another group's choice", "defaults:\n  - override /dataset: pg19\n" + KIVI, "chooses dataset in its defaults"),
    ("defaults that are no list", "defaults: kivi\n", "its defaults are not a list"),
]


def folder(tmp_path: Path, content: str | bytes, group: str = "method", name: str = "mine") -> list[str]:
    place = tmp_path / "own" / group
    place.mkdir(parents=True)
    (place / f"{name}.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    return ["--config-dir", str(tmp_path / "own")]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("kvbench.runner.run.answer_run", lambda config: pytest.fail("was started"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("content", "said"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_file_is_named(
    content: str | bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = folder(tmp_path, content)
    assert main([*options, "method=mine"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --config-dir: ")
    assert "method/mine.yaml" in message
    assert said in message
    assert str(tmp_path / "own") not in sys.path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("_target_: nowhere.X\n", "cannot be imported"),
        ("_target_: os.system\n", "is not a class"),
        ("_target_: kvbench.methods.base.Method\n", "is not a subclass"),
        ("_target_: builtins.dict\n", "is not a subclass"),
        ("_target_: kvbench.methods.kivi.Kivi\ntakes: [none]\n", "Kivi packs keys and values"),
        ("takes: [none]\n", "must be the full name of a class: package.module.Class"),
        ("defaults: [nothing, _self_]\n" + KIVI, "nothing"),
        (KIVI + "residual_: 1\n", "did you mean 'residual'"),
        (DEFAULT + KIVI.replace("32", "33"), "must be a multiple"),
    ],
)
def test_a_class_that_is_no_method(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*folder(tmp_path, content), "method=mine"]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


def test_a_choice_of_kvbench_is_not_replaced_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*folder(tmp_path, KIVI, name="kivi"), "method=kivi"]) == 2
    assert "has the same name as the built-in method=kivi" in capsys.readouterr().err


@pytest.mark.parametrize(
    "place", ["missing", "file", "bare", "x" * 300, "loop"], ids=["missing", "file", "bare", "long", "loop"]
)
def test_a_folder_that_is_none(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert main(["--config-dir", place, "method=kivi"]) == 2
    assert capsys.readouterr().err.startswith("error: --config-dir=")
    assert main(["--config-dir", "", "method=kivi"]) == 2
    assert "needs a value" in capsys.readouterr().err


def test_what_may_stand_in_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def run(config: Any, begun: Any = None) -> dict[str, Any]:
        started.append(config.plain)
        return {"status": "ok"}

    monkeypatch.setattr("kvbench.runner.run.answer_run", run)
    monkeypatch.setattr("kvbench.results.tables.table_text", lambda rows: "")
    merged = "_target_: kvbench.methods.kivi.Kivi\n<<: {takes: [int2], residual: 64}\n"
    options = folder(tmp_path, "# @package method\n" + DEFAULT + merged)
    (tmp_path / "own" / "method" / "based.yaml").write_text("defaults: [mine, _self_]\nresidual: 32\n")
    (tmp_path / "own" / "experiment").mkdir()
    (tmp_path / "own" / "experiment" / "all.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /method: mine\n  - override /dataset: mini_text\n"
        "decoding:\n  temperature: 1.0\n"
    )
    assert main([*options, "method=mine"]) == 0, capsys.readouterr().err
    assert main([*options, "method=based"]) == 0, capsys.readouterr().err
    assert main([*options, "experiment=all"]) == 0, capsys.readouterr().err
    assert [config["method"]["residual"] for config in started] == [64, 32, 64]
    assert [config["decoding"]["temperature"] for config in started] == [0.0, 0.0, 1.0]
    assert started[2]["dataset"]["name"] == "mini_text"


def test_the_limit_is_raised_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = folder(tmp_path, KIVI + "names: [a, b, c, d]\n")
    path = Path(own[1]) / "method" / "mine.yaml"
    monkeypatch.setenv("KVBENCH_MAX_YAML_VALUES", "13")  # the whole, 4 keys, and values of 1, 2, 1 and 5
    assert main([*own, "method=mine"]) == 2
    assert "more than 13 values" in capsys.readouterr().err
    monkeypatch.setenv("KVBENCH_MAX_YAML_VALUES", "14")
    extra.check_file(path, "method")
