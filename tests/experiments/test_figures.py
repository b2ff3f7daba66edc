"""Figures that the documents quote, taken from the records of runs."""

import pytest

from experiments import quickstart
from experiments.checks import readme
from experiments.runs import composed
from experiments.tiny import perplexity
from kvbench.config.run_config import check

PAIRED = {"diff": 0.0154, "stderr": 0.0049, "n": 16}


def record(**more):
    return {"run_id": "a-b", "kv_bytes": {"used": {"total": 2**20}, "ratio": 3.19}, **more}


def test_perplexity_of_a_run():
    score = {"nll": {"mean": 4.7, "stderr": 0.1, "n": 16, "vs_fp16": PAIRED}, "perplexity": {"ppl": 113.409}}
    entry = perplexity.cell(record(scores={"perplexity/wikitext2": score}))
    assert entry == {"ppl": 113.409, "diff": 0.0154, "stderr": 0.0049, "n": 16, "ratio": 3.19, "run": "a-b"}
    assert perplexity.signed(entry) == "+0.0154 ± 0.0049"
    alone = {"nll": {"mean": 4.7, "stderr": 0.1, "n": 16, "vs_fp16": None}, "perplexity": {"ppl": 111.0}}
    assert perplexity.signed(perplexity.cell(record(scores={"x": alone}))) == ""


@pytest.mark.parametrize(
    "key", ["decode/books/hf_quantized 2 bits (hqq)", "axes/books/token/channel", "prefill/books/cocktail"]
)
def test_cells_of_perplexity_are_runs_that_kvbench_takes(key, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    overrides = perplexity.cells()[key]
    config = composed((*overrides, f"dataset.path={tmp_path}"))
    assert check(config).task.window == 512
    assert len(perplexity.cells()) == 12 + 8 + 2 + 4 + 1


def test_figures_of_make_run():
    cell = {"score": 0.875, "stderr": 0.125, "n": 8, "vs_fp16": {"diff": -0.125, "stderr": 0.125}}
    times = {"ttft_s": {"median": 6.1, "n": 5}, "tpot_s": {"median": 0.085}}
    peaks = {"peak_bytes": {"prefill": 3, "decode": 2}}
    entry = quickstart.figures(record(scores={"copy@2048": cell}, mean=cell, **times, **peaks))
    assert entry["tasks"]["copy@2048"] == entry["mean"]
    score, difference, reach = readme.scored(entry["mean"])
    assert (score, difference) == (0.875, -0.125) and reach == pytest.approx(0.346, abs=1e-3)
    assert readme.scored({**entry["mean"], "diff_low": -0.5, "diff_high": 0.0})[2] == 0.375
    assert (entry["kv_bytes"], entry["ratio"], entry["peak_decode"]) == (2**20, 3.19, 2)
    assert (entry["ttft_s"], entry["tpot_s"]) == (6.1, 0.085)
