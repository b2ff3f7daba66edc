"""Calibration files: which model and format they are of, what is written, and what is refused by name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvbench.calibration import calibrate as library
from kvbench.calibration import file
from kvbench.calibration.fit import BINS, Codebook, Histogram, SideFit, levels
from kvbench.errors import ConfigError
from tests import zoo


def made(**info: str) -> file.Calibration:
    """One layer of one KV head with two channels, and codebooks of 2 bits."""
    tensors = {
        "layers.0.key.thresholds": torch.tensor([[1.0, 2.0], [-1.0, -2.0]]).half(),
        "probe.keys": torch.tensor([3.0, 4.0]),
    }
    for number, side in enumerate(("key", "value")):
        tensors[f"layers.0.{side}.levels.2"] = torch.arange(4.0) + 10 * number
        tensors[f"layers.0.{side}.norm.2"] = torch.tensor([1.5, 0.25 + number])
    base = {"format": file.FORMAT, "model": "toy", "bits": "2", "outliers": "0.01", "layers": "1", "kv_heads": "1"}
    return file.Calibration({**base, "head_dim": "2", **info}, tensors)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "toy.safetensors"
    file.save(made(), path)
    assert os.listdir(path.parent) == ["toy.safetensors"]  # nothing partial beside it
    read = file.load_calibration(path)
    assert read.path == path and (read.bits, read.outliers, read.shape) == ((2,), 0.01, (1, 1, 2))
    assert read.thresholds(0).tolist() == [[1.0, 2.0], [-1.0, -2.0]]
    assert read.levels(0, "key", 2).tolist() == [0, 1, 2, 3] and read.levels(0, "value", 2)[0] == 10
    assert read.norm(0, "value", 2).tolist() == [1.5, 1.25] and read.norm(0, "key", 2).tolist() == [1.5, 0.25]
    assert dict(read.expected()) == {
        "layers.0.key.thresholds": (2, 2),
        **{
            f"layers.0.{side}.{what}.2": (4,) if what == "levels" else (2,)
            for side in ("key", "value")
            for what in ("levels", "norm")
        },
    }
    assert file.load_calibration(path) is read  # an unchanged file is read once
    file.save(made(model="other"), path)
    assert file.load_calibration(path).info["model"] == "other"


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"method\.calibration=.*none\.safetensors: does not exist(?s:.*)kvbench\.calibrate"
    ):
        file.load_calibration(tmp_path / "none.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out=.*: cannot be written"):
        file.save(made(), tmp_path / "file" / "x.safetensors")
    for info, message in (({"model": None}, "metadata is incomplete"), ({"outliers": "x"}, "metadata is incomplete")):
        kept = {key: value for key, value in {**made().info, **info}.items() if value is not None}
        path = tmp_path / f"{len(os.listdir(tmp_path))}.safetensors"
        save_file(dict(made().tensors), path, kept)
        with pytest.raises(ConfigError, match=message):
            file.load_calibration(path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("key.levels.2", lambda t: -3 * t, r"key\.levels\.2 is not a codebook of ascending levels, but -0, -3, -6, -9"),
        ("value.levels.2", lambda t: 0 * t, r"value\.levels\.2 is not a codebook of ascending levels, but 0, 0, 0, 0"),
        ("key.levels.2", lambda t: t[[0, 2, 1, 3]], "is not a codebook of ascending levels, but 0, 2, 1, 3"),
        ("key.levels.2", lambda t: t.char(), "is not a finite tensor"),
        ("key.levels.2", lambda t: t / 0, "is not a finite tensor"),
        ("key.thresholds", lambda t: t.flip(0), r"thresholds has an upper threshold below the lower one, -1 and 1 in"),
        ("key.thresholds", lambda t: t.char(), "is not a finite tensor"),
        ("value.norm.2", lambda t: -t, r"value\.norm\.2 has a scale that is not positive, -1\.5"),
    ],
)
def test_tensors_that_no_calibration_makes_are_refused_by_name(tmp_path: Path, name: str, change: Any, message: str):
    key, good = f"layers.0.{name}", made()
    path = tmp_path / "toy.safetensors"
    save_file({**good.tensors, key: change(good.tensors[key]).contiguous()}, path, dict(good.info))
    with pytest.raises(ConfigError, match=f"is damaged: .*{message}(?s:.*)kvbench.calibrate --model toy"):
        file.load_calibration(path)


def test_a_level_that_is_repeated_for_want_of_others_is_read(tmp_path: Path) -> None:
    good = made()
    repeated = {"layers.0.key.levels.2": torch.tensor([-0.5, 0.0, 0.5, 0.5])}
    file.save(replace(good, tensors={**good.tensors, **repeated}), tmp_path / "a.safetensors")
    assert file.load_calibration(tmp_path / "a.safetensors").levels(0, "key", 2)[-1] == 0.5


def test_others_may_read_a_file_as_they_may_any_new_one(tmp_path: Path) -> None:
    file.save(made(), tmp_path / "a.safetensors")
    (tmp_path / "b").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_format_is_one_that_the_file_has() -> None:
    read = replace(made(bits="2,4"), path=Path("x"))
    for bits, outliers in ((2, 0.01), (4, 0.01 + 1e-10)):
        read.check_format(bits, outliers)
    with pytest.raises(ConfigError, match=r"method\.bits=3: x contains only codebooks with 2,4 bits") as caught:
        read.check_format(3, 0.01)
    assert "allowed: 2, 4" in str(caught.value)
    with pytest.raises(ConfigError, match=r"method\.outliers=0\.02: x was made with outliers=0\.01") as caught:
        read.check_format(2, 0.02)
    assert "--outliers 0.02" in str(caught.value)


def test_a_model_is_known_up_to_the_rounding_of_its_weights() -> None:
    read, recorded = made(), torch.tensor([3.0, 4.0])  # of norm 5: a difference of 0.05 is one per cent
    assert read.matches({"probe.keys": recorded + torch.tensor([0.049, 0.0])})
    assert not read.matches({"probe.keys": recorded + torch.tensor([0.0, 0.051])})
    assert not read.matches({"probe.keys": torch.tensor([3.0, 4.0, 0.0])})
    embedding = torch.tensor([1.0])
    assert read.matches({"probe.embedding": embedding}) and read.matches({})  # nothing to compare
    both = replace(read, tensors={**read.tensors, "probe.embedding": embedding})
    assert not both.matches({"probe.embedding": 2 * embedding}) and both.matches({"probe.embedding": embedding})
    assert both.matches({"probe.keys": recorded, "probe.embedding": 2 * embedding})  # the keys decide


def test_files_of_folders_come_by_name_and_hints_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("b", "z"), ("b", "a"), ("a", "m")):
        file.save(made(model=name), tmp_path / folder / f"{name}.safetensors")
    (tmp_path / "b" / "x.txt").write_text("no calibration")
    listed = Path.glob  # file systems list their files in any order
    monkeypatch.setattr(Path, "glob", lambda self, pattern: sorted(listed(self, pattern), reverse=True))
    computed = file.calibrations_in([tmp_path / "b", tmp_path / "none", tmp_path / "a"])
    assert [each.info["model"] for each in computed] == ["a", "z", "m"]
    assert (
        file.command("toy", 3, 0.01) == "python -m kvbench.calibrate --model toy --text FILE --bits 3 --outliers 0.01"
    )
    assert file.versions().keys() == {"kvbench", "torch", "transformers"}


def fitted(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[file.Calibration, list[Any], list[Any]]:
    """A calibration of a random model whose fits are noted and not made."""
    fits: list[Any] = []

    def fit(x: Any, weights: Any, bits: Any, share: float, skip: Any) -> SideFit:
        fits.append((tuple(x.shape), weights is not None, bits, share, skip))
        return SideFit(None, {width: Codebook(torch.zeros(1 << width), (1.5, 0.5)) for width in bits})

    monkeypatch.setattr(library, "fit_keys", fit)
    monkeypatch.setattr(library, "fit_values", fit)
    told: list[Any] = []
    ids, _ = zoo.padded_batch([20, 20])
    calibration = library.calibrate(
        zoo.model("llama"), ids, name="toy", tell=lambda *numbers: told.append(numbers), **settings
    )
    return calibration, fits, told


def test_a_file_says_how_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fits, told = fitted(monkeypatch, bits=(4, 2), outliers=0.05, first_tokens=3, text_sha256="abc")
    info = dict(found.info)
    assert {name: info.pop(name) for name in ("kvbench", "torch", "transformers")} == file.versions()
    assert info == {
        "format": "kvbench-kvquant-1",
        "model": "toy",
        "bits": "2,4",
        "outliers": "0.05",
        "layers": "2",
        "kv_heads": "2",
        "head_dim": "64",
        "fisher": "true",
        "first_tokens": "3",
        "sequences": "2",
        "tokens": "40",
        "text_sha256": "abc",
        "dtype": "float32",
    }
    assert [given[:4] for given in fits] == [((40, 128), True, [2, 4], 0.05)] * 4
    assert fits[0][4].tolist() == ([True] * 3 + [False] * 17) * 2
    assert told == [(1, 2), (2, 2)]
    assert found.tensors["layers.1.value.norm.4"].tolist() == [1.5, 0.5]
    assert found.tensors["layers.0.key.levels.2"].shape == (4,) and "probe.embedding" in found.tensors
    plain, fits, _ = fitted(monkeypatch, fisher=False)
    assert (plain.info["fisher"], plain.info["bits"], plain.info["outliers"]) == ("false", "2,3,4", "0.01")
    assert not fits[0][1] and fits[0][4] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": ()}, "--bits"),
        ({"bits": (1, 2)}, r"--bits=1,2: a codebook must have 2, 3 or 4 bits"),
        ({"outliers": 1.0}, r"--outliers=1\.0: is not a valid share"),
        ({"outliers": -0.01}, r"--outliers=-0\.01"),
        ({"first_tokens": 20}, "leaves no tokens, because sequences have 20 tokens"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted(monkeypatch, **settings)
    fitted(monkeypatch, outliers=0.0, first_tokens=19, bits=(2,))


def test_sequences_are_spread_over_the_text() -> None:
    assert library.cut_sequences(range(100), 3, 20).tolist() == [[*range(20)], [*range(40, 60)], [*range(80, 100)]]
    assert library.cut_sequences(range(100), 1, 20)[0, 0] == 0 and library.cut_sequences(
        range(60), 3, 20
    ).flatten().tolist() == [*range(60)]
    with pytest.raises(
        library.DataError,
        match=r"^a book has 59 tokens; 3 sequences of 20 tokens need 60\.\n  hint: "
        r"provide more text, or use --sequences 2$",
    ):
        library.cut_sequences(range(59), 3, 20, "a book")


def test_a_histogram_has_all_values_in_their_bins() -> None:
    histogram = Histogram.empty()
    histogram.add(torch.tensor([[-1.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    assert histogram.total == 8.0 and histogram.weight[0] == 1.0 and histogram.weight[-1] == 2.0
    assert histogram.weight[BINS * 3 // 4] == 5.0 and histogram.first[BINS * 3 // 4] == 2.5
    mean, deviation = histogram.moments()
    assert mean == pytest.approx(3.5 / 8) and deviation == pytest.approx((4.25 / 8 - (3.5 / 8) ** 2) ** 0.5)
    assert [float(part[-1]) for part in histogram.sums()] == [8.0, 3.5, 4.25]
    assert all(part[0] == 0 and len(part) == BINS + 1 for part in histogram.sums())
    plain = Histogram.empty()
    plain.add(torch.tensor([-0.5, 0.25, 0.25]))
    plain.add(torch.tensor([0.75]))
    assert plain.total == 4.0 and levels(plain, 3).tolist() == [-0.5, 0.25, 0.75]
    assert levels(plain, 3).dtype == torch.float32
