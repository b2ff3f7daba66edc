"""Choices of a command line as overrides: models, data sets, lengths, limits, points of time and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments import standin
from experiments.data import (
    COMPILED,
    Plan,
    columns_of,
    context_of,
    data_overrides,
    groups_of,
    point_overrides,
    runs_here,
    scaled,
    shortened,
)
from experiments.fold.sources import Choice, Source, conditions, missing_runs, runs_of, setting_of
from experiments.item import Column, Grid, Group, Model, Row

TINY, LLAMA = Model("tiny"), Model("llama2-7b", "Llama2-7B")
POINT = Column(
    name="memory", data="efficiency", figure="peak_decode", scale=2**-30, unit="GiB", prompt=4096, batch=2,
    prompts={"longchat-7b": 8192}, new_tokens=64, memory_gb=44.7, options=("dataset.untimed=1",),
)  # fmt: skip
ANSWERS = Column(name="QMSum", data="longbench_cocktail", task="qmsum")
ITEM = Grid(
    id="cocktail/table9",
    number="Table IX",
    title="t",
    caption="c",
    models=(LLAMA, Model("longchat-7b")),
    rows=(
        Row(name="FP16", setting="fp16", options=("runtime.batch_size=1",)),
        Row(name="KIVI", setting="kivi:int2", timed="kivi:int4", small="kivi:int8"),
        Row(name="best", setting="quantspec", choices=("quantspec:gamma=2", "quantspec:gamma=4")),
        Row(name="none", setting=None, absent="no key"),
    ),
    columns=(ANSWERS, replace(ANSWERS, name="TREC", task="trec", only=("longchat-7b",)), POINT),
    groups=(Group(name="Average"),),
    mini=(Column(name="needle", data="mini", task="needle"),),
)


def test_a_plan_has_the_items_models_or_those_that_are_named():
    assert Plan().models_of(ITEM) == ITEM.models
    assert Plan(models=("tiny", "llama2-7b")).models_of(ITEM) == (TINY, LLAMA)  # the paper's keeps its name
    assert Model("x").title == "x" and LLAMA.title == "Llama2-7B"
    assert Plan().compares(ITEM, LLAMA) and not Plan().compares(ITEM, TINY)
    assert not Plan(data="mini").compares(ITEM, LLAMA)


@pytest.mark.parametrize(
    ("plan", "folder"),
    [
        (Plan(), "results/cocktail/table9"),
        (Plan(data="mini"), "results/cocktail/table9/paper-models-mini"),
        (Plan(models=("tiny", "a/b")), "results/cocktail/table9/tiny+a_b-paper"),
        (Plan(models=("tiny",), data="standin", out=Path("o")), "o/cocktail/table9/tiny-standin"),
    ],
)
def test_other_models_and_data_have_a_folder_of_their_own(plan, folder):
    assert plan.folder(ITEM) == Path(folder) and ITEM.paper == "cocktail"


def test_mini_replaces_columns_and_groups():
    mini = Plan(data="mini")
    names = [column.name for column in columns_of(ITEM, mini)]
    assert names == ["needle", "memory"]
    assert [column.name for column in columns_of(replace(ITEM, no_points=True), mini)] == ["needle"]
    assert [column.name for column in columns_of(replace(ITEM, columns=(POINT,)), mini)] == ["memory"]
    own = (Group(name="Mean"),)
    assert groups_of(replace(ITEM, mini_groups=own), mini) == own and groups_of(ITEM, mini) == ITEM.groups
    assert groups_of(replace(ITEM, mini_groups=own), Plan()) == ITEM.groups


def test_overrides_of_a_data_set():
    assert data_overrides(ANSWERS, Plan(), LLAMA) == ["dataset=longbench_cocktail", "dataset.tasks=[qmsum]"]
    limited = Plan(limit=3, max_new_tokens=7, paths=(("longbench_cocktail", "/here"),))
    assert data_overrides(ANSWERS, limited, LLAMA)[2:] == [
        "dataset.path=/here",
        "dataset.limit=3",
        "decoding.max_new_tokens=7",
    ]
    mini = Column(name="needle", data="mini", task="needle")
    assert data_overrides(mini, Plan(lengths=(512, 1024)), TINY) == ["dataset=mini", "dataset.lengths=[512,1024]"]
    assert data_overrides(mini, Plan(), TINY) == ["dataset=mini"]
    text = Column(name="text", data="perplexity/wikitext2")
    assert data_overrides(text, Plan(max_new_tokens=7), TINY) == ["dataset=perplexity/wikitext2", "dataset.window=1024"]
    assert data_overrides(text, Plan(lengths=(256, 512)), LLAMA)[1:] == ["dataset.window=512"]
    assert data_overrides(text, Plan(), LLAMA) == ["dataset=perplexity/wikitext2"]
    books = Column(name="books", data="pg19", options=("dataset.lengths=[2048]", "dataset.skip=0"))
    assert data_overrides(books, Plan(lengths=(512, 512, 99999)), LLAMA) == [
        "dataset=pg19", "dataset.skip=0", "dataset.lengths=[512,4006]", "model.prompt_limit=null"
    ]  # fmt: skip


def test_stand_ins_are_written_for_the_models_context(tmp_path):
    plan = Plan(data="standin", runs=tmp_path)
    books = Column(name="books", data="pg19", options=("dataset.lengths=[512]",))
    texts = data_overrides(books, plan, TINY)
    assert texts[-2:] == [f"dataset.path={tmp_path}/standin/pg19-256", "dataset.warm_up=0"]
    assert "dataset.warm_up=0" not in data_overrides(ANSWERS, plan, LLAMA)
    assert standin.path("longbench", "qasper", tmp_path, 100).parent.name == "longbench-32"
    assert standin.path("longbench", "qasper", tmp_path, 10**6).parent.name == "longbench-1000"


def test_points_are_smaller_with_tiny_and_with_other_lengths():
    assert scaled(POINT, Plan(), LLAMA) == POINT
    assert scaled(POINT, Plan(), Model("longchat-7b")) == replace(POINT, prompt=8192)
    small = scaled(POINT, Plan(), TINY)
    assert (small.prompt, small.new_tokens, small.memory_gb, small.unit, small.scale) == (1024, 16, None, "MiB", 2**-20)
    assert scaled(POINT, Plan(lengths=(512, 99)), LLAMA).prompt == 512
    assert scaled(POINT, Plan(lengths=(99999,)), LLAMA).prompt == 4096
    assert [scaled(POINT, Plan(max_new_tokens=n), LLAMA).new_tokens for n in (1, 9, 999)] == [2, 9, 64]
    assert scaled(ANSWERS, Plan(lengths=(9,)), TINY) == ANSWERS
    assert runs_here(replace(POINT, batch=5), Plan(), TINY) == "with tiny, batches up to 4 are run"
    assert runs_here(replace(POINT, batch=4), Plan(), TINY) == runs_here(replace(POINT, batch=5), Plan(), LLAMA) == ""
    assert shortened(POINT, Plan(), LLAMA) == "" == shortened(POINT, Plan(), Model("longchat-7b"))
    assert shortened(POINT, Plan(), TINY) == "efficiency 1024 + 16 tokens in place of 4096 + 64"


def test_points_of_one_run_are_measured_together():
    more = [replace(POINT, batch=8), POINT, replace(POINT, prompt=512)]
    assert point_overrides(more, LLAMA) == [
        "dataset=efficiency", "dataset.untimed=1", "dataset.prompts=[512,4096]", "dataset.batches=[2,8]",
        "dataset.new_tokens=64", "dataset.repeats=1", "runtime.memory_limit_gb=44.7", "model.weights=random",
        "model.dtype=bfloat16",
    ]  # fmt: skip
    compiled = [replace(POINT, memory_gb=None, options=(COMPILED,))]
    assert COMPILED in point_overrides(compiled, LLAMA)
    plain = point_overrides(compiled, TINY)  # a CPU's steps are not
    assert plain == [
        "dataset=efficiency", "dataset.prompts=[4096]", "dataset.batches=[2]", "dataset.new_tokens=64",
        "dataset.repeats=1",
    ]  # fmt: skip
    assert conditions(POINT) == (("dataset.untimed=1",), 64, 44.7)
    assert context_of("llama2-7b") == 4096 == context_of("OWNER/NAME") and context_of("llama3.1-8b") > 100_000


def test_each_cell_has_its_run_or_the_reason_why_there_is_none(tmp_path):
    plan = Plan(runs=tmp_path)
    by_place = runs_of(ITEM, plan)
    assert by_place["Llama2-7B", "none", "QMSum"] == Source({}, reason="no key")
    assert by_place["Llama2-7B", "FP16", "TREC"] == Source({}, reason="not in the paper's table")
    assert "dataset.tasks=[trec]" in by_place["longchat-7b", "FP16", "TREC"].overrides
    full = by_place["Llama2-7B", "FP16", "QMSum"]
    assert full.overrides == (
        "method=fp16", "model=llama2-7b", "dataset=longbench_cocktail", "dataset.tasks=[qmsum]",
        "runtime.batch_size=1", f"runtime.results_dir={tmp_path}",
    )  # fmt: skip
    assert (full.model, full.data) == ("llama2-7b", "longbench_cocktail")
    assert full.command == "python -m kvbench " + " ".join(full.overrides)
    timed, answers = (by_place["Llama2-7B", "KIVI", name].overrides for name in ("memory", "QMSum"))
    assert "quantizer=int4" in timed and "quantizer=int2" in answers
    choice = by_place["Llama2-7B", "best", "QMSum"]
    assert isinstance(choice, Choice) and ["method.gamma=2" in run.overrides for run in choice.runs] == [True, False]
    small = runs_of(ITEM, Plan(models=("tiny",), data="mini", device="cpu", rerun=True))
    words = small["tiny", "KIVI", "needle"].overrides
    assert "quantizer=int8" in words and words[-2:] == ("runtime.rerun=true", "runtime.device=cpu")
    assert setting_of(ITEM.rows[0], Plan(data="mini")) == "fp16"
    assert (
        setting_of(ITEM.rows[1], Plan()) == "kivi:int2" and setting_of(ITEM.rows[1], Plan(data="mini")) == "kivi:int8"
    )
    runs = missing_runs(ITEM, Plan(models=("tiny",), runs=tmp_path))
    assert len(runs) == len(set(runs)) == 2 * 4 + 3  # two tasks of four settings, and three of the points
    large = runs_of(replace(ITEM, columns=(replace(POINT, batch=8),)), Plan(models=("tiny",)))
    assert large["tiny", "FP16", "memory"] == Source({}, reason="with tiny, batches up to 4 are run")
