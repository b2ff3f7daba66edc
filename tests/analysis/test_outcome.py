"""Figures of a prompt by hand, what a folder holds, and the tables and sentences made from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvbench.analysis import outcome as table
from kvbench.analysis.bins import Bins
from kvbench.analysis.outcome import (
    ERRORS,
    Outcome,
    Shape,
    analysis_markdown,
    findings,
    mean_and_error,
    page,
    told_apart,
)
from kvbench.errors import DataError

BINS = Bins(sinks=1, doublings=1)
#: a name with the character that separates the parts of an array's name
SPLIT = "cocktail:split=10/30/60"


def parts_of(**changes: object) -> dict[str, np.ndarray]:
    """Arrays of one layer with two heads and three bins."""
    lists = {
        "mass": [[[0.5, 0.25, 0.25]] * 2],
        "l1": [[[0.1, 0.2, 0.3], [0.1, 0.1, 0.2]]],
        "kl": [[[0.25, 0.25, 0.25], [0.25, -0.5, -0.1]]],
        "lost": [[[0.0, 0.0, 0.4], [0.0, 0.0, 0.2]]],
        "coverage": [[[9.0, 0.2, 0.3], [9.0, 0.1, 0.4]]],
        "full": [[[1.0, 2.0, 3.0], [1.0, 4.0, 1.0]]],
        "output": [[0.2, 0.4]],
        "parts": [[[0.1, 0.2, 0.3]] * 2],
    }
    return {name: np.array(numbers, np.float32) for name, numbers in (lists | changes).items()}


def outcome_of() -> Outcome:
    outcome = Outcome("m", Shape(1, 2), BINS, ("A", SPLIT))
    for i, name in enumerate(("x", "y")):
        outcome.add(
            name,
            prompt_tokens=7 + i,
            steps=2,
            exact={"mass": np.full((1, 2, 3), i + 0.5), "visible": np.full((1, 3), i + 1.0)},
            errors={"A": parts_of(), SPLIT: parts_of(l1=[[[i, i, i], [1, 1, 1]]])},
            bills={"A": (10 + i, 40), SPLIT: (20, 50)},
            positions={"highest": [np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0, 7.0])]},
        )
    return outcome


def test_the_figures_of_a_prompt_by_hand() -> None:
    outcome = Outcome("m", Shape(1, 2), BINS, ("A",))
    assert outcome.row(parts_of()) == pytest.approx(
        {
            "l1": 1.0,
            "l1_share": 0.25,
            "kl": 0.2,
            "lost": 0.3,
            "output_error": 0.3,
            "coverage": 0.5,
            "full_tokens": 5.0,
            "coverage_per_token": 0.1,
        }
    )
    only_sinks = outcome.row(parts_of(full=[[[1, 0, 0], [1, 0, 0]]], coverage=[[[0.3, 0, 0], [0.3, 0, 0]]]))
    assert (only_sinks["coverage"], only_sinks["full_tokens"], only_sinks["coverage_per_token"]) == (0.0, 0.0, 0.0)


def test_prompts_add_up() -> None:
    outcome = outcome_of()
    assert outcome.prompts == [
        {"id": "x", "prompt_tokens": 7, "steps": 2},
        {"id": "y", "prompt_tokens": 8, "steps": 2},
    ]
    assert [(row["id"], row["setting"], row["kv_bytes"], row["fp16_bytes"]) for row in outcome.rows] == [
        ("x", "A", 10, 40), ("x", SPLIT, 20, 50), ("y", "A", 11, 40), ("y", SPLIT, 20, 50)
    ]  # fmt: skip
    assert outcome.figures(SPLIT, "l1").tolist() == [3.0, 6.0] and outcome.figures("A", "kv_bytes").tolist() == [10, 11]
    assert outcome.exact["mass"][:, 0, 0, 0].tolist() == [0.5, 1.5] and outcome.exact["visible"].shape == (2, 1, 3)
    assert outcome.errors[SPLIT]["l1"].shape == (2, 1, 2, 3)
    padded = [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert {name: steps.tolist() for name, steps in outcome.positions["highest"].items()} == {"x": padded, "y": padded}


def test_a_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    outcome, folder = outcome_of(), tmp_path / "new" / "folder"
    outcome.save(folder, {"command": "c"})
    again = Outcome.load(folder)
    for name in ("model", "shape", "bins", "settings", "rows", "prompts"):
        assert getattr(again, name) == getattr(outcome, name), name
    pairs = [(outcome.exact, again.exact), (outcome.positions["highest"], again.positions["highest"])]
    pairs += [(outcome.errors[name], again.errors[name]) for name in ("A", SPLIT)]
    for before, after in pairs:
        assert list(before) == list(after)
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert {array.dtype for array in after.values()} == {np.dtype(np.float32)}
    assert set(again.errors["A"]) == set(ERRORS)
    facts = json.loads((folder / "about.json").read_text())
    assert facts["names"] == ["token 0", "0", "1-"] and facts["command"] == "c" and facts["settings"] == ["A", SPLIT]
    assert not Outcome.load(folder, arrays=False).exact
    for name in ("arrays.npz", "rows.jsonl", "about.json"):
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"does not contain {name}(.|\n)*--out {folder}"):
            Outcome.load(folder)


def compared(**l1: list[float]) -> Outcome:
    """Methods that differ in their L1 error only."""
    outcome = Outcome("m", Shape(1, 2), BINS, tuple(l1), prompts=[{"id": "x"}, {"id": "y"}])
    for setting, errors in l1.items():
        for i, error in enumerate(errors):
            row = {"l1_share": (0.1, 0.3)[i], "kl": 0.5, "output_error": (0.02, 0.04)[i], "lost": (0.0, 0.5)[i]}
            row |= {"coverage_per_token": (0.001, 0.003)[i], "kv_bytes": (1024, 3072)[i]}
            outcome.rows.append({"setting": setting, "l1": error, **row})
    return outcome


def test_means_with_the_standard_error_of_a_sample() -> None:
    assert mean_and_error(np.array([1.0, 3.0])) == pytest.approx((2.0, 1.0))
    assert mean_and_error(np.array([1.0, 2.0, 3.0, 6.0])) == pytest.approx((3.0, (14 / 3) ** 0.5 / 2))
    one = mean_and_error(np.array([5.0]))
    assert one[0] == 5.0 and one[1] != one[1]


def test_a_line_of_the_table_for_each_method() -> None:
    lines = analysis_markdown(compared(A=[1, 3], B=[2, 4])).splitlines()
    assert lines[0] == (
        "|  | L1 error, summed over layers and heads | of its maximum | KL, nats | output error | dropped attention "
        "| attention per exact token, 1e-3 | KV bytes |"
    )
    assert lines[1] == "|:--|--:|--:|--:|--:|--:|--:|--:|"
    assert lines[2:] == [
        "| A | 2 ±1 | 20 % ±10 | 0.5 ±0 | 3 % ±1 | 25 % ±25 | 2 ±1 | 2 KiB |",
        "| B | 3 ±1 | 20 % ±10 | 0.5 ±0 | 3 % ±1 | 25 % ±25 | 2 ±1 | 2 KiB |",
    ]


def test_methods_differ_by_paired_standard_errors() -> None:
    outcome = compared(A=[1, 3], B=[2, 4], C=[1, 3], D=[2, 6])
    scores = {(first, second): score for first, second, score in told_apart(outcome)}
    inf = float("inf")
    assert list(scores) == [("A", "B"), ("A", "C"), ("A", "D"), ("B", "C"), ("B", "D"), ("C", "D")]
    assert (scores["A", "B"], scores["A", "C"], scores["B", "C"]) == (inf, 0.0, inf)
    assert scores["A", "D"] == pytest.approx(2.0) and scores["B", "D"] == pytest.approx(1.0)
    assert {score for _, _, score in told_apart(outcome, ["kl", "lost"])} == {0.0}


def test_the_sentence_names_the_pairs_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compared(A=[1, 3], B=[2, 4], C=[1, 3])
    start = (
        "n = 2 prompts. {} pairs of methods differ by more than 2 standard errors of their paired difference in at "
        "least one of l1, kl, output_error."
    )
    assert findings(outcome) == start.format("2 of 3") + " Pairs without such a difference: A and C."
    assert findings(compared(A=[1, 3], B=[2, 4])) == start.format("1 of 1")
    assert findings(compared(A=[1, 3], B=[1, 5])).endswith("difference: A and B.")  # one standard error
    assert page(outcome, "c") == f"`c`\n\n{analysis_markdown(outcome)}\n\n{findings(outcome)}\n"
    monkeypatch.setattr(table, "SIGNIFICANT", float("inf"))
    assert findings(compared(A=[1, 3], B=[2, 4])).endswith("difference: A and B.")  # more than, not as much as
