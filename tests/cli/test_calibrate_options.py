"""Options of the calibration: their defaults, and both sides of their limits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.cli import calibrate
from kvbench.errors import ConfigError, DataError
from kvbench.util.schema import MOST_ROWS, MOST_TOKENS


def asked(*texts: str) -> Any:
    return calibrate.calibrate_parser("words").parse_args(["--model", "tiny", "--text", "mini", "python", *texts])


def test_what_is_not_said_has_its_default() -> None:
    known = vars(asked())
    assert known == {
        "method": "method=kvquant",
        "model": "tiny",
        "path": None,
        "random": False,
        "text": ["mini", "python"],
        "bits": None,
        "outliers": None,
        "sequences": 16,
        "length": 2048,
        "fisher": None,
        "per_head": None,
        "first_tokens": 0,
        "percentile": None,
        "device": "auto",
        "dtype": None,
        "out": None,
    }
    given = asked(
        "--random", "--no-fisher", "--per-head", "--outliers", "0.5", "--dtype", "float16", "--first-tokens=3"
    )
    assert (given.random, given.fisher, given.per_head, given.outliers) == (True, False, True, 0.5)
    assert (given.dtype, given.first_tokens, asked("--fisher").fisher) == ("float16", 3, True)
    parsed = calibrate.calibrate_parser(None).parse_args(["method=oscar", "--model", "a", "--text", "b"])
    assert (parsed.method, parsed.text) == ("method=oscar", ["b"])
    for wrong in (["--fisher", "--no-fisher"], ["--dtype", "int8"], ["--sequences", "1.5"]):
        with pytest.raises(SystemExit):
            asked(*wrong)
    for wrong in ([], ["--model", "a"], ["--text", "b"], ["method=kivi", "--model", "a", "--text", "b"]):
        with pytest.raises(SystemExit):
            calibrate.calibrate_parser(None).parse_args(wrong)


@pytest.mark.parametrize(
    ("option", "least", "most"),
    [("sequences", 2, MOST_ROWS), ("length", 16, MOST_TOKENS), ("first_tokens", 0, 2047)],
)
def test_numbers_have_limits(option: str, least: int, most: int) -> None:
    """Each of the two texts gives at least one sequence, and a token of each sequence is read."""
    for value in (least, most):
        given = asked()
        setattr(given, option, value)
        calibrate.check_arguments(given)
    for value in (least - 1, most + 1):
        given = asked()
        setattr(given, option, value)
        with pytest.raises(ConfigError) as caught:
            calibrate.check_arguments(given)
        assert (caught.value.key, caught.value.value) == (f"--{option.replace('_', '-')}", value)
        assert f"{least} to {most}" in str(caught.value)


@pytest.mark.parametrize("share", ["0", "0.5"])
def test_shares_of_outliers(share: str) -> None:
    calibrate.check_arguments(asked("--outliers", share))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("outliers", "-0.1"),
        ("outliers", "0.51"),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device", "xcpu"),
        ("out", ""),
    ],
)
def test_values_that_are_none_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option}"):
        calibrate.check_arguments(asked(f"--{option}={value}"))


def test_a_gpu_must_be_there_to_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "has_gpu", lambda: False)
    for device in ("auto", "cpu", "mps"):
        calibrate.check_arguments(asked("--device", device))
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"--device={device}: no GPU is visible"):
            calibrate.check_arguments(asked("--device", device))
    monkeypatch.setattr(calibrate, "has_gpu", lambda: True)
    calibrate.check_arguments(asked("--device", "cuda:1", "--out", str(tmp_path / "a.safetensors")))
    for out in (str(tmp_path), "..", "a/.."):
        with pytest.raises(ConfigError, match="--out"):
            calibrate.check_arguments(asked("--out", out))
    for key in ("text", "path"):
        given = asked()
        setattr(given, key, [str(tmp_path / "a"), ""] if key == "text" else None)
        if key == "text":
            with pytest.raises(ConfigError, match="--text='': must name a file or folder"):
                calibrate.check_arguments(given)


@pytest.mark.parametrize(
    ("text", "sizes"), [("2,3,4", (2, 3, 4)), ("4", (4,)), ("4,2,2", (2, 4)), ("1", None), ("5", None), ("a", None)]
)
def test_sizes_of_codes(text: str, sizes: tuple[int, ...] | None) -> None:
    if sizes is not None:
        assert calibrate.code_sizes(text) == sizes
        return
    with pytest.raises(ConfigError) as caught:
        calibrate.code_sizes(text)
    assert (caught.value.key, caught.value.value) == ("--bits", text)


@pytest.mark.parametrize(
    ("method", "given", "key"),
    [
        ("oscar", {"bits": "4"}, "--bits"),
        ("oscar", {"outliers": 0.0}, "--outliers"),
        ("oscar", {"fisher": True}, "--fisher"),
        ("oscar", {"fisher": False}, "--no-fisher"),
        ("kvquant", {"per_head": True}, "--per-head"),
        ("oscar", {"per_head": True}, None),
        ("kvquant", {"bits": "4", "outliers": 0.1, "fisher": False}, None),
    ],
)
def test_options_of_another_calibration_are_refused(method: str, given: dict[str, Any], key: str | None) -> None:
    arguments = asked()
    for name, value in given.items():
        setattr(arguments, name, value)
    if key is None:
        return calibrate.check_options(method, arguments)
    with pytest.raises(ConfigError) as caught:
        calibrate.check_options(method, arguments)
    (value,) = given.values()
    assert (caught.value.key, caught.value.value) == (key, None if isinstance(value, bool) else value)
    assert f"method={method}" in str(caught.value) and "leave it out" in caught.value.hint
    return None


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A calibration of 2 layers of 4 x 8 whose model, texts and passes are stand-ins."""
    import torch

    from kvbench.calibration import calibrate as passes
    from kvbench.calibration import file, rotate
    from kvbench.models import load

    seen = SimpleNamespace(cut=[], made=[], saved=[])
    made = SimpleNamespace(info={"heads": "shared", "bits": [2, 4], "tokens": 96}, shape=(2, 4, 8))

    def tokenizer(text: str, verbose: bool) -> dict[str, list[int]]:
        assert verbose is False
        return {"input_ids": [len(text)]}

    def cut(ids: list[int], count: int, length: int, name: str) -> Any:
        seen.cut.append((ids, count, length, name))
        return torch.zeros(count, length, dtype=torch.long)

    def making(kind: str) -> Any:
        def make(model: Any, sequences: Any, **options: Any) -> Any:
            options["tell"](1, 1)
            seen.made.append((kind, model, tuple(sequences.shape), {**options, "tell": None}))
            return made

        return make

    chosen = SimpleNamespace(calibrated_as="o/tiny")
    monkeypatch.setattr(calibrate, "check_arguments", lambda arguments: None)
    monkeypatch.setattr(calibrate, "model_config", lambda *given: seen.__setattr__("model", given) or chosen)
    monkeypatch.setattr(calibrate, "text_documents", lambda name: [name, "xy"])
    monkeypatch.setattr(
        load,
        "load_model",
        lambda model, runtime: SimpleNamespace(model=runtime.device, max_length=64, tokenizer=tokenizer),
    )
    monkeypatch.setattr(passes, "cut_sequences", cut)
    monkeypatch.setattr(passes, "calibrate", making("calibrate"))
    monkeypatch.setattr(rotate, "rotations", making("rotations"))
    monkeypatch.setattr(file, "save", lambda calibration, path: seen.saved.append((calibration is made, str(path))))
    return seen


