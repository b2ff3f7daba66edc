"""The plan of a sweep: the order of jobs, their labels, what a launcher gets, and fp16 references."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.cli import plan
from kvbench.results.sweeps import Job


def jobs(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


def typed(planned: list[Job]) -> list[str]:
    assert [job.number for job in planned] == list(range(len(planned)))
    return [" ".join(job.overrides) for job in planned]


def test_jobs_of_a_model_are_adjacent_and_fp16_is_first() -> None:
    grid = [f"method={m} model={n} dataset={d}" for m in ("kivi", "fp16") for n in "ab" for d in "xy"]
    assert typed(plan.ordered(jobs(*grid))) == [
        f"method={m} model={n} dataset={d}" for n in "ab" for m in ("fp16", "kivi") for d in "xy"
    ]


def test_jobs_that_share_a_prefill_are_adjacent() -> None:
    grid = [f"method={m} dataset={d} {plan.SHARED}=true" for m in ("kivi", "fp16") for d in "xy"]
    assert typed(plan.ordered(jobs(*grid))) == [
        f"method={m} dataset={d} {plan.SHARED}=true" for d in "xy" for m in ("fp16", "kivi")
    ]


@pytest.mark.parametrize("option", ["runtime.device=cpu,cuda", "model.dtype=float32,bfloat16", "runtime.seed=0,1"])
def test_options_that_decide_which_model_is_loaded_come_first(option: str) -> None:
    key, _, values = option.partition("=")
    grid = [f"method={m} {key}={value}" for m in ("kivi", "atom") for value in values.split(",")]
    assert [line.split()[1] for line in typed(plan.ordered(jobs(*grid)))] == [
        f"{key}={value}" for value in values.split(",") for _ in range(2)
    ]


def test_jobs_that_need_no_other_order_stay_as_typed() -> None:
    grid = [f"method=cocktail method.alpha={a} method.beta={b}" for a in (0.6, 0.9) for b in (0.05, 0.1)]
    assert typed(plan.ordered(jobs(*grid))) == grid


def test_an_fp16_reference_is_added_once_where_there_is_none() -> None:
    grid = [f"method={m} dataset={d}" for m in ("kivi", "atom") for d in "xy"]
    first = typed(plan.ordered(jobs(*grid, "method=fp16 dataset=x"), with_fp16=True))
    assert first == [f"method={m} dataset={d}" for m in ("fp16", "kivi", "atom") for d in "xy"]
    assert "setting=fp16 a=1" in typed(plan.ordered(jobs("setting=fp16 a=1", "setting=kivi:int2 a=1"), with_fp16=True))
    assert len(plan.ordered(jobs("setting=fp16 a=1", "setting=kivi:int2 a=1"), with_fp16=True)) == 2
    assert typed(plan.ordered(jobs("dataset=x"), with_fp16=True)) == ["dataset=x"], "the default method is fp16"


def test_the_method_of_a_preset_is_not_taken_for_fp16() -> None:
    preset = "experiment=quickstart/kivi4"
    assert typed(plan.ordered(jobs(preset), with_fp16=True)) == [f"method=fp16 quantizer=none {preset}", preset]
    assert typed(plan.ordered(jobs("experiment=null"), with_fp16=True)) == ["experiment=null"]
    own = [f"method=fp16 quantizer=none {preset}", preset]
    assert typed(plan.ordered(jobs(*own), with_fp16=True)) == own


def test_jobs_are_named_by_what_varies() -> None:
    grid = jobs("method=kivi quantizer=int2 method.residual=32", "method=kivi quantizer=int4 method.residual=32")
    assert plan.labels(grid) == ["int2", "int4"]
    grid = jobs("method=kivi quantizer.key.bits=2", "method=kivi quantizer.value.bits=2", "method=fp16")
    assert plan.labels(grid) == ["kivi quantizer.key.bits=2", "kivi quantizer.value.bits=2", "fp16"]
    assert plan.labels(jobs("method=kivi dataset=mini")) == ["kivi"]
    assert plan.labels([["dataset=mini"]]) == ["mini"]
    assert plan.labels(jobs("setting=kivi:int2:residual=64 a.b=1", "setting=fp16 a.b=2")) == [
        "kivi:int2:residual=64 b=1",
        "fp16 b=2",
    ]


def test_only_jobs_that_ask_for_it_and_differ_in_the_method_are_one_unit() -> None:
    grid = [f"method={m} dataset={d} runtime.shared_prefill=true" for d in "xy" for m in ("fp16", "kivi", "h2o")]
    planned = plan.ordered(jobs(*grid))
    assert [[job.number for job in unit] for unit in plan.units(planned)] == [[0, 1, 2], [3, 4, 5]]
    assert [len(unit) for unit in plan.units(plan.ordered(jobs("method=a d=1", "method=b d=1")))] == [1, 1]
    assert [len(unit) for unit in plan.units([])] == []


def test_hydra_hands_overrides_through_as_they_were_typed() -> None:
    texts = (
        "dataset.template='Q: {question} A:'",
        'model.path="/a b/it\'s | here\\n"',
        "decoding.stop=['\\n','${x}']",
        "a=100%20 1+1",
    )
    unit = [Job(number=3, overrides=texts, label=""), Job(number=12, overrides=("method=fp16",), label="")]
    other = [Job(number=4, overrides=(), label="")]
    (override,) = OverridesParser.create().parse_overrides([plan.for_hydra([unit, other])])
    values = list(override.sweep_string_iterator())
    parsed = OverridesParser.create().parse_overrides([f"+{plan.JOB}={value}" for value in values])
    assert [plan.decoded(str(one.value())) for one in parsed] == [
        [(3, list(texts)), (12, ["method=fp16"])],
        [(4, [])],
    ]
