"""LogQuant's items on attention: folds of an analysis against values computed by hand."""

import json
import math

import numpy as np
import pytest

from experiments.data import Plan
from experiments.fold import attention, spikes
from experiments.fold.analyses import Analysis, code_digest
from experiments.registry import items
from experiments.write import write_item
from kvbench.analysis.bins import Bins
from kvbench.analysis.outcome import Outcome, Shape
from tests.data_support import data_dir

NAMES = ("table4", "figure1", "figure2", "figure3", "figure4", "figure8")
LAYERS, HEADS, STEPS, TOKENS = 2, 3, 4, 60
BINS = Bins()


def outcome_of(settings, prompts=4, seed=0):
    """An outcome whose errors grow with the number of the setting."""
    random = np.random.default_rng(seed)
    outcome = Outcome("tiny", Shape(LAYERS, HEADS), BINS, tuple(settings))
    shape = (LAYERS, HEADS, BINS.count)
    for number in range(prompts):
        mass = random.random(shape).astype(np.float32)
        visible = np.tile(np.minimum([1, 1, *([1] * 1), *(1 << p for p in range(BINS.doublings))], 2048), (LAYERS, 1))
        exact = {"mass": mass / mass.sum(-1, keepdims=True), "spikes": random.random(shape) + 0.1, "visible": visible}
        errors = {
            name: {
                "mass": mass,
                "l1": (place + 1) * random.uniform(0.9, 1.1, shape) / 100,
                "kl": (place + 1) * random.uniform(0.9, 1.1, shape) / 100,
                "lost": mass * 0,
                "coverage": exact["mass"] / (place + 1),
                "full": np.full(shape, 5.0),
                "output": (place + 1) * random.uniform(0.9, 1.1, shape[:2]),
                "parts": mass,
            }
            for place, name in enumerate(settings)
        }
        positions = {part: [random.random(TOKENS + step + 1) for step in range(STEPS)] for part in ("highest", "mean")}
        bills = dict.fromkeys(settings, (100, 400))
        outcome.add(f"text {number}", TOKENS, STEPS, exact, errors, bills, positions)
    return outcome


@pytest.fixture
def folded(monkeypatch):
    """The function that folds an item over an analysis that is made up."""

    def fold(name, plan, settings=None):
        item = items()[f"logquant/{name}"]
        made = {}

        def analysis(model, data, wanted, plan, *, prompts, steps):
            made["settings"], made["outcome"] = wanted, outcome_of(wanted)
            return Analysis(made["outcome"], "attention-0123")

        for module in (attention, spikes):
            monkeypatch.setattr(module, "analysis", analysis)
        compute = item.compute.partition(":")
        module = {"attention": attention, "spikes": spikes}[compute[0]]
        return item, getattr(module, compute[2])(item, plan), made["outcome"]

    return fold


@pytest.mark.parametrize("name", NAMES)
def test_every_item_is_folded_written_and_drawn(name, folded, tmp_path):
    pytest.importorskip("matplotlib")
    plan = Plan(models=("tiny",), data="mini", limit=1, out=tmp_path)
    item, table, _ = folded(name, plan)
    where, reason = write_item(item, table, plan)
    folder = where.path
    assert reason == "" and (folder / "table.md").read_text().count("attention") > 0
    cells = json.loads((folder / "cells.json").read_text())
    assert all(cell["ours"] is not None and cell["n"] == 4 for cell in cells["cells"])
    assert all(cell["runs"] == ["attention-0123"] and cell["paper"] is None for cell in cells["cells"])
    assert cells["claims"] and all(one["verdict"] != "not run" for one in cells["claims"])
    if item.draw != "table":
        assert (folder / "figure.png").stat().st_size > 5000 and (folder / "figure.svg").is_file()


