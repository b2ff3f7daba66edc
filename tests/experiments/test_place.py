"""Where tables go: trials unless asked, nothing of fewer samples over more, no picture beside other numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from experiments import place, registry, session
from experiments.__main__ import main
from experiments.data import Plan
from experiments.fold.cells import Cell, Folded, Heading
from experiments.item import Column, Grid, Model, Row
from experiments.place import Choice, place_result, trial_of
from experiments.write import write_item

ITEM = Grid(
    id="cocktail/table9",
    number="Table IX",
    title="A table",
    caption="",
    models=(Model("llama2-7b", "Llama2-7B"),),
    rows=(Row(name="A", setting="fp16"), Row(name="B", setting="kivi")),
    columns=(Column(name="score", data="longbench_cocktail", task="qmsum"),),
    draw="bars",
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository of its own, without pictures."""
    monkeypatch.setattr("experiments.write.draw_item", lambda *rest: "")
    monkeypatch.setattr(place, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folded(*counts):
    cells = [Cell(model="m", row=row, column="score", ours=50.0 + n, n=n) for row, n in zip("AB", counts, strict=False)]
    cells += [Cell(model="m", row=row, column="score", reason="no weights") for row in "AB"[len(counts) :]]
    return Folded(headings=[Heading(name="score")], rows=["A", "B"], models=["m"], cells=cells)


def plan(root, **more):
    return Plan(data="mini", models=("tiny",), out=root / "results", **more)


def test_a_table_goes_to_the_trials_unless_it_is_to_be_written(root):
    kept = root / "results" / "cocktail" / "table9" / "tiny-mini"
    where, _ = write_item(ITEM, folded(20, 20), plan(root))
    assert where.path == root / "results" / "trials" / "cocktail" / "table9" / "tiny-mini" and not kept.exists()
    assert str(kept) in where.said and "--write" in where.said and where.say() == 0
    where, _ = write_item(ITEM, folded(20, 20), plan(root, write=True))
    assert where.path == kept and not where.said and json.loads((kept / "cells.json").read_text())["rows"] == ["A", "B"]


@pytest.mark.parametrize("counts", [(2, 20), (20,)])
def test_fewer_samples_replace_more_only_when_told_twice(root, counts, capsys):
    kept, _ = write_item(ITEM, folded(20, 20), plan(root, write=True))
    before = (kept.path / "cells.json").read_bytes()
    where, _ = write_item(ITEM, folded(*counts), plan(root, write=True))
    assert where.refused and where.path != kept.path and (where.path / "table.md").exists()
    assert (kept.path / "cells.json").read_bytes() == before
    assert where.say() == 1
    row = "AB"[len(counts) - 1] if len(counts) == 1 else "A"
    lost = "m, B, score: 0 in place of 20" if counts == (20,) else f"m, {row}, score: 2 in place of 20"
    assert lost in capsys.readouterr().err
    where, _ = write_item(ITEM, folded(*counts), plan(root, write=True, replace=True))
    assert where.path == kept.path and not where.refused and (kept.path / "cells.json").read_bytes() != before


def test_a_folder_of_ones_own_is_written_without_asking_but_not_over_more_samples(root):
    own = Plan(out=root / "mine")
    first, _ = write_item(ITEM, folded(20, 20), own)
    assert first.path == root / "mine" / "cocktail" / "table9"
    again, _ = write_item(ITEM, folded(2, 2), own)
    assert again.refused and again.path == root / "mine" / "cocktail" / "trials" / "table9"


def test_a_picture_does_not_stay_beside_other_numbers(root, monkeypatch):
    kept, _ = write_item(ITEM, folded(20, 20), plan(root, write=True))
    (kept.path / "figure.png").write_bytes(b"old")
    monkeypatch.setattr(place, "drawable", lambda: False)
    monkeypatch.setattr("experiments.write.draw_item", lambda *rest: "no figure, because matplotlib is not installed")
    same, _ = write_item(ITEM, folded(20, 20), plan(root, write=True))
    assert same.path == kept.path and (kept.path / "figure.png").exists()  # of the same numbers
    other = folded(30, 30)
    trial = root / "results" / "trials" / "cocktail" / "table9" / "tiny-mini"
    trial.mkdir(parents=True)
    (trial / "figure.png").write_bytes(b"older")
    where, _ = write_item(ITEM, other, plan(root, write=True))
    assert where.refused and "matplotlib" in where.said and (kept.path / "figure.png").exists()
    assert where.path == trial and not (trial / "figure.png").exists()
    where, _ = write_item(ITEM, other, plan(root, write=True, replace=True))
    assert where.path == kept.path and not (kept.path / "figure.png").exists() and "removed" in where.said


def test_files_of_other_commands_follow_the_same_rule(root):
    file = root / "results" / "h200" / "greedy.json"
    assert place_result(file, Choice()).path == root / "results" / "trials" / "h200" / "greedy.json"
    assert place_result(file, Choice(write=True), {"rows": 3}, {"rows": 3}).path == file
    few = place_result(file, Choice(write=True), {"rows": 2}, {"rows": 3, "columns": 1})
    assert few.refused and "rows: 2 in place of 3; columns: 0 in place of 1" in few.said
    assert place_result(root / "docs" / "page.md", Choice()).path != root / "docs" / "page.md"
    runs = root / "results" / "runs" / "x"
    assert place_result(runs, Choice()).path == runs  # git ignores it
    assert trial_of(root / "results" / "a") == root / "results" / "trials" / "a"


def test_an_item_without_a_number_writes_nothing_and_says_what_to_type(root, monkeypatch, capsys):
    monkeypatch.setattr(registry, "items", lambda: {ITEM.id: ITEM})
    empty = replace(folded(), cells=[Cell(model="m", row="A", column="score", reason="no weights\n  hint")])
    monkeypatch.setattr(session, "folded_of", lambda *rest: empty)
    monkeypatch.setattr(session, "execute_all", lambda *rest: iter(()))
    monkeypatch.setattr(session, "item_runs", lambda *rest: [])
    for more in ([], ["--write"], ["--models", "tiny"]):
        assert main([ITEM.id, "--out", "results", *more]) == 1
        error = capsys.readouterr().err
        assert "cocktail/table9: nothing was written" in error and "no weights" in error and "hint" in error
        assert "python -m experiments cocktail/table9 --models tiny --data mini" in error
    assert not (root / "results").exists()
    shutil.rmtree(root / "results", ignore_errors=True)


def test_replacing_needs_writing(capsys):
    with pytest.raises(SystemExit):
        main(["cocktail/table2", "--replace"])
    assert "--replace needs an item and --write" in capsys.readouterr().err
