"""Generated records are read by the data sets that they stand in for."""

import pytest

from experiments import standin
from experiments.data import Plan, data_overrides
from experiments.item import Column, Model
from experiments.runs import composed, run_of
from kvbench.config.run_config import checked_config

TINY = Model("tiny")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return Plan(models=("tiny",), data="standin", limit=1, max_new_tokens=8, runs=runs)


@pytest.fixture(scope="module")
def tokenizer():
    from kvbench.models.load import load_tokenizer

    return load_tokenizer(checked_config(composed(("model=tiny",))).model)


def samples(column, plan, tokenizer):
    task = checked_config(composed(run_of("fp16", "tiny", data_overrides(column, plan, TINY), plan).overrides)).task
    if task.needs_tokenizer:
        task.bind(tokenizer)
    return list(task.samples())


@pytest.mark.parametrize("data", standin.LAYOUTS)
def test_each_layout_is_read(data, plan, tokenizer):
    column = Column(name="x", data=data, task="qmsum" if data.startswith("longbench") else "")
    (sample,) = samples(column, plan, tokenizer)
    assert sample.prompt.strip() or sample.rules.ids or sample.work
    assert not sample.warm_up


@pytest.mark.parametrize("task", ["trec", "lsht", "passage_count", "passage_retrieval_en", "passage_retrieval_zh"])
def test_tasks_of_longbench_with_answers_of_their_own(task, plan, tokenizer):
    (sample,) = samples(Column(name="x", data="longbench", task=task), plan, tokenizer)
    assert sample.task == task and sample.answers[0]


def test_the_same_files_every_time(tmp_path):
    first, second = (
        standin.path("longbench", "qasper", folder, 4096).read_text(encoding="utf-8")
        for folder in (tmp_path / "a", tmp_path / "b")
    )
    assert first == second and first.count("\n") == standin.RECORDS


def test_long_contexts_have_long_records(tmp_path):
    short, long = (standin.path("longbench", "qasper", tmp_path, context) for context in (4096, 16384))
    assert long.stat().st_size > 2 * short.stat().st_size
