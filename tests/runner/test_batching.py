"""Batches hold samples that end alike, and run with the longest prompt first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbench.runner.batching import batches, plan
from kvbench.tasks.base import Sample

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
