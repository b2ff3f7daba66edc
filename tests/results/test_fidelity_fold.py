"""Rows of compared predictions, folded and paired: tails, growth, the point of departure, flips, and their tables."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest

from kvbench.metrics import fidelity as metrics
from kvbench.results import fidelity_fold
from kvbench.results.aggregate import scores
from kvbench.results.columns import RunLine, of_scores, score_cell
from kvbench.results.compare import Comparison, comparison_csv, comparison_markdown
from kvbench.results.record_scores import Fidelity, Score
from kvbench.results.tables import answer_lines
from kvbench.results.typed import plain_tree, read_typed


def row(number: int, factor: float = 1.0, **more: Any) -> dict[str, Any]:
    """A prompt with 20 positions, whose divergence grows by `factor` a token, from `number` on."""
    kld = [factor * k + number for k in range(1, 21)]
    part = {
        "mode": "decode",
        "statistics": "exact",
        "prefill": 64,
        "answers": None,
        "first": {"kld": 0.0, "change": 0.0, "same_top": True},
        "left": None,
        "other_top": [1, 20],
        "kld": kld,
        "change": [-0.01] * 20,
        "nll_base": [1.0] * 20,
        "nll": [1.5] * 20,
        "reference": {"kind": "stored", "device": "cpu", "dtype": "float32", "batch_rows": 2},
    }
    return {
        "id": f"t/{number}",
        "task": "t",
        "length": 96,
        "prediction": "",
        "scores": {},
        "scorer_version": 1,
        "fidelity": {**part, **more},
    }


def test_rows_are_folded_into_means_tails_growth_and_bins() -> None:
    rows = [row(number) for number in (2, 0, 1)]
    entry = scores(rows)["t@96"]
    computed = read_typed(Fidelity, entry["fidelity"], strict=True)
    values = np.concatenate([r["fidelity"]["kld"] for r in rows])
    assert computed.kld.mean == pytest.approx(values.mean()) and computed.kld.max == 22 and computed.kld.min == 1
    assert computed.kld.p99_9 == pytest.approx(np.percentile(values, 99.9))
    assert computed.kld.rms == pytest.approx(np.sqrt((values**2).mean()))
    assert (
        computed.kld.low is not None
        and computed.kld.low == pytest.approx(10.5)
        and computed.kld.high == pytest.approx(12.5)
    )
    assert computed.same_top.share == pytest.approx(0.9) and computed.same_top.low == computed.same_top.high
    assert computed.growth is not None and computed.growth.per_1000 == pytest.approx(1000)
    assert (computed.positions, computed.prompts, computed.first_kld) == (60, 3, 0.0)
    assert [(part.first, part.last, part.n) for part in computed.bins] == [
        (1, 1, 3), (2, 3, 6), (4, 7, 12), (8, 15, 24), (16, 31, 15)
    ]  # fmt: skip
    assert computed.bins[0].same_top == 0.0 and computed.bins[1].same_top == 1.0 and computed.left is None
    assert entry["score"] is None and plain_tree(computed)["nll"] == 1.5


def test_the_point_of_departure_is_censored_and_layers_are_averaged() -> None:
    left = [{"at": 3, "compared": 10, "gap": 0.5}, {"at": None, "compared": 12, "gap": None}]
    layers = [{"own": [0.1, 0.4], "total": [0.1, 0.6]}, {"own": [0.3, 0.2], "total": [0.3, 0.6]}]
    rows = [row(k, left=part, layers=layer) for k, (part, layer) in enumerate(zip(left, layers, strict=True))]
    computed = fidelity_fold.fold_fidelity_rows(rows)
    assert computed is not None
    assert computed["left"] == {"n": 2, "never": 0.5, "median": None, "compared": 11.0, "gap": 0.5}
    assert computed["layers"]["own"] == pytest.approx([0.2, 0.3]) and computed["layers"]["worst"] == 1
    assert fidelity_fold.departure(left[:1]) == {"n": 1, "never": 0.0, "median": 3.0, "compared": 10.0, "gap": 0.5}
    assert fidelity_fold.fold_fidelity_rows([{**row(0), "fidelity": None}]) is None
    alone = fidelity_fold.fold_fidelity_rows(rows[:1])
    assert alone is not None and "low" not in alone["kld"] and alone["growth"] is None


def test_a_pair_of_runs_is_drawn_alike() -> None:
    """Prompts differ by far more than the two runs, whose difference is the same in each prompt."""
    a = [row(number) for number in range(8)]
    b = [row(number, other_top=[1]) for number in range(7, -1, -1)]
    for part in b:
        part["fidelity"]["kld"] = [x + 0.25 for x in part["fidelity"]["kld"]]
    computed = fidelity_fold.pair_fidelity(a, b)
    assert computed is not None
    for name in ("kld_mean", "kld_p99_9"):
        assert computed[name]["diff"] == pytest.approx(0.25) and computed[name]["n"] == 8
        assert computed[name]["low"] == pytest.approx(0.25) and computed[name]["high"] == pytest.approx(0.25)
    assert computed["same_top"]["diff"] == pytest.approx(0.05)
    same = fidelity_fold.pair_fidelity(a, a)
    assert same is not None and all(entry["low"] == entry["high"] == entry["diff"] == 0 for entry in same.values())
    assert fidelity_fold.pair_fidelity(a, [row(99)]) is None


def test_percentiles_of_draws_are_numpys() -> None:
    generator = np.random.default_rng(3)
    groups = [generator.standard_normal(size) for size in (5, 1, 12, 8)]
    for level in (50.0, 99.0, 99.9, 100.0):
        computed = metrics.drawn(groups, level, draws=25, seed=4)
        picks = metrics.picked(4, 25, 4)
        assert np.allclose(computed, [np.percentile(np.concatenate([groups[i] for i in p]), level) for p in picks])


def test_a_slope_is_that_of_least_squares() -> None:
    generator = np.random.default_rng(5)
    index = [np.arange(1, size) for size in (9, 30, 17)]
    values = [0.1 * x + generator.standard_normal(len(x)) for x in index]
    computed = metrics.slope(index, values)
    exact = np.polyfit(np.concatenate(index), np.concatenate(values), 1)[0]
    assert computed[0] == pytest.approx(exact) and computed[1] < computed[0] < computed[2]


def answer(number: int, score: float, tokens: list[int]) -> dict[str, Any]:
    return {"id": f"q/{number}", "task": "q", "scores": {"score": score}, "tokens": tokens, "prediction": ""}


def test_flips_and_departures_of_free_answers() -> None:
    a = {r["id"]: r for r in (answer(0, 1, [1, 2, 3]), answer(1, 0.5, [1, 2]), answer(2, 0, [4]), answer(3, 1, [5]))}
    b = {r["id"]: r for r in (answer(0, 0.9, [1, 9, 3]), answer(1, 0, [1, 2]), answer(2, 1, [6]), answer(3, 1, [5]))}
    computed = fidelity_fold.flips_of(a, b, list(a))
    assert computed is not None
    assert (computed["lost"], computed["won"], computed["flips"], computed["p"], computed["n"]) == (1, 1, 0.5, 1.0, 4)
    left = fidelity_fold.answers_left(a, b, list(a))
    assert left == {"n": 4, "never": 0.5, "median": None, "compared": 1.5, "gap": None}
    assert fidelity_fold.flips_of({"x": {"scores": {}}}, {"x": {"scores": {}}}, ["x"]) is None
    comparison = Comparison(
        ("a", "b"),
        {"q": {"a": 0.6, "b": 0.7, "diff": 0.1, "stderr": 0.2, "n": 4, "nll": None}},
        [],
        0,
        [],
        {"q": {"flips": computed, "left": left}},
        {"q": fidelity_fold.pair_fidelity([row(0), row(1)], [row(0, 2.0), row(1, 2.0)]) or {}},
    )
    shown = comparison_markdown(comparison)
    assert "| q | 50.0 % | 1 | 1 | 1 | > 1.5 | 50 % | 4 |" in shown
    assert "| q KL mean, nats | 11 | 21.5 | +10.5 | +10.5 to +10.5 | 2 |" in shown
    (line,) = csv.DictReader(io.StringIO(comparison_csv(comparison)))
    assert (line["flips"], line["lost"], line["mcnemar_p"], line["never_left"]) == ("0.5", "1", "1.0", "0.5")
    assert float(line["kld_mean_diff"]) == pytest.approx(10.5)


def test_tables_of_runs_show_the_tail_and_the_csv_all_figures() -> None:
    entry = read_typed(Score, scores([row(0), row(1)])["t@96"])
    cell = score_cell(entry)
    assert cell.main == "KL 11 nats, 99.9 % 21" and cell.detail == "same top 90.00 %"
    run: Any = type("Run", (), {"scores": {"t@96": entry, "other": Score(score=0.5)}})()
    figures = {
        name: read_(RunLine("a", run))
        for column in of_scores([RunLine("a", run)])
        for name, read_ in column.csv.items()
    }
    assert figures["t@96 kld_mean"] == pytest.approx(11) and figures["t@96 growth_per_1000"] == pytest.approx(1000)
    assert figures["t@96 never_left"] is None and "other kld_mean" not in figures


def test_answers_without_scores_have_a_place_of_departure_and_no_flips() -> None:
    rows = [{"0": answer(0, 1.0, tokens)} for tokens in ([1, 2, 3], [1, 5, 3])]
    for part in rows:
        part["0"]["scores"] = {}
    entry = {"flips": fidelity_fold.flips_of(*rows, ["0"]), "left": fidelity_fold.answers_left(*rows, ["0"])}
    assert entry["flips"] is None
    assert answer_lines({"text": entry}) == [("text", "-", "-", "-", "-", "1", "0 %", "1")]


def test_intervals_are_drawn_as_often_as_the_module_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(number) for number in range(3)]
    counts = {measure: len(fidelity_fold.drawn(rows, measure)) for measure in fidelity_fold.MEASURES}
    assert counts == {"kld_mean": 10_000, "kld_median": 1_000, "kld_p99_9": 1_000, "same_top": 10_000}
    for name in ("DRAWS", "PERCENTILE_DRAWS"):
        monkeypatch.setattr(fidelity_fold, name, 7)
    assert {len(fidelity_fold.drawn(rows, measure)) for measure in fidelity_fold.MEASURES} == {7}


def test_the_tokens_found_most_probable_are_counted_from_the_first_decoded_one() -> None:
    kld = [0.0] * 4
    decoded = {"fidelity": {"kld": kld, "other_top": [1, 4], "mode": "decode"}}
    simulated = {"fidelity": {"kld": kld, "other_top": [1, 3], "mode": "simulated"}}
    assert fidelity_fold.same_top(decoded).tolist() == [False, True, True, False]
    assert fidelity_fold.same_top(simulated).tolist() == [True, False, True, False]
