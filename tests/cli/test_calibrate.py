"""The command line of calibration: what is refused, and what the calibration is called with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.calibration import calibrate as calibration
from kvbench.calibration import file
from kvbench.cli import calibrate as command
from kvbench.errors import KvbenchError, ModelError
from kvbench.models import load


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bits", "2,x"], "--bits=2,x: is not a list of whole numbers"),
        (["--bits", "2,5"], "--bits=2,5: a codebook must have 2, 3 or 4 bits"),
        (["--bits", ""], "--bits=: is not a list of whole numbers"),
        (["--sequences", "0"], "--sequences=0: is out of range"),
        (["--length", "1"], "--length=1: is out of range"),
        (["--length", "15"], "allowed: 16 to"),
        (["--first-tokens", "-1"], "--first-tokens=-1: is out of range"),
        (["--first-tokens", "64", "--length", "64"], "allowed: 0 to 63"),
        (["--outliers", "-0.1"], "--outliers=-0.1: is not a valid share of outliers"),
        (["--outliers", "0.6"], "--outliers=0.6"),
        (["--device", "gpu"], "--device=gpu: is not a device"),
        (["--device", "cuda:1"], "no GPU is visible on this machine"),
        (["--out", ""], "must name a file"),
        (["--out", "x/.."], "must name a file"),
        (["--text", ""], "must name a file or folder"),
        (["--text", "absent.txt"], "--text absent.txt does not exist.\n  hint: to calibrate without your own text"),
        (["--model", "tinny"], "did you mean 'tiny'"),
    ],
)
def test_wrong_arguments_are_refused(words, said, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the model was loaded"))
    given = dict(zip(words[::2], words[1::2], strict=True))
    arguments = {"--model": "tiny", "--text": "mini", **given}
    assert command.main([word for pair in arguments.items() for word in pair]) in (1, 2)
    assert said in capsys.readouterr().err


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[Any]:
    """Calls of the functions that do the work, with a tokenizer of characters; texts of 7, 2 and 9 of them."""
    record: list[Any] = []
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.txt", "abcdefg"), ("b.txt", "xy"), ("c.txt", "123456789")):
        Path(name).write_text(text)
    tokenizer = lambda text, verbose: {"input_ids": [ord(char) for char in text]}  # noqa: E731
    loaded = SimpleNamespace(model="the model", tokenizer=tokenizer, max_length=50)

    def cut(ids: list[int], count: int, length: int, name: str) -> torch.Tensor:
        record.append(("cut", "".join(map(chr, ids)), count, length, name))
        return torch.full((count, 2), len(record))

    def calibrate(model: Any, ids: torch.Tensor, **named: Any) -> Any:
        named.pop("tell")(3, 4)
        record.append(("calibrate", model, ids.tolist(), named))
        info = {"bits": "2,3", "tokens": "6"}
        return SimpleNamespace(shape=(2, 4, 8), info=info, outliers=named["outliers"])

    monkeypatch.setattr(
        load, "load_model", lambda model, runtime: record.append(("load", model, runtime.device)) or loaded
    )
    monkeypatch.setattr(calibration, "cut_sequences", cut)
    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setattr(file, "save", lambda made, out: record.append(("save", out)))
    return record


def test_texts_share_the_sequences_and_the_file_is_named_after_the_model(calls, capsys) -> None:
    words = ["--model", "tiny", "--random", "--text", "a.txt", "b.txt", "c.txt", "--bits", "3,2", "--device", "cpu"]
    assert command.main([*words, "--sequences", "4", "--length", "40", "--outliers", "0.05", "--no-fisher"]) == 0
    (_, model, device), *cuts, (_, used, ids, named), (_, out) = calls
    assert (model.name, model.weights, device) == ("tiny", "random", "cpu")
    assert cuts == [
        ("cut", "abcdefg", 2, 40, "a.txt"),
        ("cut", "xy", 1, 40, "b.txt"),
        ("cut", "123456789", 1, 40, "c.txt"),
    ]
    assert used == "the model" and ids == [[2, 2], [2, 2], [3, 3], [4, 4]]
    assert named == {
        "name": "tiny-random",
        "bits": (2, 3),
        "outliers": 0.05,
        "fisher": False,
        "first_tokens": 0,
        "text_sha256": hashlib.sha256(b"abcdefg\0xy\x00123456789").hexdigest(),
    }
    assert out == file.FOLDER / "tiny-random-5pct.safetensors"
    captured = capsys.readouterr()
    assert captured.out == f"{out}: 2,3 bits, 5% outliers, 2 layers of 4 x 8, from 6 tokens\n"
    assert captured.err == "\rcalibrating: 3 of 4 passes"


def test_defaults_and_limits_of_the_model(calls) -> None:
    assert command.main(["--model", "tiny", "--text", "a.txt", "--out", "mine.safetensors"]) == 0
    (_, model, device), cut, (_, _, _, named), (_, out) = calls
    assert (model.weights, device, out) == ("pretrained", "auto", Path("mine.safetensors"))
    assert cut == ("cut", "abcdefg", 16, 50, "a.txt"), "2048 tokens are more than the model takes"
    assert (named["bits"], named["outliers"], named["fisher"], named["first_tokens"]) == ((2, 3, 4), 0.01, True, 0)


def test_failures_have_their_exit_status(calls, monkeypatch, capsys) -> None:
    def refuse(*_: Any) -> Any:
        raise ModelError("not here")

    monkeypatch.setattr(load, "load_model", refuse)
    assert command.main(["--model", "tiny", "--text", "a.txt"]) == ModelError("").exit_code
    assert "error: not here" in capsys.readouterr().err

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "load_model", interrupted)
    assert command.main(["--model", "tiny", "--text", "a.txt"]) == 130


def test_generated_texts_are_those_of_no_evaluation(monkeypatch, tmp_path) -> None:
    from kvbench.tasks.mini import text

    prompts = command.mini()
    assert len(prompts) == len(set(prompts)) > 1
    monkeypatch.setattr(command.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "b.py").write_text("b")
    (tmp_path / "a.py").write_bytes(b"a\xff")
    (tmp_path / "other.txt").write_text("c")
    (tmp_path / sorted(text.EXCLUDED)[0]).write_text("held out")
    assert command.python() == ["a\ufffd", "b"]
    assert command.text_documents("python") == ["a\ufffd", "b"]
    for path in tmp_path.glob("*.py"):
        path.unlink()
    with pytest.raises(KvbenchError, match="contains no Python sources"):
        command.python()


def test_a_file_goes_before_a_generated_text_of_its_name(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mini").write_text("my own")
    assert command.text_documents("mini") == ["my own"]


def test_the_last_pass_ends_the_line(capsys) -> None:
    command._tell(4, 4)
    assert capsys.readouterr().err == "\rcalibrating: 4 of 4 passes\n"


def test_oscar_is_calibrated_with_its_own_options(calls, monkeypatch, capsys) -> None:
    from kvbench.calibration import rotate

    def rotations(model: Any, ids: torch.Tensor, **named: Any) -> Any:
        named.pop("tell")(1, 2)
        calls.append(("rotations", model, ids.tolist(), named))
        heads = "each" if named["per_head"] else "shared"
        return SimpleNamespace(shape=(2, 4, 8), info={"heads": heads, "tokens": "6"})

    monkeypatch.setattr(rotate, "rotations", rotations)
    words = ["method=oscar", "--model", "tiny", "--text", "a.txt", "--first-tokens", "3"]
    assert command.main(words) == 0
    *_, (_, used, ids, named), (_, out) = calls
    assert used == "the model" and ids == [[2, 2]] * 16 and out == file.FOLDER / "tiny-oscar.safetensors"
    text = hashlib.sha256(b"abcdefg").hexdigest()
    assert named == {"name": "tiny", "per_head": False, "first_tokens": 3, "text_sha256": text}
    assert capsys.readouterr().out == f"{out}: rotations, shared, 2 layers of 4 x 8, from 6 tokens\n"
    assert command.main([*words, "--per-head"]) == 0
    assert calls[-2][3]["per_head"] and calls[-1][1] == file.FOLDER / "tiny-oscar-heads.safetensors"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=oscar", "--length", "2"], "--length=2: is out of range"),
        (["method=oscar", "--bits", "2"], "--bits=2: has no effect on a calibration for method=oscar"),
        (["method=oscar", "--no-fisher"], "--no-fisher: has no effect on a calibration for method=oscar"),
        (["--per-head"], "--per-head: has no effect on a calibration for method=kvquant"),
    ],
)
def test_what_a_methods_calibration_cannot_do_is_refused(words, said, calls, capsys) -> None:
    assert command.main([*words, "--model", "tiny", "--text", "a.txt"]) != 0
    assert said in capsys.readouterr().err and not calls


def test_an_option_and_its_opposite_contradict_each_other(calls, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--model", "tiny", "--text", "a.txt", "--fisher", "--no-fisher"])
    assert end.value.code == 2 and not calls
    assert "--no-fisher: not allowed with argument --fisher" in capsys.readouterr().err


def test_the_help_says_the_defaults(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "each sequence to leave out (default: 0)" in text
    assert "mps, cuda or cuda:N (default: auto)" in text