def test_texts_share_the_sequences_and_the_first_have_one_more(calibrated: SimpleNamespace) -> None:
    given = asked("--sequences", "5", "--device", "cpu", "--random", "--path", "p", "--dtype", "float32")
    said = calibrate.run_calibration(given)
    assert calibrated.cut == [([4, 2], 3, 64, "mini"), ([6, 2], 2, 64, "python")]
    assert calibrated.model == ("tiny", "p", "float32", True)
    ((kind, device, shape, options),) = calibrated.made
    assert (kind, device, shape) == ("calibrate", "cpu", (5, 64))
    digest = calibrate._digest_of_texts([["mini", "xy"], ["python", "xy"]])
    assert options == {
        "name": "o/tiny",
        "bits": (2, 3, 4),
        "outliers": 0.01,
        "fisher": True,
        "first_tokens": 0,
        "text_sha256": digest,
        "tell": None,
    }
    place = "results/calibration/o--tiny-1pct.safetensors"
    assert calibrated.saved == [(True, place)]
    assert said == f"{place}: [2, 4] bits, 1% outliers, 2 layers of 4 x 8, from 96 tokens"


def test_what_is_asked_for_is_handed_on(calibrated: SimpleNamespace) -> None:
    more = ["--length", "32", "--first-tokens", "2", "--out", "mine.safetensors"]
    calibrate.run_calibration(asked("--bits", "4", "--outliers", "0", "--no-fisher", *more))
    given = calibrate.calibrate_parser(None).parse_args(
        ["method=oscar", "--model", "a", "--text", "mini", "--per-head"]
    )
    assert "rotations, shared" in calibrate.run_calibration(given)
    given.per_head = None
    calibrate.run_calibration(given)
    (_, _, shape, one), (kind, _, _, two), (_, _, _, three) = calibrated.made
    assert shape == (16, 32) and (one["bits"], one["outliers"], one["fisher"]) == ((4,), 0.0, False)
    assert one["first_tokens"] == 2 and kind == "rotations"
    assert {two["per_head"], three["per_head"]} == {True, False} and two["per_head"]
    folder = "results/calibration/o--tiny"
    assert [place for _, place in calibrated.saved] == [
        "mine.safetensors", f"{folder}-oscar-heads.safetensors", f"{folder}-oscar.safetensors"
    ]  # fmt: skip


