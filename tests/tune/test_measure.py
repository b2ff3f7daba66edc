"""KL divergence of recipes by one pass of many tokens, beside the steps of ``dataset=fidelity``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.cache.progress import Options
from kvbench.decoding.fidelity import follow
from kvbench.errors import CacheError, ConfigError, DataError, NonFiniteError
from kvbench.methods.load import load_method
from kvbench.runner.fidelity_samples import Comparisons
from kvbench.runner.rows import Machine
from kvbench.tune.aim import Aim
from kvbench.tune.measure import method_of, scored_states
from kvbench.tune.search import run_search
from kvbench.tune.session import Tuning, percentile, recipe_record
from tests.tune.support import engine_config

RECIPE = ("q8_0/iq4_nl", "q4_1")


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    folder = tmp_path_factory.mktemp("tune")
    return Tuning(engine_config(folder), 2, 2, 1, folder / "evaluations.jsonl")


def test_a_recipe_scores_what_dataset_fidelity_measures_step_by_step(tmp_path: Path, tuning: Tuning) -> None:
    config = engine_config(tmp_path, reference="live")
    method: Any = config.method
    method.layers = "0:q8_0/iq4_nl,1:q4_1"
    loaded = tuning.evaluators[0].loaded
    config.task.bind(loaded.tokenizer)
    samples = list(config.task.samples())
    rows = Comparisons(config, loaded, config.task, Machine("cpu", "float32"), Options()).rows(
        samples, first=False, report=None
    )
    stepwise = np.array([row["fidelity"]["kld"] for row in rows])
    kl, _ = tuning.test(RECIPE)
    ours = [tuning.evaluators[0].score(RECIPE, chunk).kl[0] for chunk in (0, 1)]
    assert stepwise.shape == (4, 15)
    assert np.concatenate([ours, kl]) == pytest.approx(stepwise.mean(1), rel=2e-3)
    assert stepwise.mean() > 1e-7


def test_one_pass_stores_and_sees_what_steps_do(tuning: Tuning) -> None:
    evaluator = tuning.evaluators[0]
    windows = evaluator.chunks[0]
    together = scored_states(evaluator.loaded.model, evaluator.cache(RECIPE, windows), windows.batch, windows.given)
    cache = method_of(evaluator.config, RECIPE).new_cache(evaluator.loaded.model, windows.batch.prompts, 64)
    steps, _ = follow(evaluator.loaded.model, cache, windows.batch.input_ids, None, windows.given)
    assert together.shape == steps[:, 1:].shape
    assert float((together - steps[:, 1:]).abs().max()) < 1e-4


def test_exact_layers_lose_nothing_and_packed_ones_something(tuning: Tuning) -> None:
    evaluator = tuning.evaluators[0]
    assert evaluator.score(("fp16", "fp16"), 0).kl == (0.0,)
    fine, coarse = (evaluator.score((form, form), 0).kl[0] for form in ("q8_0", "iq4_nl"))
    assert 0 < fine < coarse


def test_bits_are_those_of_the_bill(tuning: Tuning) -> None:
    space = tuning.space(("fp16", "q8_0", "iq4_nl", "q4_1"))
    bill = tuning.evaluators[0].cache(RECIPE, tuning.evaluators[0].chunks[0]).bill()
    assert bill.used.total * 8 == space.bits(RECIPE) * space.elements * 32
    assert space.elements == 2 * 2 * 32
    assert tuning.space(("q8_0", "q8_0", "iq4_nl")).formats == ("q8_0", "iq4_nl")


def test_the_99_percent_of_batches_is_that_of_all_predictions(tuning: Tuning) -> None:
    evaluator = tuning.evaluators[0]
    scores = [evaluator.score(RECIPE, chunk) for chunk in (0, 1)]
    windows = evaluator.chunks
    every = []
    for chunk in windows:
        states = scored_states(evaluator.loaded.model, evaluator.cache(RECIPE, chunk), chunk.batch, chunk.given)
        every.append(evaluator.head.compare(chunk.base[0], states[0], chunk.targets[0]).positions.kld)
    assert percentile(scores) == pytest.approx(np.percentile(np.concatenate(every), 99), rel=1e-6)


def test_a_search_goes_on_from_its_evaluations_and_ends_alike(tmp_path: Path) -> None:
    ends, new = [], []
    for _ in range(2):
        tuning = Tuning(engine_config(tmp_path), 2, 2, 1, tmp_path / "evaluations.jsonl")
        aim = Aim(tuning.space(("fp16", "q8_0", "iq4_nl")), 6.5)
        best, scores = run_search(aim, "random", 4, 0, lambda recipe, top, t=tuning, a=aim: t.evaluate(a, recipe, top))
        assert best is not None
        tested = tuning.test(aim.space.expand(best.recipe))
        ends.append(json.dumps(recipe_record(tuning, aim, best, len(scores), "random", tested)))
        new.append(tuning.evaluated)
    assert ends[0] == ends[1]
    assert new == [4, 0]
    record = json.loads(ends[0])
    assert set(record) == {
        *("kvbench", "kind", "model", "budget_bits", "budget_kl", "bits", "kl", "search_kl", "evaluations", "search"),
        "layers",
    }
    assert record["kl"]["mean"] == tested[0].mean() != record["search_kl"]["mean"] == best.mean
    assert (record["kl"]["held_out"], record["kl"]["windows"], record["search_kl"]["windows"]) == (True, 2, 2)
    assert len(record["layers"]) == 2
    assert set(record["layers"][0]) == {"keys", "values"}


def test_a_recipe_that_is_clearly_worse_is_not_scored_on_all_windows(tmp_path: Path) -> None:
    tuning = Tuning(engine_config(tmp_path, 6), 6, 0, 4, tmp_path / "evaluations.jsonl")
    aim = Aim(tuning.space(("fp16", "q8_0", "iq4_nl")), 8.5)
    best = tuning.evaluate(aim, ("q8_0", "q8_0"), None)
    worse = tuning.evaluate(aim, ("iq4_nl", "iq4_nl"), best)
    assert (worse.stopped, len(worse.kl), np.isnan(worse.p99)) == (True, 4, True)
    whole = tuning.evaluate(aim, ("iq4_nl", "iq4_nl"), None)
    assert (whole.stopped, len(whole.kl)) == (False, 6)
    assert list(whole.kl[:4]) == list(worse.kl)
    assert not tuning.evaluate(aim, ("q8_0", "q8_0"), best).stopped


def test_a_prediction_that_is_not_a_number_is_an_error(tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = tuning.evaluators[0]
    damaged = evaluator.chunks[0].base.clone()
    damaged[0, 3] = float("nan")
    monkeypatch.setattr(evaluator.chunks[0], "base", damaged)
    with pytest.raises(NonFiniteError, match=r"0:q8_0/iq4_nl,1:q4_1 gives a KL divergence that is NaN"):
        evaluator.score(RECIPE, 0)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [("layers", "0:fp16", "what tune looks for"), ("window", 8, "bits are those of every token"),
     ("prefill", "quantized", "cannot be tuned")],
)  # fmt: skip
def test_options_that_tune_cannot_have_are_refused(tmp_path: Path, name: str, changed: Any, message: str) -> None:
    config = engine_config(tmp_path)
    setattr(config.method, name, changed)
    with pytest.raises(ConfigError, match=message):
        Tuning(config, 2, 2, 1, tmp_path / "evaluations.jsonl")


def test_too_few_windows_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are 4 windows or prompts"):
        Tuning(engine_config(tmp_path), 4, 1, 1, tmp_path / "evaluations.jsonl")


def test_a_method_that_observes_the_prompt_is_not_admitted_afterwards(tuning: Tuning) -> None:
    evaluator = tuning.evaluators[0]
    cache = load_method("h2o").new_cache(evaluator.loaded.model, evaluator.chunks[0].batch.prompts, 64)
    with pytest.raises(CacheError, match="observes the prompt's attention"):
        evaluator.chunks[0].prompt.admit(cache)
