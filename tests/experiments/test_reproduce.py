"""The page of all items: what it says of results, and that docs/reproduce.md is what the results give."""

import json

import pytest

from experiments import reproduce
from experiments.checks.rules import check_documents
from experiments.item import Column, Grid, Row

ITEM = Grid(
    id="cocktail/table9",
    number="Table IX",
    title="A table",
    caption="A caption.",
    rows=(Row(name="FP16", setting="fp16"),),
    columns=(Column(name="Mini", data="mini"),),
)


def claim(verdict, ours=1.5, **more):
    one = {"claim": "KIVI loses", "model": "tiny", "paper": None, "verdict": verdict, "ours": ours, "stderr": 0.25}
    return {**one, "n": 20, "low": 0.0, "high": None, "unit": "points", **more}


def write(folder, cells, claims=(), marks=()):
    folder.mkdir(parents=True)
    content = {"cells": [{"ours": number} for number in cells], "claims": claims, "marks": marks, "limit": 8}
    (folder / "cells.json").write_text(json.dumps(content), encoding="utf-8")


def test_an_item_without_results_says_so(tmp_path):
    text = reproduce.page([ITEM], tmp_path, {"cocktail/table9": {"runs": 3, "hours": 1.25, "gib": 14.0}})
    assert "| [cocktail/table9](#cocktailtable9) | Table IX: A table | 1.2 h, 14 GiB (3 runs) | - | - |" in text
    assert "Nothing was measured here." in text


def test_claims_come_with_the_number_that_decides_them(tmp_path):
    claims = [
        claim("holds", least=1.0, most=2.0),
        claim("holds", least=1.1, most=2.0),
        claim("does not hold", -2.0, least=-3.0, most=-1.0),
        claim("undecided", needed=30, least=-0.5, most=3.5),
        claim("undecided", n=1, unit="percent", label="one measurement"),
        claim("cannot be seen"),  # of an older version
        claim("not comparable", reason="eager steps"),
        claim("not run", None),
    ]
    write(tmp_path / "cocktail" / "table9" / "tiny-mini", [1.0, None, 2.0], claims)
    text = reproduce.page([ITEM], tmp_path, {})
    counts = "2 hold, 1 does not hold, 3 undecided, 1 not comparable, 1 not run"
    assert f"| not predicted | tiny-mini: 2 of 3 | tiny-mini: {counts} |" in text
    assert "- holds: KIVI loses: +1.50 points [+1.00, +2.00], n = 20\n" in text
    assert "- does not hold: KIVI loses: -2.00 points [-3.00, -1.00], n = 20\n" in text
    assert "- undecided: KIVI loses: +1.50 points [-0.50, +3.50], n = 20 (about 30 samples would)\n" in text
    assert "- undecided: KIVI loses: +1.50 percent (one measurement)\n" in text
    assert "- not comparable: KIVI loses: +1.50 points: eager steps\n" in text
    assert text.index("A claim *holds* where") < text.index("- holds:"), "the rule stands above the list"
    assert "- not run: 1 claim" in text and "tiny-mini, at most 8 samples per data set ([table]" in text
    place = tmp_path / "cocktail" / "table9" / "tiny-mini" / "cells.json"
    more = "At most 8 samples per data set; more, of runs that other tables share: Mini (20)."
    place.write_text(json.dumps({**json.loads(place.read_text(encoding="utf-8")), "notes": ["Files: a.", more]}))
    assert f"tiny-mini, a{more[1:-1]} ([table]" in reproduce.page([ITEM], tmp_path, {})


def test_claims_of_all_items_are_counted_together_by_models_and_data(tmp_path):
    second = Grid(**{**vars(ITEM), "id": "cocktail/table8"})
    words = ["holds", "holds", "does not hold", "undecided", "at the floor", "not comparable", "not run"]
    rows = claim("undecided", label="without sets at the floor: A; needs more rows than are at hand")
    write(tmp_path / "cocktail/table9/small-real", [1.0], [*map(claim, words), rows])
    write(tmp_path / "cocktail/table8/small-real", [1.0], [claim("does not hold", n=30), rows, rows])
    write(tmp_path / "cocktail/table8/tiny-mini", [1.0], [claim("undecided"), claim("cannot be seen")])
    text = reproduce.page([ITEM, second], tmp_path, {})
    assert "| small-real | 2 | 11 | 4 (2 hold, 3 with n below 30) | 1 | 3 | 1 | 1 | 1 |" in text
    assert "| tiny-mini | 1 | 2 | 0 (0 hold) | 2 | 0 | 0 | 0 | 0 |" in text


@pytest.mark.parametrize(("cells", "marks"), [([None], ()), ([1.0], ("format only",))])
def test_empty_tables_and_generated_records_are_no_results(tmp_path, cells, marks):
    write(tmp_path / "cocktail" / "table9" / "tiny-standin", cells, [claim("holds")], marks)
    assert "Nothing was measured here." in reproduce.page([ITEM], tmp_path, {})


def test_the_page_is_what_the_results_give():
    """After new results: python -m experiments --reproduce --write."""
    from experiments.registry import items

    outcome = check_documents([reproduce.reproduce_block(list(items().values()))])
    assert (outcome.differences, outcome.lost) == ([], [])
