"""Tables of papers that runs of the report belong to."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.page.made import run_id
from kvbench.page import papers
from kvbench.page.numbers import encoded

RESULTS = Path(__file__).resolve().parents[2] / "results"


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
    apart = {"verdict": "not comparable", "reason": "eager steps", "least": 1.0, "most": 4.0}
    claim = {"claim": "is better", "model": "tiny", "paper": 0.5, "ours": 2.0, "stderr": None, "unit": "%"}
    content = {
        "item": "cocktail/table2",
        "number": "Table II",
        "title": "Cocktail",
        "notes": ["made on a laptop"],
        "headings": [{"name": "Average", "unit": "%"}],
        "cells": [cell, {**cell, "column": "n", "paper": None}],
        "claims": [{**claim, "verdict": "holds"}, {**claim, "ours": None}, {**claim, **apart}],
    }
    return content | more


def write(folder, content, place="cocktail/table2/tiny-mini"):
    (folder / place).mkdir(parents=True)
    (folder / place / "cells.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_numbers_and_claims_are_next_to_the_papers(tmp_path):
    write(tmp_path, item(run_id(1)))
    (shown,), notes = papers.items(tmp_path, {run_id(1)})
    assert notes == [] and (shown["item"], shown["variant"], shown["mine"]) == ("cocktail/table2", "tiny-mini", 2)
    named = [[shown["names"][i] for i in cell[:4]] + cell[4:] for cell in shown["cells"]]
    assert named == [
        ["KIVI", "Average", "tiny", "%", 48, 50, 1.5, run_id(1)],
        ["KIVI", "n", "tiny", "", None, 50, 1.5, run_id(1)],
    ]
    claims = [[shown["names"][i] for i in claim[:4]] + claim[4:] for claim in shown["claims"]]
    said = [["holds", 0.5, 2], ["", 0.5], ["not comparable: eager steps", 0.5, 2, 2]]  # the interval reaches 2 upwards
    assert claims == [["is better", "tiny", "%", *one] for one in said]


def test_every_item_with_a_number_is_shown_those_with_a_run_first(tmp_path):
    only_paper = {**item(run_id(9))["cells"][0], "ours": None, "stderr": None}
    nothing = {**only_paper, "paper": None}
    write(tmp_path, item(run_id(8), cells=[only_paper], claims=[]), "cocktail/table1")
    write(tmp_path, item(run_id(8), cells=[nothing], claims=[]), "cocktail/table3")
    write(tmp_path, item(run_id(1)), "logquant/table4")
    shown, notes = papers.items(tmp_path, {run_id(1)})
    assert [(entry["mine"], len(entry["cells"])) for entry in shown] == [(2, 2), (0, 1)]
    assert shown[1]["cells"][0][4:] == [48] and notes == []


def test_cells_beyond_the_most_are_counted(tmp_path, monkeypatch):
    write(tmp_path, item(run_id(1)))
    found = []
    for most in (1, 2, 3):
        monkeypatch.setattr(papers, "MOST_CELLS", most)
        ((shown,), _) = papers.items(tmp_path, {run_id(1)})
        found.append((len(shown["cells"]), len(shown["claims"]), shown["more"], shown["mine"]))
    assert found == [(1, 1, 1, 2), (2, 2, 0, 2), (2, 3, 0, 2)]


def test_the_items_of_the_repository_fit_into_the_page():
    shown, notes = papers.items(RESULTS, set())
    assert notes == [] and len(shown) == len([*RESULTS.glob("*/*/cells.json"), *RESULTS.glob("*/*/*/cells.json")])
    assert len(encoded(shown)) < papers.MOST_BYTES


def test_damaged_files_are_named(tmp_path):
    write(tmp_path, "[" * 50_000, "logquant/table1")
    write(tmp_path, {"cells": 3}, "logquant/table2")
    write(tmp_path, "[]", "logquant/table3")
    write(tmp_path, item(run_id(1)))
    shown, notes = papers.items(tmp_path, {run_id(1)})
    assert len(shown) == 1 and len(notes) == 3 and all("not the table of a paper" in note for note in notes)


def test_the_page_holds_only_so_much_of_the_papers(tmp_path):
    for number in range(20):
        base = item(run_id(1))["cells"][0]
        cells = [{**base, "row": f"{'x' * 70} {i}"} for i in range(200)]
        write(tmp_path, item(run_id(1), cells=cells), f"paper/table{number}")
    shown, (note,) = papers.items(tmp_path, {run_id(1)})
    assert 0 < len(shown) < 20 and note.startswith(f"{20 - len(shown)} of 20 tables and figures of papers are left out")
    assert len(encoded(shown)) < 1.01 * papers.MOST_BYTES


def test_the_leaderboard_of_the_repository_has_commands(tmp_path):
    lines = papers.board(RESULTS)
    fp16 = next(line for line in lines if line[0] == "fp16")
    assert len(lines) > 20 and all(line[2].startswith("python -m kvbench method=") for line in lines)
    assert fp16[3:6] == [0.98222, 0.013704, 300] and fp16[8] == fp16[9]
    assert fp16[2].endswith(
        "dataset=mini dataset.tasks=[key_value,key_value_hex,multi_value] dataset.lengths=[4096] dataset.limit=100"
    )
    for text in (None, "[", '{"a": 1}', "[1]", '[{"mean": {}}]'):
        if text is not None:
            (tmp_path / "mini").mkdir(exist_ok=True)
            (tmp_path / "mini" / "scores.json").write_text(text)
        assert papers.board(tmp_path) == []
