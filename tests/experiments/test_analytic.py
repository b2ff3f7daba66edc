"""QuantSpec's items without runs: intensities, bytes, roofline times, and latencies from a file of the bench."""

import json

import pytest

from experiments.data import Plan
from experiments.fold import analytic, points
from experiments.registry import items
from kvbench.bench.choices import shape_of
from kvbench.profiling.intensity import decode_work
from kvbench.profiling.roofline import gpu_named


def folded(name, fold, **plan):
    return fold(items()[f"quantspec/{name}"], Plan(**plan))


def test_the_cells_of_figure_7_are_bytes_of_keys_and_values():
    figure = folded("figure7", analytic.cache_against_weights)
    assert figure.at("Llama-2-7B", "batch 16", "256k").ours == pytest.approx(16 * 2**18 * 2**19 / 1e9)
    assert figure.at("Llama-2-7B", "weights", "1k").ours == pytest.approx(13.477, abs=1e-3)
    gpus = items()["quantspec/figure7"].options["gpus"]
    eight = [figure.at("Llama-2-7B", f"eight {name.upper()}", "1k").ours for name in gpus]
    assert eight == pytest.approx([8 * gpu_named(name).memory / 1e9 for name in gpus])
    assert [verdict.verdict for verdict in figure.verdicts] == ["holds", "holds"]


def test_decoding_lies_below_the_ridge_point_and_prefill_above():
    for name, fold, sign in (("figure2", analytic.decoding, -1), ("figure6", analytic.prefill, 1)):
        figure = folded(name, fold)
        ridge = figure.at("Llama-2-7B", "ridge point, A6000", "aggregate, 64k").ours
        values = [cell.ours for cell in figure.cells if cell.row.startswith("batch")]
        assert len(values) == 4 * 3 * 5 and all(sign * (value - ridge) > 0 for value in values)
        assert [verdict.verdict for verdict in figure.verdicts] == ["holds"]


def test_limits_are_compared_in_both_directions():
    table = folded("table1", analytic.asymptotics)
    values = {(c.model, c.row, *c.column.split(": ")): c.ours for c in table.cells}
    ratios = [values[(*key[:3], "limit")] / value for key, value in values.items() if key[3] == "evaluated"]
    for model in table.models:
        own = [r for key, r in zip([k for k in values if k[3] == "evaluated"], ratios, strict=True) if key[0] == model]
        (claim,) = [v for v in table.verdicts if v.model == model and v.unit == "factor" and v.high == 4]
        assert claim.ours == pytest.approx(max(*own, *(1 / ratio for ratio in own))) and claim.ours > 1.5


def test_attentions_share_of_a_step_is_that_of_its_bytes():
    """Decoding is memory-bound on an A6000, whatever the batch and the context."""
    item = items()["quantspec/figure2"]
    work = decode_work(shape_of("llama2-7b"), 1, 65536, item.options["new_tokens"])
    share = 100 * work["attention"].mops / (work["linear"].mops + work["attention"].mops)
    assert f"{share:.0f} % at 64k" in folded("figure2", analytic.decoding).notes[0]


def test_a_wide_cache_in_a_narrow_model_is_computed_from_the_model_that_is_named():
    figure = folded("figure7", analytic.cache_against_weights, models=("llama3.1-8b",))
    assert figure.at("llama3.1-8b", "batch 1", "1k").ours == pytest.approx(2**10 * 2**17 / 1e9)
    assert figure.verdicts[0].verdict == "does not hold"  # 8 KV heads in place of 32


def test_short_contexts_gain_by_weights_and_long_ones_by_the_cache():
    figure = folded("figure5", analytic.weights_or_kv)
    model = "Llama-2-7B-32K-Instruct"
    gains = {(row, c): figure.at(model, row, c).ours for row in figure.rows for c in ("1k", "128k")}
    assert gains["weights only", "1k"] > gains["KV cache only", "1k"]
    assert gains["weights only", "128k"] < gains["KV cache only", "128k"]
    assert gains["both", "128k"] > max(gains["weights only", "128k"], gains["KV cache only", "128k"])


def test_latencies_of_a_file_are_set_against_the_papers(tmp_path):
    rows = [
        {"model": "7b", "batch": 1, "context": 65536, "q_len": 1, "format": name, "us": us}
        for name, us in (("int8", 150.0), ("int4_g128", 80.0))
    ]
    content = {"device": "a GPU", "baselines": {}, "rows": rows}
    for name in ("64k", "128k", "256k"):
        content["baselines"][f"7b B1 {name} q1"] = {"flash": {"us": 200.0}, "cudnn": {"us": 100.0}}
    (tmp_path / "quantspec_table5.json").write_text(json.dumps(content), encoding="utf-8")
    table = points.latencies(items()["quantspec/table5"], Plan(), tmp_path)
    cell = table.at("Llama-2-7B, one layer", "INT4 (upper nibbles)", "64k")
    assert (cell.ours, cell.paper) == (0.08, 0.54)
    assert {v.claim.split(" at ")[0]: v.ours for v in table.verdicts} == {
        "INT8 (both nibbles)": pytest.approx(4 / 3),
        "INT4 (upper nibbles)": 2.5,
    }
    assert {(v.verdict, v.label) for v in table.verdicts} == {("undecided", "one measurement")}
    assert table.at("Llama-2-7B, one layer", "INT8 (both nibbles)", "256k").reason.startswith("not measured")