@pytest.mark.slow  # 2 s
def test_an_analysis_is_made_once_and_a_killed_one_goes_on(monkeypatch, tmp_path):
    """On the bundled model with one short prompt of each of three bundled tasks."""
    from experiments.fold import analyses
    from experiments.item import Column, Model
    from kvbench.analysis import analyse as module

    plan = Plan(models=("tiny",), data="mini", limit=1, lengths=(512,), runs=tmp_path)
    chosen = {"KIVI": "kivi:int2:residual=32"}
    monkeypatch.setattr(analyses, "SAVED", 1)
    tasks = ("dataset.tasks=[key_value,multi_value,repeat]",)
    monkeypatch.setattr(analyses, "MINI", Column(name="mini", data="mini", options=tasks))
    observed, calls = module.observed, []

    def cut(loaded, text, methods, options):
        calls.append(text.id)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return observed(loaded, text, methods, options)

    monkeypatch.setattr(module, "observed", cut)
    make = lambda plan: analyses.analysis(Model("tiny"), (), chosen, plan, prompts=2, steps=1)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        make(plan)
    assert make(Plan(**{**vars(plan), "fold_only": True})).reason == "not run"
    first = make(plan)
    assert len(calls) == 4 and len(set(calls)) == 3 and len(first.outcome.prompts) == 3
    assert [path.name for path in tmp_path.iterdir()] == [first.id]
    again = make(plan)
    assert len(calls) == 4 and again.id == first.id and again.outcome.rows == first.outcome.rows
    absent = analyses.analysis(Model("llama3-8b-instruct"), (), chosen, plan, prompts=2, steps=1)
    assert absent.outcome is None and "llama3-8b-instruct" in absent.reason


def test_the_papers_own_records(tmp_path):
    """Figure 2 reads GSM8K and OpenBookQA, with the bundled model in place of the paper's."""
    paths = (
        ("gsm8k_logquant", str(data_dir("gsm8k"))),
        ("openbookqa", str(data_dir("openbookqa"))),
    )
    plan = Plan(models=("tiny",), limit=1, max_new_tokens=2, paths=paths, runs=tmp_path)
    table = spikes.spikes_by_step(items()["logquant/figure2"], plan)
    assert [cell.row for cell in table.cells] == ["GSM8K", "OpenBookQA"]
    assert all(0 <= cell.ours <= 100 and cell.n == 1 for cell in table.cells)
    assert len(table.arrays["panels"]) == 4


def test_table_4_has_the_papers_numbers_for_its_model_and_data():
    from experiments.fold.attention import _published

    item = items()["logquant/table4"]
    heading = attention.Heading(name="L1 error")
    paper = [_published(item, Plan(), item.models[0], row, heading) for row in item.options["settings"]]
    assert paper == [432.5, 556.1, 1076.7, 1612.56]
    assert _published(item, Plan(data="mini"), item.models[0], "KiVi (2-bit)", heading) is None


def test_table_4_sums_over_layers_and_heads(folded):
    _, table, outcome = folded("table4", Plan(models=("tiny",), data="mini"))
    own = outcome.errors["KiVi (2-bit)"]["l1"].sum((1, 2, 3))
    base = outcome.errors["LogQuant (2-bit)"]["l1"].sum((1, 2, 3))
    cell = table.at("tiny", "KiVi (2-bit)", "L1 error")
    assert cell.ours == pytest.approx(own.mean()) and cell.stderr == pytest.approx(own.std(ddof=1) / 2)
    assert cell.to_base == pytest.approx((own - base).mean())
    share = table.at("tiny", "KiVi (2-bit)", "of its maximum")
    assert share.ours == pytest.approx(100 * own.mean() / (2 * LAYERS * HEADS))
    one = next(v for v in table.verdicts if v.claim.startswith("LogQuant's error is smaller than KiVi's (2-bit)"))
    assert one.verdict == "holds" and one.paper == pytest.approx(123.6) and one.ours == pytest.approx(cell.to_base)