def test_progress_ends_its_line_when_all_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    calibrate._tell(1, 2)
    calibrate._tell(2, 2)
    assert capsys.readouterr().err == "\rcalibrating: 1 of 2 passes\rcalibrating: 2 of 2 passes\n"


def test_an_interruption_and_an_error_have_their_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends: dict[str, Any] = {"cause": None}

    def run(arguments: Any) -> str:
        if ends["cause"] is not None:
            raise ends["cause"]
        return "done"

    monkeypatch.setattr(calibrate, "run_calibration", run)
    words = ["--model", "tiny", "--text", "mini"]
    assert calibrate.main(words) == 0 and capsys.readouterr().out == "done\n"
    ends["cause"] = ConfigError("--bits", "7", "is wrong")
    assert calibrate.main(words) == 2 and capsys.readouterr().err.startswith("error: --bits=7")
    ends["cause"] = KeyboardInterrupt()
    assert calibrate.main(words) == 130


def test_texts_are_files_or_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(calibrate.GENERATED, "mini", lambda: ["generated"])
    assert calibrate.text_documents("mini") == ["generated"]
    Path("mini").write_text("a file of this name")
    assert calibrate.text_documents("mini") == ["a file of this name"]
    with pytest.raises(DataError, match=r"--text none does not exist\.\n  hint: .*--text mini python"):
        calibrate.text_documents("none")
    paths = {"stdlib": str(tmp_path)}
    monkeypatch.setattr(calibrate.sysconfig, "get_paths", lambda: paths)
    with pytest.raises(DataError, match="contains no Python sources"):
        calibrate.python()
    for name in ("b.py", "a.py", "c.txt"):
        Path(name).write_text(name)
    assert calibrate.python() == ["a.py", "b.py"]
