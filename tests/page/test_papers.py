"""Tables of papers that runs of the report belong to."""

from __future__ import annotations

import json

from experiments.page.made import run_id
from kvbench.page import papers


def item(*runs, **more):
    cell = {
        "row": "KIVI",
        "column": "Average",
        "model": "tiny",
        "paper": 48.0,
        "ours": 50.0,
        "stderr": 1.5,
        "runs": runs,
    }
    claim = {"claim": "is better", "model": "tiny", "paper": 0.5, "ours": 2.0, "stderr": None, "unit": "%"}
    content = {
        "item": "cocktail/table2",
        "number": "Table II",
        "title": "Cocktail",
        "notes": ["made on a laptop"],
        "headings": [{"name": "Average", "unit": "%"}],
        "cells": [cell, {**cell, "column": "n", "paper": None}],
        "claims": [{**claim, "verdict": "holds"}, {**claim, "ours": None}],
    }
    return content | more


def write(folder, content, place="cocktail/table2/tiny-mini"):
    (folder / place).mkdir(parents=True)
    (folder / place / "cells.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_items_with_a_run_of_the_report_are_shown(tmp_path):
    write(tmp_path, item(run_id(1)))
    write(tmp_path, item(run_id(2)), "cocktail/table3")
    (shown,), notes = papers.items(tmp_path, {run_id(1)})
    assert notes == []
    assert shown["cells"] == [["KIVI", "Average", "tiny", "%", 48, 50, 1.5, run_id(1)]]
    assert shown["claims"] == [["is better", "tiny", 0.5, 2, None, "%", "holds"]]


def test_damaged_files_are_named(tmp_path):
    write(tmp_path, "[" * 50_000, "logquant/table1")
    write(tmp_path, {"cells": 3}, "logquant/table2")
    write(tmp_path, "[]", "logquant/table3")
    write(tmp_path, item(run_id(1)))
    shown, notes = papers.items(tmp_path, {run_id(1)})
    assert len(shown) == 1 and len(notes) == 3 and all("not the table of a paper" in note for note in notes)


def test_the_page_holds_only_so_much_of_the_papers(tmp_path):
    for number in range(20):
        cells = [{**item(run_id(1))["cells"][0], "row": "x" * 80}] * 200
        write(tmp_path, item(run_id(1), cells=cells), f"paper/table{number}")
    shown, notes = papers.items(tmp_path, {run_id(1)})
    assert 0 < len(shown) < 20 and len(notes) == 20 - len(shown)
    assert len(json.dumps(shown)) < 1.2 * papers.MOST_BYTES
