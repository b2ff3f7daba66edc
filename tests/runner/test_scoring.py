"""The part of a row that the scorer decides."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.runner.remarks import shown
from kvbench.runner.scoring import finite, scored
from kvbench.tasks.base import Sample
from kvbench.tasks.work import AskQuestions, Question


def sample(**changes: Any) -> Sample:
    return Sample(**{"id": "a", "task": "t", "prompt": "p", "answers": ("x",), "max_new_tokens": 1} | changes)


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (True, 1.0), (-0.5, -0.5), (math.nan, None), (math.inf, None), (-math.inf, None), ("2", 2.0)],
)
def test_numbers_that_json_can_hold(value: Any, number: float | None) -> None:
    found = finite(value)
    assert found == number and (found is None or type(found) is float)


def test_one_question_is_scored_whole_and_several_by_line() -> None:
    asked: list[Any] = []

    def score(kind: str) -> Any:
        def noted(one: Sample, prediction: Any) -> dict[str, Any]:
            asked.append((kind, one.id, prediction))
            return {"score": 1, "other": math.nan}

        return noted

    task: Any = SimpleNamespace(score=score("one"), score_questions=score("several"), scorer_version="3")
    assert scored(task, sample(), "a\nb") == {"scores": {"score": 1.0, "other": None}, "scorer_version": 3}
    scored(task, sample(work=AskQuestions(1, (Question("a?", "x"), Question("b?", "y")))), "a b\nc")
    assert asked == [("one", "a", "a\nb"), ("several", "a", ["a b", "c"])]


@pytest.mark.parametrize(
    ("length", "head", "tail"), [(3, 3, 0), (240, 240, 0), (241, 240, 1), (479, 240, 239), (900, 240, 240)]
)
def test_loggers_are_shown_both_ends_of_a_prompt_and_nothing_twice(length: int, head: int, tail: int) -> None:
    prompt = "".join(chr(0x4E00 + index) for index in range(length))
    found = shown(sample(prompt=prompt))
    assert found == {"prompt_head": prompt[:head], "prompt_tail": prompt[length - tail :], "reference": "x"}
    assert shown(sample(answers=()))["reference"] == ""
