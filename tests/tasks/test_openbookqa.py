"""OpenBookQA's letter: the first one of the answer that stands alone."""

from __future__ import annotations

import pytest

from kvbench.tasks.base import Sample
from kvbench.tasks.openbookqa import OpenBookQA

SAMPLE = Sample("openbookqa/0", "openbookqa", "Question: ...", ("C",), max_new_tokens=8, meta={"options": 4})


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" C", 1.0),
        ("C. gravity", 1.0),
        ("Because of that, C", 1.0),
        ("ABC", 0.0),
        ("(C) or D", 1.0),
        ("D, then C", 0.0),
        ("c", 0.0),
        ("", 0.0),
    ],
)
def test_a_letter_inside_a_word_is_no_answer(answer: str, score: float) -> None:
    assert OpenBookQA().score(SAMPLE, answer) == {"score": score}
