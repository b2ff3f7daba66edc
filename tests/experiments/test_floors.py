"""Floors of data sets: how they are computed, kept and read, and which claims they judge."""

from __future__ import annotations

import json

import pytest

from experiments.data import Plan
from experiments.fold.grid import Source, fold_grid
from experiments.real import files, floor_file, floors
from experiments.registry import items
from experiments.stored import load_result_json
from kvbench.errors import DataError
from kvbench.tasks.base import Sample
from tests.experiments.test_real import scored

#: a model without weights that are pinned by a package
OTHER = "smollm2-135m"


class Exact:
    """A data set that scores 1 for the reference answer."""

    def score(self, sample, prediction):
        return {"score": float(prediction == sample.answers[0])}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of results without floors."""
    monkeypatch.setattr(floor_file, "ROOT", tmp_path)
    return tmp_path


def keep_floors(verdict, n=8, model=files.MODEL, **more):
    """Write the floors of QMSum for a model."""
    figures = {"fp16": 0.5, "empty": 0.0, "random": 0.0, "gap": {}, "reason": "not run"}
    whole = {"model": model, "digest": floor_file.model_digest(model), **more}
    whole["lines"] = [{"name": "longbench_cocktail/qmsum", "n": n, "verdict": verdict, **figures}]
    path = floor_file.floor_path(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole), encoding="utf-8")


def folded_with(model=files.MODEL, run=True, data="real"):
    """Cocktail's Table III of rows that decide its claims, or of none."""
    item = items()["cocktail/table3"]
    rows = {row.name: {f"q/{i}": scored(i, row.name) for i in range(8)} for row in item.rows}
    sources = {
        (model, name, column.name): Source(own, ("run",)) if run else Source({}, reason="not run")
        for name, own in rows.items()
        for column in item.columns
    }
    return fold_grid(item, Plan(models=(model,), data=data), sources)


def test_floors_of_answers_that_know_nothing():
    asked = [Sample(str(i), "t", "p", (answer,), 1) for i, answer in enumerate("AABA")]
    empty, other = floors.floor_scores(Exact(), asked)
    assert empty == [0.0] * 4 and other == [0.0, 1.0, 0.0, 1.0]
    right, wrong = [1.0] * 6, [0.0] * 6
    half = [1.0, 0.0] * 3
    assert floors.figures([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], wrong, wrong)["verdict"] == floor_file.ABOVE
    assert floors.figures(half, wrong, half[::-1])["verdict"] == floor_file.AT
    assert floors.figures(wrong, wrong, half)["verdict"] == floor_file.AT  # worse than the floor
    assert floors.figures(right[:2], wrong[:2], wrong[:2])["verdict"] == floor_file.UNKNOWN
    gap = floors.figures(half, wrong, wrong)["gap"]
    assert gap["value"] == 0.5 and gap["low"] < 0.5 < gap["high"]
    whole = {"lines": [{"name": "x", "n": 6, "run": "a-b", "devices": ["Abacus"], **floors.figures(half, wrong, wrong)},
                       {"name": "y", "n": 0, "verdict": floor_file.UNKNOWN, "reason": "no file"},
                       {"name": "z", "n": 6, **floors.figures(half, wrong, wrong)}]}  # fmt: skip
    text = floors.floors_markdown(whole)
    assert (
        "| x | 6 | 50.0 | 0.0 | 0.0 | +50.0 [" in text and "| y | 0 | - | - | - | - | too few rows: no file |" in text
    )
    assert "- Measured on Abacus: x (a-b).\n" in text and "by runs that were not noted: z.\n" in text


def test_stored_floors_stay_where_the_runs_here_have_fewer_rows():
    old = [{"name": "x", "n": 9}, {"name": "y", "n": 0}, {"name": "z", "n": 4}]
    here = [{"name": "x", "n": 3}, {"name": "y", "n": 2}, {"name": "z", "n": 4, "run": "a-b"}, {"name": "new", "n": 1}]
    assert floors.with_stored(here, old) == [old[0], *here[1:]]
    assert floors.with_stored(here, []) == here


