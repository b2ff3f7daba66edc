"""Given tokens through a cache: final states, predictions compared exactly, planted errors, and their layer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.attention import fused, phases
from kvbench.cache import KVCache
from kvbench.decoding.fidelity import FinalStates, follow, simulate
from kvbench.decoding.head import Head, compare_logits, digests
from kvbench.decoding.passes import forward, prefill
from kvbench.decoding.probe import layer_errors
from kvbench.errors import ModelError
from kvbench.methods import load_method
from kvbench.metrics import fidelity
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT, WIDTH = 40, 64


def text(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return zoo.padded_batch([WIDTH, WIDTH - 9][:rows], seed=6)


@cache
def states(name: str, rows: int = 2, before: Any = None, **options: Any) -> torch.Tensor:
    """Final states at all positions of a batch, [B, n + 1, d]."""
    model, (ids, mask) = zoo.restless(), text(rows)
    empty = load_method(name, **options).new_cache(model, max_length=WIDTH)
    own = None if rows == 1 else mask[:, :PROMPT]
    return follow(model, empty, ids[:, :PROMPT], own, ids[:, PROMPT:-1], before=before)[0]


def klds(base: torch.Tensor, candidate: torch.Tensor, row: int = 0) -> Any:
    target = text()[0][row, PROMPT:]
    return Head(zoo.restless()).compare(base[row], candidate[row], target).positions.kld


def test_logits_compared_on_a_device_equal_the_reference() -> None:
    arrays = np.load(GOLDEN / "fidelity.npz")
    for case in json.loads((GOLDEN / "fidelity.json").read_text(encoding="utf-8")):
        if f"base_logits_{case}" not in arrays:
            continue
        tensors = [torch.from_numpy(arrays[f"{name}_{case}"]) for name in ("base_logits", "test_logits", "target")]
        base, test, target = tensors[0].float(), tensors[1].float(), tensors[2].long()
        computed = compare_logits(base, test, target)
        limit = 1e-9 * np.maximum(np.abs(arrays[f"kld_{case}"]), 1e-6)
        assert (np.abs(computed.positions.kld - arrays[f"kld_{case}"]) <= limit).all()
        assert np.abs(computed.positions.change - arrays[f"dp_{case}"]).max() < 1e-12
        assert (computed.positions.same_top == arrays[f"same_top_{case}"]).all()
        best = np.sort(fidelity.log_softmax(arrays[f"base_logits_{case}"]), -1)
        assert np.allclose(computed.gap, best[:, -1] - best[:, -2], rtol=1e-12)
        rounded = compare_logits(base, test, target, "llamacpp")
        assert np.abs(rounded.positions.kld - arrays[f"llamacpp_kld_{case}"]).max() < 5e-6


def test_a_vocabulary_in_another_order_has_the_same_divergence() -> None:
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    target = torch.arange(5)
    moved = order.argsort()[target]
    plain, other = compare_logits(*logits, target), compare_logits(*logits[..., order], moved)
    assert np.allclose(plain.positions.kld, other.positions.kld, rtol=1e-12)
    assert np.allclose(plain.positions.change, other.positions.change, rtol=1e-12)


def test_the_head_times_the_states_gives_the_models_logits_in_every_step() -> None:
    """Rows with padding, too."""
    model, (ids, mask) = zoo.restless(), text()
    found, first = follow(
        model,
        load_method("fp16").new_cache(model, max_length=WIDTH),
        ids[:, :PROMPT],
        mask[:, :PROMPT],
        ids[:, PROMPT:-1],
    )
    cache, head = load_method("fp16").new_cache(model, max_length=WIDTH), Head(model)
    head.check(found[:, 0], first)
    with torch.inference_mode():
        lengths = mask[:, :PROMPT].sum(-1)
        logits = [prefill(model, cache, ids[:, :PROMPT], mask[:, :PROMPT])]
        for place in range(PROMPT, WIDTH - 1):
            step = (lengths + place - PROMPT)[:, None]
            logits.append(forward(model, cache, ids[:, place : place + 1], mask[:, : place + 1], step)[:, -1])
        assert found.shape[1] == len(logits) == WIDTH - PROMPT
        for place, exact in enumerate(logits):
            assert torch.allclose(head.logits(found[:, place]), exact, atol=1e-5)


def test_fp16_has_no_divergence_from_itself_and_next_to_none_from_states_in_16_bits() -> None:
    live, again = states("fp16"), states.__wrapped__("fp16")
    stored = live.half()
    for row in range(2):
        assert (klds(live, again, row) == 0).all()
        assert np.abs(klds(stored, live, row)).max() < 1e-6
        assert np.abs(klds(stored, live, row)).mean() < 5e-7


def test_a_2_bit_cache_diverges_only_where_it_is_read() -> None:
    computed = klds(states("fp16"), states("kivi", quantizer="int2", residual=32))
    assert (
        computed[0] == 0 and (computed[1:] > 1e-9).all()
    )  # the prefill is exact; 32 of the prompt's tokens are packed
    whole = klds(states("fp16"), states("kivi", quantizer="int2", residual=128))
    assert (np.abs(whole) < 1e-9).all()  # all tokens are in the window


def test_recorded_steps_store_the_states_of_eager_ones(monkeypatch) -> None:
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))
    model, (ids, mask) = zoo.restless(), text()
    for name, options in (("fp16", {}), ("kivi", {"quantizer": "int4", "residual": 32})):
        shown: list[int] = []
        cache = load_method(name, **options).new_cache(model, max_length=WIDTH)
        prompt = (ids[:, :PROMPT], mask[:, :PROMPT], ids[:, PROMPT:-1])
        found, _ = follow(model, cache, *prompt, graphs="always", capture=False, report=shown.append)
        assert shown == [WIDTH - 1 - PROMPT]  # reports of replays, not of eager steps
        assert torch.allclose(found, states(name, **options), atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_planted_error_shows_from_its_step_on_and_the_probe_names_its_layer(layer) -> None:
    """One head's keys times 1.01, and one value in place of another."""
    step = 11

    def scale(number: int, cache: KVCache) -> None:
        if number == step:
            cache.layers[layer].stores()[0].tail.buffer[:, 1, : PROMPT + step - 1] *= 1.01

    def swap(number: int, cache: KVCache) -> None:
        if number == step:
            values = cache.layers[layer].stores()[1].tail.buffer
            values[:, 0, 5] = values[:, 0, 17].clone()

    model, ids = zoo.restless(), text(1)[0]
    base = states("fp16", 1)
    for plant in (scale, swap):
        computed = klds(base, states("fp16", 1, before=plant))
        assert (np.abs(computed[:step]) < 1e-9).all() and (computed[step:] > 1e-9).all()
        new = lambda: load_method("fp16").new_cache(model, max_length=WIDTH)  # noqa: E731
        errors = layer_errors(model, new, new, ids[:, :PROMPT], ids[:, PROMPT:-1], plant)
        assert errors.own[layer] > 1e-5 and max(errors.own[:layer] + errors.own[layer + 1 :]) < 1e-9
        assert max(errors.total[:layer], default=0.0) < 1e-9 and min(errors.total[layer:]) > 1e-6


