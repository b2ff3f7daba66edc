"""Two runs of a few rows: differences, changed samples and the reasons for caution, with numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.results import compare
from kvbench.results.compare import Comparison, comparison_csv, comparison_markdown, comparison_screen
from kvbench.results.store import RunStore
from kvbench.util import table
from tests.run_support import config

SETTING = "0123456789"


def row(name: str, score: float | None, prediction: str = "x", nll: float = 1.0, version: int = 1) -> dict[str, Any]:
    return {
        "id": name,
        "task": name.partition("/")[0],
        "length": None,
        "prediction": prediction,
        "scores": {} if score is None else {"score": score},
        "scorer_version": version,
        "nll": {"sum": 2 * nll, "n": 2},
    }


def stored(folder: Path, name: str, rows: list[dict[str, Any]], setting: str = SETTING) -> RunStore:
    store = RunStore(folder, f"{setting}-{name * 10}")
    with store.hold():
        store.start(config(folder, "fp16" if name == "a" else "kivi"))
        store.append(rows)
    return store


@pytest.fixture
def pair(tmp_path: Path) -> tuple[RunStore, RunStore]:
    own = [
        row("t/0", 1.0, nll=1.0),
        row("t/1", 1.0, nll=2.0),
        row("t/2", 0.5, "same"),
        row("u/0", None),
        row("t/9", 0.0),
    ]
    other = [
        row("t/2", 0.5, "other words", nll=1.0),
        row("t/0", 0.75, "y " * 80, nll=1.5),
        row("t/1", 0.0, "z", nll=2.25),
        row("u/0", None),
        row("t/8", 1.0),
    ]
    return stored(tmp_path, "a", own), stored(tmp_path, "b", other)


def test_differences_are_b_minus_a_over_the_samples_of_both(pair) -> None:
    comparison = compare.compare_runs(*pair)
    entry = comparison.keys["t"]
    assert (entry["a"], entry["n"]) == (pytest.approx(2.5 / 3), 3)
    assert entry["b"] == pytest.approx(1.25 / 3) and entry["diff"] == pytest.approx(-1.25 / 3)
    differences = [-0.25, -1.0, 0.0]
    mean = sum(differences) / 3
    error = (sum((value - mean) ** 2 for value in differences) / 2 / 3) ** 0.5
    assert entry["stderr"] == pytest.approx(error)
    assert entry["nll"]["diff"] == pytest.approx(0.25) and entry["nll"]["n"] == 3
    assert comparison.keys["u"]["diff"] is None and comparison.keys["u"]["a"] is None and comparison.keys["u"]["n"] == 0


def test_changed_samples_come_with_the_largest_difference_first(pair) -> None:
    comparison = compare.compare_runs(*pair)
    assert [(one["id"], one["a"], one["b"]) for one in comparison.changed] == [("t/1", 1.0, 0.0), ("t/0", 1.0, 0.75)]
    assert (comparison.changed[0]["said_a"], comparison.changed[0]["said_b"]) == ("x", "z")
    assert comparison.reworded == 1
    assert comparison.names[0].startswith(f"{SETTING}-{'a' * 10}  ") and comparison.names[1].endswith(", toy, toy")
    assert comparison.notes == ["A has 5 samples, B has 5; the 4 that both have are compared"]


def test_a_score_that_only_one_run_has_is_a_change_from_nothing(tmp_path) -> None:
    a = stored(tmp_path, "a", [row("t/0", None), row("t/1", 0.5), row("t/2", 1.0)])
    b = stored(tmp_path, "b", [row("t/0", 0.75), row("t/1", 0.0), row("t/2", 0.5)])
    changed = compare.compare_runs(a, b).changed
    assert [(one["id"], one["a"], one["b"]) for one in changed] == [
        ("t/0", None, 0.75),
        ("t/1", 0.5, 0.0),
        ("t/2", 1.0, 0.5),
    ]


def test_reasons_for_caution(tmp_path) -> None:
    a = stored(tmp_path, "a", [row("t/0", 1.0)])
    assert compare.compare_runs(a, stored(tmp_path, "b", [row("t/0", 1.0)])).notes == []
    other = stored(tmp_path, "c", [row("t/0", 1.0, version=2)], "9876543210")
    more = stored(tmp_path, "d", [row("t/0", 1.0), row("t/1", 1.0)])
    for pair in ((a, more), (more, a)):
        (note,) = compare.compare_runs(*pair).notes
        assert note.endswith("; the 1 that both have are compared")
    notes = compare.compare_runs(a, other).notes
    assert len(notes) == 2
    assert notes[0] == "the runs differ not only in the method, but also in the model, data, decoding or seed"
    assert notes[1].startswith("they were scored by different versions of the scorer")


def test_data_and_code_of_the_runs_are_compared(tmp_path, monkeypatch) -> None:
    a, b = (stored(tmp_path, name, [row("t/0", 1.0)]) for name in "ab")
    contents = {
        a.run_id: {"data": {"identity": {"x": 1}}, "code": {"c": 1, "d": 2}, "label": "fp16"},
        b.run_id: {"data": {"identity": {"x": 2}}, "code": {"c": 1}, "label": "kivi int2"},
    }
    monkeypatch.setattr(RunStore, "metrics", lambda self: contents[self.run_id])
    monkeypatch.setattr(compare, "labels", lambda runs, beside: [run["label"] for run in runs])
    comparison = compare.compare_runs(a, b)
    assert comparison.notes == [
        "their data differ, so the same sample id may belong to different questions",
        "the samples of A were made by 2 versions of the code",
    ]
    assert comparison.names == (f"{a.run_id}  fp16, toy, toy", f"{b.run_id}  kivi int2, toy, toy")
    contents[b.run_id]["data"] = None
    assert len(compare.compare_runs(a, b).notes) == 1


def comparison(changed: int = 1, notes: tuple[str, ...] = ("a note",)) -> Comparison:
    keys = {
        "t@64": {
            "a": 1.0,
            "b": 0.5,
            "diff": -0.5,
            "stderr": 0.125,
            "n": 3,
            "nll": {"diff": 0.25, "stderr": 0.03125, "n": 3},
        },
        "u": {"a": None, "b": None, "diff": None, "stderr": None, "n": 0, "nll": None},
        "v": {"a": 0.25, "b": 0.5, "diff": 0.25, "stderr": None, "n": 1, "nll": {"diff": -0.5, "stderr": None}},
    }
    samples = [
        {"id": f"t/{number}", "a": 1.0, "b": None, "said_a": "one | two\n three", "said_b": "w" * 101}
        for number in range(changed)
    ]
    return Comparison(("first", "second"), keys, samples, 7, list(notes))


def test_the_csv_of_a_comparison() -> None:
    assert comparison_csv(comparison()).splitlines() == [
        "key,a,b,diff,stderr,n,nll_diff,nll_stderr",
        "t@64,1.0,0.5,-0.5,0.125,3,0.25,0.03125",
        "u,,,,,0,,",
        "v,0.25,0.5,0.25,,1,-0.5,",
    ]


def test_the_markdown_of_a_comparison() -> None:
    assert comparison_markdown(comparison()).splitlines() == [
        "A: first, B: second",
        "",
        "| | A | B | B - A | answer NLL | n |",
        "|:--|--:|--:|--:|--:|--:|",
        "| t@64 | 1.000 | 0.500 | -0.500 ±0.538 | +0.2500 ±0.1345 | 3 |",
        "| u | - | - | - | - | 0 |",
        "| v | 0.250 | 0.500 | +0.250 ±0.793 | -0.5000 | 1 |",
        "",
        "| sample | A | B | answer of A | answer of B |",
        "|:--|--:|--:|:--|:--|",
        f"| t/0 | 1.000 | - | 'one \\| two three' | '{'w' * 97}...' |",
        "",
        "note: a note",
    ]
    bare = comparison_markdown(comparison(0, ()))
    assert "sample" not in bare and bare.endswith("| 1 |\n")
    assert comparison_markdown(comparison(25)).count("| t/") == 20


def test_the_screen_of_a_comparison() -> None:
    text = table.render_text(comparison_screen(comparison(25)), width=120, color=False)
    assert text.splitlines()[:2] == ["A first", "B second"]
    for wanted in ("B - A", "answer NLL", "-0.500 ±0.538", "+0.2500 ±0.1345", "note: a note"):
        assert wanted in text
    assert "samples with different scores: 25; with the same score but different answers: 7" in text
    assert text.count("1.000 -> -") == 20
    assert "  A 'one | two three'" in text and f"  B '{'w' * 97}...'" in text
