"""Metrics are pure functions: a table of cases each."""

from __future__ import annotations

import pytest

from kvbench.metrics.text import contains, exact_match, last_number, marked_number, normalise, prefix_share, recall


def test_normalise():
    assert normalise('  "The  Old\tMan."\n') == "the old man"
    assert normalise("") == ""
    assert normalise("...") == ""
    assert normalise("\"'`.,;:!?x, y\"'`.,;:!? ") == "x, y"
    assert normalise("Straße") == "strasse"


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [(" 4821.", ["4821"], 1.0), ("The Fox", ["the fox", "a fox"], 1.0), ("4821 7", ["4821"], 0.0), ("", ["a"], 0.0)],
)
def test_exact_match(prediction, answers, score):
    assert exact_match(prediction, answers) == score


def test_contains_takes_whole_words():
    assert contains("It is amber falcon, I think", ["amber falcon"]) == 1.0
    assert contains("It is 48213", ["4821"]) == 0.0
    assert contains("STRASSE, 7", ["x", "Straße: 7"]) == 1.0
    assert contains("falcon amber", ["amber falcon"]) == 0.0


@pytest.mark.parametrize(
    ("prediction", "share"), [("a b c d", 1.0), ("a b x d", 0.5), ("x b c d", 0.0), ("a b c d e", 1.0), ("", 0.0)]
)
def test_prefix_share(prediction, share):
    assert prefix_share(prediction, "a b c d") == share


def test_recall():
    assert recall("12, 34", ["12", "34", "56", "78"]) == 0.5
    assert recall("1234", ["12", "34"]) == 0.0
    assert recall("axb a.b", ["a.b", "x.b"]) == 0.5
    with pytest.raises(ValueError, match="at least one value"):
        recall("1", [])


@pytest.mark.parametrize(
    ("text", "marked", "last"),
    [
        ("1 + 2 = 3. #### 3", "3", "3"),
        ("#### 1 then #### 1,234.50 apples", "1234.50", "1234.50"),
        ("it is -7", None, "-7"),
        ("#### 3 of 4.5.", "3", "4.5"),
        ("#### none", None, None),
        ("", None, None),
    ],
)
def test_numbers(text, marked, last):
    assert marked_number(text) == marked
    assert marked_number(text.replace("####", "A:"), "A:") == marked
    assert last_number(text) == last