def test_a_layers_own_error_is_without_those_of_the_layers_before() -> None:
    model, ids = zoo.restless(), text(1)[0]

    def new(name: str, **options: Any) -> Any:
        return lambda: load_method(name, **options).new_cache(model, max_length=WIDTH)

    lossy = new("kivi", quantizer="int2", residual=32)
    errors = layer_errors(model, new("fp16"), lossy, ids[:, :PROMPT], ids[:, PROMPT:-1])
    assert errors.own[0] == pytest.approx(errors.total[0], rel=1e-6)
    assert 0 < errors.own[1] < errors.total[1]
    nothing = layer_errors(model, new("fp16"), new("fp16"), ids[:, :PROMPT], ids[:, PROMPT:-1])
    assert nothing.own == nothing.total == [0.0, 0.0]


def test_a_simulated_pass_reads_what_is_stored_of_each_token() -> None:
    model, ids = zoo.restless(), text(1)[0]
    exact, _ = simulate(model, load_method("fp16").new_cache(model), ids)
    lossy, logits = simulate(model, load_method("kivi", quantizer="int2", residual=32).new_cache(model), ids)
    head = Head(model)
    head.check(lossy[:, 0], logits)
    found = head.compare(exact[0, :-1], lossy[0, :-1], ids[0, 1:]).positions.kld
    assert len(found) == WIDTH - 1 and (found > 1e-9).all()


def test_the_models_scaling_and_softcap_belong_to_its_head() -> None:
    model = zoo.capped("gemma2", final_logit_softcapping=0.5)
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode(), FinalStates(model) as final:
        logits = model(input_ids=ids).logits[0]
        computed = final.last(1)[0]
        Head(model).check(computed, logits)
        assert float(logits.abs().max()) > 0.3  # the cap is felt
        with pytest.raises(ModelError, match=r"its logits differ by up to .* from the output head"):
            Head(model).check(computed, 1.5 * logits)
    with pytest.raises(ModelError, match="did not hand final hidden states to its output embeddings"):
        final.last(1)


def test_digests_tell_heads_and_norms_apart_and_nothing_else() -> None:
    model = zoo.fresh()
    before = digests(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        assert digests(model) == before
        model.model.norm.weight.mul_(2)
        assert digests(model) == {**before, "norm": digests(model)["norm"]} != before
        model.lm_head.weight.mul_(2)
    assert digests(model)["head"] != before["head"]


def test_eager_steps_are_reported_one_by_one() -> None:
    model, (ids, mask) = zoo.restless(), text()
    shown: list[int] = []
    cache = load_method("fp16").new_cache(model)
    found, _ = follow(model, cache, ids[:, :PROMPT], mask[:, :PROMPT], ids[:, PROMPT : PROMPT + 5], report=shown.append)
    assert shown == [1, 2, 3, 4, 5]
    assert torch.allclose(found, states("fp16")[:, :6], atol=1e-5)