def test_errors_by_distance_add_up(folded):
    _, table, outcome = folded("figure8", Plan(models=("tiny",), data="mini"))
    whole = 100 * outcome.figures("KiVi (2-bit)", "l1_share").mean()
    sinks = [table.at("tiny", "KiVi (2-bit)", f"token {n}").ours for n in (0, 1)]
    parts = [table.at("tiny", "KiVi (2-bit)", name).ours for name in ("newest 128", "128 and more")]
    assert sum(sinks) + sum(parts) == pytest.approx(whole, rel=1e-5)


def test_coverage_leaves_the_sinks_out_and_divides_by_the_tokens(folded):
    item, table, outcome = folded("figure4", Plan(models=("tiny",), data="mini"))
    assert item.options["settings"]["KiVi"].format(R=128) == "streamingllm:sinks=0:budget=128"
    covered = outcome.errors["H2O 192"]["coverage"][..., 2:].sum(-1).mean((1, 2))
    cell, equation = (table.at("tiny", "H2O", name) for name in ("R = 192", "R = 192, eq. 2"))
    assert cell.ours == pytest.approx(1000 * covered.mean() / (5 * (BINS.count - 2)), rel=1e-4)
    assert equation.ours == pytest.approx(1000 * covered.mean() / 192, rel=1e-4)


def test_the_exponent_of_spikes():
    distances = np.array([0, 1, 2, 4, 8, 16, 32.0])
    visible = np.array([1, 1, 2, 4, 8, 16, 32.0])
    for exponent in (-1.0, 0.0, -2.0):
        spiked = np.where(distances > 0, visible * np.maximum(distances, 1) ** exponent, 0)
        assert spikes.exponent_of(spiked, visible, distances) == pytest.approx(exponent, abs=1e-9)
        whole, error = spikes.jackknifed(np.stack([spiked] * 3), np.stack([visible] * 3), distances)
        assert whole == pytest.approx(exponent, abs=1e-9) and error == pytest.approx(0.0, abs=1e-9)
    random = np.random.default_rng(0)
    noisy = np.stack([visible / np.maximum(distances, 1) * random.uniform(0.5, 1.5, 7) for _ in range(8)])
    whole, error = spikes.jackknifed(noisy, np.stack([visible] * 8), distances)
    assert 0 < error < 0.5 and abs(whole + 1) < 4 * error
    without = [spikes.exponent_of(np.delete(noisy, i, 0).sum(0), 7 * visible, distances) for i in range(8)]
    assert error == pytest.approx(math.sqrt(7) * np.std(without))  # n = 8
    assert math.isnan(spikes.jackknifed(noisy[:1], visible[None], distances)[1])


def test_tokens_shared_by_consecutive_steps():
    same = np.tile(np.arange(20.0), (3, 1))
    assert spikes.shared_share(same, 4, 18) == 1.0
    turned = np.stack([np.arange(20.0), np.arange(20.0)[::-1]])
    assert spikes.shared_share(turned, 4, 20) == 0.0
    sunk = np.where(np.arange(20) < 18, np.arange(20.0), -1.0)
    assert spikes.shared_share(np.stack([np.arange(20.0), sunk]), 4, 20) == 0.5
    late = np.arange(20.0)
    late[[18, 19]] = 100  # tokens of the answer, which are not counted
    assert spikes.shared_share(np.stack([np.arange(20.0), late]), 4, 18) == 1.0
    assert math.isnan(spikes.shared_share(same[:1], 4, 18))


def test_an_outcome_is_stored_and_read_again(tmp_path):
    outcome = outcome_of(["kivi:int2", "logquant:evict=true"], prompts=2)
    outcome.save(tmp_path, {"command": "x"})
    again = Outcome.load(tmp_path)
    assert again.rows == outcome.rows and again.prompts == outcome.prompts and again.bins == outcome.bins
    assert np.allclose(again.errors["logquant:evict=true"]["l1"], outcome.errors["logquant:evict=true"]["l1"])
    assert np.allclose(again.positions["highest"]["text 1"], outcome.positions["highest"]["text 1"])
    assert again.positions["highest"]["text 1"].shape == (STEPS, TOKENS + STEPS)
    assert len(code_digest()) == 12