def test_claims_on_sets_at_the_floor_are_counted_apart(folder):
    words = {one.verdict for one in folded_with().verdicts}
    assert "at the floor" not in words and "holds" in words
    for verdict in (floor_file.AT, floor_file.ABOVE):
        keep_floors(verdict)
        folded = folded_with()
        lost = verdict == floor_file.AT
        assert ("at the floor" in {one.verdict for one in folded.verdicts}) == lost
        assert any("At the floor" in note for note in folded.notes) == lost
        assert not any("not known" in note or "no floors" in note for note in folded.notes)
    keep_floors(floor_file.AT)
    none = folded_with(run=False).verdicts
    assert {(one.verdict, one.ours) for one in none} == {("at the floor", None)}
    assert not any("floor" in note for note in folded_with(data="paper").notes)


def test_claims_on_sets_whose_floor_is_not_known_are_judged(folder):
    words = [one.verdict for one in folded_with().verdicts]
    for n in (0, 3):
        keep_floors(floor_file.UNKNOWN, n)
        folded = folded_with()
        assert [one.verdict for one in folded.verdicts] == words
        assert "Judged, although their floor is not known: QMSum." in folded.notes
        assert not any("At the floor" in note for note in folded.notes)


def test_floors_judge_the_claims_of_their_model_alone(folder):
    keep_floors(floor_file.AT)
    for model in (OTHER, "tiny"):
        folded = folded_with(model)
        assert "at the floor" not in {one.verdict for one in folded.verdicts}
        assert any(f"no floors are known for this model ({model})" in note for note in folded.notes)
    keep_floors(floor_file.AT, model=OTHER)
    assert "at the floor" in {one.verdict for one in folded_with(OTHER).verdicts}
    for more in ({"digest": "0" * 64}, {"model": OTHER}):  # other weights of this name, another model's file
        keep_floors(floor_file.AT, **more)
        folded = folded_with()
        assert "at the floor" not in {one.verdict for one in folded.verdicts}
        assert any("no floors are known for this model" in note for note in folded.notes)


def test_models_are_told_apart_by_their_weights(tmp_path):
    assert len(floor_file.model_digest(files.MODEL)) == 64
    assert floor_file.model_digest(OTHER) != floor_file.model_digest(files.MODEL)
    first = tmp_path / "m.gguf"
    first.write_bytes(b"one")
    digest = floor_file.model_digest(str(first))
    second = tmp_path / "n.gguf"
    second.write_bytes(b"two")
    assert digest != floor_file.model_digest(str(second))
    assert floor_file.floor_path("./m.gguf") != floor_file.floor_path(files.MODEL)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        '{"lines": 3}',
        '{"model": "m", "lines": 3}',
        '{"model": "m", "lines": [3]}',
        '{"model": "m", "lines": [{"name": "x", "n": 0, "reason": "not run"}]}',
        '{"model": "m", "lines": [{"name": "x", "n": 5, "verdict": "above"}]}',
        '{"model": "m", "lines": [{"name": "x", "n": 0, "reason": "", "verdict": ["above"]}]}',
    ],
)
def test_a_damaged_file_of_floors_is_named(folder, text):
    path = floor_file.floor_path(files.MODEL)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(DataError, match=rf"{path} is damaged: .*\n  hint: restore it \(git checkout\), or delete it"):
        folded_with()


def test_stored_floors_are_of_the_model_that_they_name():
    path = floor_file.floor_path(files.MODEL)
    whole = floor_file.read_floors(path)
    assert whole == load_result_json("results/smollm2/floors/floors.json")
    assert (whole["model"], whole["digest"]) == (files.MODEL, floor_file.model_digest(files.MODEL))
    text = f"Model: {files.MODEL}\n\n{floors.floors_markdown(whole)}"
    assert text == path.with_name("table.md").read_text(encoding="utf-8")
    none = {line["name"] for line in whole["lines"] if line["n"] < floors.FEWEST}
    assert none == {line["name"] for line in whole["lines"] if line["verdict"] == floor_file.UNKNOWN}
