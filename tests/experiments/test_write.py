"""Files of a folded item: the stored cells are enough to make a table again, and to check it."""

import json
import math

import pytest

from experiments.checks import written
from experiments.checks.rules import check_documents
from experiments.data import Plan
from experiments.draw.table import item_markdown
from experiments.fold.cells import Cell, Folded, Heading, Verdict
from experiments.registry import items
from experiments.write import read_folded, write_item


def folded(**more):
    return Folded(
        headings=[Heading(name="Qasper", digits=1), Heading(name="Average", mean=True)],
        rows=["FP16", "Cocktail"],
        models=["tiny"],
        cells=[
            Cell(
                model="tiny",
                row="FP16",
                column="Qasper",
                paper=9.5,
                ours=8.25,
                stderr=0.5,
                n=20,
                runs=("a-b",),
                low=7.2,
                high=9.3,
            ),
            Cell(
                model="tiny",
                row="Cocktail",
                column="Qasper",
                ours=7.0,
                stderr=0.75,
                n=20,
                to_base=-1.25,
                to_base_stderr=1.0,
                low=5.4,
                high=8.6,
                to_base_low=-3.3,
                to_base_high=0.9,
            ),
            Cell(model="tiny", row="Cocktail", column="Average", reason="no data set is complete"),
        ],
        base="FP16",
        notes=["torch 2.13"],
        **more,
    )


def test_a_table_is_that_of_its_cells(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.write.draw_item", lambda item, folded, folder: "")
    item = items()["cocktail/table2"]
    verdict = Verdict(
        claim="it stays",
        model="tiny",
        paper=-0.1,
        ours=-1.25,
        stderr=1.0,
        n=20,
        low=-1.0,
        high=math.inf,
        unit="",
        verdict="undecided",
        least=-3.34,
        most=0.84,
        needed=2000,
    )
    whole = folded(verdicts=[verdict])
    where, _ = write_item(item, whole, Plan(out=tmp_path / "results"))
    folder = where.path
    content = json.loads((folder / "cells.json").read_text())
    assert item_markdown(item, read_folded(content)) == item_markdown(item, whole) == (folder / "table.md").read_text()
    assert read_folded(content).verdicts[0].high == math.inf
    document = str((folder / "table.md").relative_to(tmp_path))
    outcome = check_documents(written.items(tmp_path), tmp_path)
    assert (outcome.differences, outcome.lost, list(outcome.covered)) == ([], [], [document])

    shown = (folder / "table.md").read_text()
    (folder / "table.md").write_text(shown.replace("7.0", "9.0", 1))
    (difference,) = check_documents(written.items(tmp_path), tmp_path).differences
    assert "7.0" in difference.wanted and "9.0" in difference.shown


@pytest.mark.parametrize(("data", "shown"), [("real", False), ("mini", True), (None, True)])
def test_the_captions_part_on_points_is_left_out_of_real_data(data, shown, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.write.draw_item", lambda item, folded, folder: "")
    plan = Plan(out=tmp_path / "results", data=data) if data else Plan(out=tmp_path / "results")
    where, _ = write_item(items()["cocktail/table5"], folded(), plan)
    for name in ("table.md", "cells.json"):
        text = (where.path / name).read_text()
        assert "Without module I, as many chunks" in text and ("Measured on an H200 with random" in text) is shown
