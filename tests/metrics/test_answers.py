"""Scores of answers by the name of a metric, and the functions on which they rest."""

from __future__ import annotations

import pytest

from kvbench.metrics.answers import score_answers
from kvbench.metrics.rouge import rouge
from kvbench.metrics.text import letter, matched


def test_the_best_answer_counts_for_every_metric() -> None:
    assert score_answers("exact_match", "Paris.", ["london", "paris"]) == {"score": 1.0}
    assert score_answers("exact_match", "in Paris", ["london", "paris"]) == {"score": 0.0}
    assert score_answers("f1", "cat sat", ["dog", "the cat", "bird"]) == {"score": pytest.approx(2 / 3)}
    assert score_answers("regex", "so (7), not (8)", ["9", "is (7)"], pattern=r"\((\d)\)") == {"score": 1.0}
    wrong, right = "x #### 7", "x #### 18"
    assert score_answers("gsm8k", "#### 18", [wrong, right, wrong]) == {"score": 1.0, "strict": 1.0, "flexible": 1.0}
    assert score_answers("gsm8k", "#### 7, no, 18", [right, wrong]) == {"score": 1.0, "strict": 1.0, "flexible": 0.0}
    assert score_answers("gsm8k", "it is 18", [right]) == {"score": 0.0, "strict": 0.0, "flexible": 1.0}


@pytest.mark.parametrize(
    ("prediction", "options", "points"),
    [("I think B, not A", 2, 1.0), ("I think B, not A", 1, 0.0), ("BAD C or B", 4, 0.0), ("A", 2, 0.0), ("b", 2, 0.0)],
)
def test_a_choice_is_the_first_letter_of_an_option_that_stands_alone(prediction, options, points) -> None:
    assert score_answers("choice", prediction, ["B"], options=options) == {"score": points}


def test_the_letters_of_options_go_to_z() -> None:
    assert score_answers("choice", "Z", ["Z"], options=26) == {"score": 1.0}
    assert letter("BAD C", "ABC") == "C"
    assert letter("CAB, A", "ABC") == letter("BAC A", "ABC") == "A"
    assert letter("D", "ABC") is None


def test_a_summary_is_scored_by_rouge_lsum_with_stemming() -> None:
    kinds = {"rouge1": 1.0, "rouge2": 0.0, "rougeL": 0.5, "rougeLsum": 1.0}
    assert rouge("beta\nalpha", ["gamma", "alpha\nbeta"]) == kinds
    assert score_answers("rouge", "beta\nalpha", ["alpha\nbeta", "gamma"]) == {"score": 1.0, **kinds}
    assert rouge("running dogs", ["run dog"])["rouge1"] == 1.0
    assert rouge("alpha beta", ["alpha"])["rouge1"] == pytest.approx(2 / 3)  # the F measure
    with pytest.raises(ValueError, match="at least one reference"):
        rouge("alpha", [])


@pytest.mark.parametrize(
    ("prediction", "answers", "pattern", "points"),
    [
        ("A: 7 A: 8", ["7"], r"A: (\d)", 1.0),  # the first match
        ("A: 7 A: 8", ["8"], r"A: (\d)", 0.0),
        ("7", ["7"], r"A: (\d)", 0.0),  # without a match
        ("A: 7", ["9", "A: 7"], r"A: (\d)", 1.0),  # the answer matches too
        ("A: 7", ["A: 8 7"], r"A: (\d)", 0.0),
        ("A: 'Seven.'", ["seven"], r"A: (.*)", 1.0),
        ("ac", [""], r"a(b)?", 1.0),  # an optional group that takes nothing
    ],
)
def test_a_pattern_extracts_what_is_compared(prediction, answers, pattern, points) -> None:
    assert matched(prediction, answers, pattern) == points
