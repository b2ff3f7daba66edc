"""The page of all items: what it says of results, and that docs/reproduce.md is what the results give."""

import json

import pytest

from experiments import reproduce
from experiments.item import Column, Grid, Row

ITEM = Grid(
    id="cocktail/table9",
    number="Table IX",
    title="A table",
    caption="A caption.",
    rows=(Row(name="FP16", setting="fp16"),),
    columns=(Column(name="Mini", data="mini"),),
)


def claim(verdict, ours=1.5, stderr=0.25, model="tiny"):
    return {"claim": "KIVI loses", "model": model, "verdict": verdict, "ours": ours, "stderr": stderr, "unit": "%"}


def write(folder, cells, claims=(), marks=()):
    folder.mkdir(parents=True)
    content = {"cells": [{"ours": number} for number in cells], "claims": claims, "marks": marks, "limit": 8}
    (folder / "cells.json").write_text(json.dumps(content), encoding="utf-8")


def test_an_item_without_results_says_so(tmp_path):
    text = reproduce.page([ITEM], tmp_path, {"cocktail/table9": {"runs": 3, "hours": 1.25, "gib": 14.0}})
    assert "| [cocktail/table9](#cocktailtable9) | Table IX: A table | 1.2 h, 14 GiB (3 runs) | - | - |" in text
    assert "Nothing was measured here." in text


def test_claims_come_with_the_number_that_decides_them(tmp_path):
    claims = [claim("holds"), claim("does not hold", -2.0, None), claim("not run", None, None)]
    write(tmp_path / "cocktail" / "table9" / "tiny-mini", [1.0, None, 2.0], claims)
    text = reproduce.page([ITEM], tmp_path, {})
    assert "| not predicted | tiny-mini: 2 of 3 | tiny-mini: 1 hold, 1 do not |" in text
    assert "- holds: KIVI loses: +1.50 ±0.25 %" in text and "- does not hold: KIVI loses: -2.00 %" in text
    assert "- not run: 1 claim" in text and "at most 8 samples" in text


@pytest.mark.parametrize(("cells", "marks"), [([None], ()), ([1.0], ("format only",))])
def test_empty_tables_and_generated_records_are_no_results(tmp_path, cells, marks):
    write(tmp_path / "cocktail" / "table9" / "tiny-standin", cells, [claim("holds")], marks)
    assert "Nothing was measured here." in reproduce.page([ITEM], tmp_path, {})


def test_the_page_is_what_the_results_give():
    """After new results: python -m experiments --reproduce --write."""
    from experiments.registry import items

    text = reproduce.page(list(items().values()), reproduce.ROOT / "results", reproduce.predicted())
    assert reproduce.generated() == text
