"""RULER's means by length, from the scores of a run."""

from __future__ import annotations

from kvbench.metrics import ruler
from kvbench.tasks.ruler.frame import KINDS


def test_means_by_length_over_all_tasks() -> None:
    scores = {f"{task}@{length}": {"score": score} for task in KINDS for length, score in ((8192, 0.8), (4096, 0.9))}
    scores["vt@8192"] = {"score": 0.8 - 0.13}
    means = ruler.lengths(scores)
    assert means is not None and means.tasks == ruler.TASKS == len(KINDS) and list(means.means) == [4096, 8192]
    assert means.text() == (
        "4096: 0.900 8192: 0.790, effective length 4096, weighted to long prompts 0.827, to short ones 0.863"
    )
    low = ruler.lengths({key: {"score": 0.1} for key in scores if key.endswith("@4096")})
    assert low is not None and low.text() == "4096: 0.100, effective length below 4096"


def test_fewer_tasks_have_no_effective_length() -> None:
    means = ruler.lengths({"vt@4096": {"score": 1.0}, "cwe@4096": {"score": 0.5}})
    assert means is not None and means.text() == "4096: 0.750, 2 of 13 tasks"


def test_unequal_lengths_or_missing_scores_have_no_mean() -> None:
    assert ruler.lengths({"vt@4096": {"score": 1.0}, "cwe@8192": {"score": 0.5}}) is None
    assert ruler.lengths({"vt@4096": {"score": None}}) is None
    assert ruler.lengths({"vt": {"score": 1.0}}) is None
    assert ruler.lengths({}) is None
