"""Batches hold samples that end alike, and run with the longest prompt first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbench.errors import DataError, KvbenchError
from kvbench.runner.batching import batches, check_any, check_ids, plan
from kvbench.tasks.base import Sample
from kvbench.tasks.work import ScoreText

SAMPLE = Sample(id="a", task="t", prompt="p", answers=("x",), max_new_tokens=8, stop=("\n",))


@pytest.mark.parametrize(
    "other",
    [{"stop": ("\n", "Q:")}, {"max_new_tokens": 9}, {"end_text": "\n"}, {"say_something": True}, {"warm_up": True}],
    ids=lambda change: next(iter(change)),
)
def test_samples_that_end_otherwise_are_in_another_batch(other: dict[str, Any]) -> None:
    samples = [SAMPLE, replace(SAMPLE, id="b"), replace(SAMPLE, id="c", **other), replace(SAMPLE, id="d", **other)]
    assert [[sample.id for sample in batch] for batch in batches(samples, 4)] == [["a", "b"], ["c", "d"]]


def test_the_longest_prompt_runs_first_and_warm_ups_before_it() -> None:
    samples = [
        replace(SAMPLE, id=name, prompt="p" * length) for name, length in (("a", 1), ("b", 3), ("c", 9), ("d", 2))
    ]
    assert [batch[0].id for batch in plan(samples, 1)] == ["c", "a", "b", "d"]
    warm = [*samples, replace(SAMPLE, id="w", warm_up=True)]
    assert [batch[0].id for batch in plan(warm, 1)] == ["w", "a", "b", "c", "d"]


def test_samples_of_another_kind_of_work_are_in_another_batch() -> None:
    text = ScoreText((1, 2), first=1, bytes=2, document=0, mode="fp16", prefill=0, chunk=1)
    samples = [SAMPLE, replace(SAMPLE, id="b", work=text), replace(SAMPLE, id="c", work=replace(text, first=2))]
    assert [[sample.id for sample in batch] for batch in batches(samples, 4)] == [["a"], ["b", "c"]]


def test_several_warm_ups_stay_in_order_and_a_plan_of_nothing_is_empty() -> None:
    samples = [replace(SAMPLE, id=name, prompt="p" * (1 + ord(name)), warm_up=name in "bd") for name in "abcd"]
    assert [batch[0].id for batch in plan(samples, 1)] == ["b", "d", "a", "c"]
    assert [batch[0].id for batch in plan([samples[1], samples[3]], 1)] == ["b", "d"]
    assert plan([], 1) == []


def test_the_first_of_equally_long_prompts_runs_first() -> None:
    samples = [replace(SAMPLE, id=name, prompt="p" * length) for name, length in (("a", 1), ("b", 3), ("c", 3))]
    assert [batch[0].id for batch in plan(samples, 1)] == ["b", "a", "c"]


def test_ids_must_be_unique() -> None:
    check_ids([SAMPLE, replace(SAMPLE, id="b")])
    with pytest.raises(KvbenchError, match="two samples of the data set have the id 'a', but ids must be unique"):
        check_ids([SAMPLE, replace(SAMPLE, id="b"), replace(SAMPLE, prompt="other")])


@pytest.mark.parametrize(
    ("limit", "hint"), [(0, "dataset.limit=8"), (4, "check the data set's files"), (None, "check")]
)
def test_no_samples_are_refused_with_what_to_change(limit: int | None, hint: str) -> None:
    check_any([SAMPLE], {"name": "toy", "limit": 0})
    with pytest.raises(DataError, match=f"data set toy: it contains no samples.*\n  hint: {hint}"):
        check_any([], {"name": "toy", "limit": limit})
