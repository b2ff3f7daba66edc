"""The part of a row that the scorer decides."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.results.samples import MEASURED
from kvbench.runner.remarks import shown_excerpts
from kvbench.runner.scoring import finite, rescored, scored
from kvbench.tasks.base import Sample
from kvbench.tasks.long_answers import LongAnswers
from kvbench.tasks.work import AskQuestions, Question


def sample(**changes: Any) -> Sample:
    return Sample(**{"id": "a", "task": "t", "prompt": "p", "answers": ("x",), "max_new_tokens": 1} | changes)


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (True, 1.0), (-0.5, -0.5), (math.nan, None), (math.inf, None), (-math.inf, None), ("2", 2.0)],
)
def test_numbers_that_json_can_hold(value: Any, number: float | None) -> None:
    computed = finite(value)
    assert computed == number and (computed is None or type(computed) is float)


def test_one_question_is_scored_whole_and_several_by_line() -> None:
    asked: list[Any] = []

    def score(kind: str) -> Any:
        def noted(one: Sample, prediction: Any) -> dict[str, Any]:
            asked.append((kind, one.id, prediction))
            return {"score": 1, "other": math.nan}

        return noted

    task: Any = SimpleNamespace(
        long_answers=False, score=score("one"), score_questions=score("several"), scorer_version="3"
    )
    assert scored(task, sample(), "a\nb") == {"scores": {"score": 1.0, "other": None}, "scorer_version": 3}
    scored(task, sample(work=AskQuestions(1, (Question("a?", "x"), Question("b?", "y")))), "a b\nc")
    assert asked == [("one", "a", "a\nb"), ("several", "a", ["a b", "c"])]


@pytest.mark.parametrize(
    ("text", "finish", "thinking", "score", "cut"),
    [
        (r"<think>\boxed{7}</think>\boxed{8}", "eos", False, 0.0, 0.0),
        (r"<think>\boxed{7}", "length", False, 0.0, 1.0),
        (r"<think>\boxed{7}", "stop", False, 0.0, 1.0),  # a stop string within the thinking
        (r"so \boxed{7}", "eos", True, 0.0, 1.0),  # the template has begun the thinking
        (r"so \boxed{8}</think>\boxed{7}", "eos", True, 1.0, 0.0),
        (r"so \boxed{7}", "length", False, 1.0, 1.0),
    ],
)
def test_an_answer_that_is_cut_in_its_thinking_is_wrong_and_counts_as_cut(
    text: str, finish: str, thinking: bool, score: float, cut: float
) -> None:
    task = LongAnswers(path="x", template="{problem}")
    row = {"finish": finish, **({"thinking": True} if thinking else {})}
    wanted = {"score": score, "cut": cut, "looping": 0.0}
    assert scored(task, sample(answers=("7",)), text, row)["scores"] == wanted
    (fresh,) = rescored(task, [sample(answers=("7",))], {"a": {**row, "prediction": text, "scorer_version": 0}})
    assert fresh["scores"] == wanted


@pytest.mark.parametrize(
    ("length", "head", "tail"), [(3, 3, 0), (240, 240, 0), (241, 240, 1), (479, 240, 239), (900, 240, 240)]
)
def test_loggers_are_shown_both_ends_of_a_prompt_and_nothing_twice(length: int, head: int, tail: int) -> None:
    prompt = "".join(chr(0x4E00 + index) for index in range(length))
    computed = shown_excerpts(sample(prompt=prompt))
    assert computed == {"prompt_head": prompt[:head], "prompt_tail": prompt[length - tail :], "reference": "x"}
    assert shown_excerpts(sample(answers=()))["reference"] == ""


def row(name: str, version: int = 2, code: Any = None) -> dict[str, Any]:
    parts = {"id": name, "prediction": name * 2, "scores": {"score": 0.5}, "scorer_version": version}
    return {**parts, MEASURED: {"ttft_s": 1.0, "code": code}}


def length(version: int = 2) -> Any:
    """A task whose score is the length of the prediction."""
    return SimpleNamespace(
        scorer_version=version, long_answers=False, score=lambda sample, prediction: {"score": len(prediction)}
    )


def test_rows_of_another_version_of_the_scorer_are_scored_again() -> None:
    samples = [sample(id=name) for name in ("missing", "a", "bb")]
    rows = {"a": row("a", 1), "bb": row("bb", 2), "left out": row("left out", 1)}
    fresh = rescored(length(), samples, rows)
    assert fresh == [{**rows["a"], "scores": {"score": 2.0}, "scorer_version": 2}]
    assert rows["a"]["scores"] == {"score": 0.5}, "stored rows stay as they are"
    assert [one["id"] for one in rescored(length(3), samples, rows)] == ["a", "bb"]
    assert [one["id"] for one in rescored(length(1), samples, rows)] == ["bb"]


@pytest.mark.parametrize(
    ("code", "now", "again"),
    [
        ({"scorer": "old", "method": "m"}, "new", True),
        ({"scorer": "new", "method": "m"}, "new", False),
        ({"scorer": "old", "method": "m"}, None, False),
        ({"method": "m"}, "new", False),
        (None, "new", False),
    ],
)
def test_rows_of_an_edited_scorer_are_scored_again_and_say_so(code: Any, now: Any, again: bool) -> None:
    fresh = rescored(length(), [sample()], {"a": row("a", code=code)}, now)
    assert bool(fresh) == again
    if again:
        assert fresh[0]["scores"] == {"score": 2.0}
        assert fresh[0][MEASURED] == {"ttft_s": 1.0, "code": {"scorer": "new", "method": "m"}}


def test_rows_without_digests_get_none() -> None:
    (fresh,) = rescored(length(3), [sample()], {"a": row("a")}, "new")
    assert fresh[MEASURED] == {"ttft_s": 1.0, "code": None}
