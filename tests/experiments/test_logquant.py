"""LogQuant's tables: the folds of task groups against the averages that the paper prints, and against real answers."""

import ast
import gzip
import json

import pytest

from experiments import published
from experiments.data import Plan
from experiments.fold.grid import Source, fold_grid
from experiments.logquant.common import ANSWER, GROUPS, GSM8K_KL, ROUGE, TASKS
from experiments.logquant.table2 import ITEM as TABLE2
from experiments.logquant.table3 import ITEM as TABLE3
from experiments.logquant.table6 import ITEM as TABLE6
from experiments.logquant.table7 import ITEM as TABLE7
from experiments.registry import items
from kvbench.metrics import longbench
from tests.data_support import data_dir, read_lines


def printed(item, model, row, tasks):
    """The item's printed cells as one row of a run each, and the group's mean of them."""
    cells = {}
    for column in item.columns:
        if column.name in tasks:
            number = published.lookup(item.published, {**model, **row.published, **column.published}, "score")
            if number is not None:
                cells[column.name] = number
    return cells


def sources(model, row, cells):
    return {
        (model, row, task): Source({"a": {"task": task, "scores": {"score": score / 100}}}, ("run",))
        for task, score in cells.items()
    }


@pytest.mark.parametrize("row", [row for row in TABLE2.rows if row.published], ids=lambda row: row.name)
def test_the_cells_of_table_7_give_the_groups_of_table_2(row):
    model = TABLE2.models[0]
    of_7 = next(other for other in TABLE7.rows if other.name == row.name)
    cells = printed(TABLE7, {"model": model.name}, of_7, [task for tasks in TASKS.values() for task in tasks])
    assert len(cells) == 21
    folded = fold_grid(TABLE2, Plan(), sources(model.title, row.name, cells))
    for group in GROUPS:
        cell = folded.at(model.title, row.name, group.name)
        assert cell.paper is not None
        assert cell.ours == pytest.approx(cell.paper, abs=0.0101), group.name  # printed to 0.01, partly cut


MODELS_OF_BOTH = [model for model in TABLE3.models if model.name in {other.name for other in TABLE6.models}]


@pytest.mark.parametrize("model", MODELS_OF_BOTH, ids=lambda model: model.name)
def test_the_cells_of_table_6_give_the_groups_of_table_3(model):
    compared = 0
    for row in [row for row in TABLE3.rows if row.published]:
        of_6 = next(other for other in TABLE6.rows if other.name == row.name)
        cells = printed(TABLE6, {"model": model.name}, of_6, [task for tasks in TASKS.values() for task in tasks])
        folded = fold_grid(TABLE3, Plan(), sources(model.title, row.name, cells))
        for group in GROUPS:
            cell = folded.at(model.title, row.name, group.name)
            if cell.paper is not None and not set(group.columns) & set(ROUGE):
                assert cell.ours == pytest.approx(cell.paper, abs=0.0151), (row.name, group.name)
                compared += 1
    assert compared >= 8


#: tasks that are scored fast: neither ROUGE nor the edit similarity of code
FAST = ("narrativeqa", "qasper", "hotpotqa", "2wikimqa", "musique", "trec", "triviaqa", "lsht", "passage_count")


def test_published_answers_of_llama_2_fold_to_their_published_scores():
    folder = data_dir("longbench_preds", "llama2-7b-chat")
    wanted = json.loads(gzip.decompress((folder / "result.json.gz").read_bytes()))
    model, found = "llama2-7b-chat", {}
    for task in FAST:
        rows = {}
        for number, line in enumerate(read_lines(folder / f"{task}.jsonl.gz")):
            record = {key: text if key == "pred" else parsed(text) for key, text in line.items()}
            score = longbench.score_longbench(task, record["pred"], record["answers"], record["all_classes"])
            rows[str(number)] = {"task": task, "scores": {"score": score}}
        found[model, "baseline", task] = Source(rows, ("run",))
    folded = fold_grid(TABLE6, Plan(models=(model,)), found)
    for task in FAST:
        cell = folded.at(model, "baseline", task)
        assert (round(cell.ours, 2), cell.n) == (wanted[task], 200), task
    assert folded.at(model, "baseline", "lcc").ours is None


def parsed(text):
    return ast.literal_eval(text) if isinstance(text, str) else text


def test_each_group_of_table_5_has_its_data_sets():
    lines = [line for line in published.published_lines("logquant_table5") if line["category"] != "Math"]
    assert {(line["category"], line["dataset"]) for line in lines} == {
        (group, task) for group, tasks in TASKS.items() for task in tasks
    }


def test_every_row_that_claims_a_published_cell_has_one():
    for name in ("table1", "table2", "table3", "table6", "table7"):
        item = items()[f"logquant/{name}"]
        for row in [row for row in item.rows if row.published]:
            folded = fold_grid(item, Plan(), {})
            shown = [cell for cell in folded.cells if cell.row == row.name and cell.paper is not None]
            assert shown, (name, row.name)


def test_a_window_that_no_answer_fills_is_claimed_once():
    """KiVi packs nothing of an answer shorter than its window: its KL is the same for all windows of Figure 6."""
    item = items()["logquant/figure6"]
    windows = {f"KiVi, R {exact}": exact for exact in (128, 192, 256)}
    settings = {row.name: row.setting for row in item.rows}
    assert {name: settings[name] for name in windows} == {n: f"hf_quantized:residual={r}" for n, r in windows.items()}
    assert f"dataset.max_new_tokens={ANSWER}" in GSM8K_KL.options and min(windows.values()) > ANSWER
    judged = [claim.first for claim in item.claims if claim.column == GSM8K_KL.name and claim.first in windows]
    assert judged == ["KiVi, R 128"]
    caption = " ".join(item.caption.split())
    assert f"answers of {ANSWER} tokens" in caption and "its KL is the same for every R" in caption
