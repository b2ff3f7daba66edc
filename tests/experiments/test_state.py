"""Results of items as the list shows them: models, data, limits, and what is wrong with the runs behind them."""

import json

import pytest

from experiments.data import Plan
from experiments.fold.analyses import code_digest
from experiments.registry import items
from experiments.session import states

ITEM = items()["logquant/table4"]


def cells(folder, *runs, data="mini", limit=4, **more):
    """Write a result of two cells, one of which has a number."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [{"ours": 1.0, "runs": list(runs)}, {"ours": None, "runs": []}]
    (folder / "cells.json").write_text(json.dumps({"data": data, "limit": limit, "cells": numbers, **more}))


def analysis(runs, name, **about):
    (runs / name).mkdir(parents=True)
    (runs / name / "about.json").write_text(json.dumps(about))


@pytest.fixture
def plan(tmp_path):
    return Plan(out=tmp_path / "results", runs=tmp_path / "runs")


def test_without_results_there_is_none(plan):
    assert states(ITEM, plan) == []


def test_models_data_and_limits(plan):
    folder = plan.out / ITEM.id
    cells(folder, data="paper", limit=None)
    cells(folder / "tiny-mini")  # of an older version: its models are in the folder's name
    cells(folder / "tiny-standin", data="standin", limit=1, options={"models": [], "max_new_tokens": 8, "lengths": []})
    lengths = {"models": ["a/b", "tiny"], "max_new_tokens": None, "lengths": [256, 512]}
    cells(folder / "a_b+tiny-paper", data="paper", limit=2, options=lengths)
    cells(folder / "paper-models-mini", limit=None)
    assert states(ITEM, plan) == [
        "the paper's models, the paper's data: 1 of 2 cells",
        "a/b, tiny, the paper's data, limit 2, lengths 256 512: 1 of 2 cells",
        "the paper's models, mini: 1 of 2 cells",
        "tiny, mini, limit 4: 1 of 2 cells",
        "tiny, standin, limit 1, max-new-tokens 8: 1 of 2 cells",
    ]


def test_runs_that_are_missing_incomplete_or_of_older_code(plan):
    names = ("attention-1", "attention-2", "attention-3", "attention-4", "0123456789-0123456789")
    cells(plan.out / ITEM.id, *names)
    analysis(plan.runs, names[0], code=code_digest())
    analysis(plan.runs, names[1], code="0" * 12)
    (plan.runs / names[2]).mkdir()
    assert states(ITEM, plan) == [
        f"the paper's models, mini, limit 4: 1 of 2 cells; 2 of 5 runs are not in {plan.runs}; "
        "1 of 5 runs is incomplete; 1 of 5 runs is of older code: analysis"
    ]
    cells(plan.out / ITEM.id, names[3])
    analysis(plan.runs, names[3])  # of a version that did not record its code
    assert states(ITEM, plan)[0].endswith("; 1 of 1 run is of unknown code")


def test_points_of_another_machine_that_are_missing(plan):
    cells(plan.out / ITEM.id, "cocktail_llama2-7b.json", "lost.json")
    assert states(ITEM, plan)[0].endswith("; missing below results/h200: lost.json")


@pytest.mark.parametrize("text", ['{"cells', "[]", "{}", '{"cells": [{"ours": 1.0}], "data": "mini", "limit": 4}'])
def test_a_damaged_result_does_not_end_the_list(plan, text):
    cells(plan.out / ITEM.id)
    (plan.out / ITEM.id / "cells.json").write_text(text)
    assert "cells.json is damaged" in states(ITEM, plan)[0]


@pytest.mark.parametrize("text", ['{"code', "[]"])
def test_an_analysis_with_a_damaged_description_is_incomplete(plan, text):
    cells(plan.out / ITEM.id, "attention-1")
    analysis(plan.runs, "attention-1", code=code_digest())
    (plan.runs / "attention-1" / "about.json").write_text(text)
    assert states(ITEM, plan)[0].endswith("; 1 of 1 run is incomplete")
