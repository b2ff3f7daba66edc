"""Captured steps of layers with a sliding window against eager ones, which use transformers' own masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.attention import fused, phases
from kvbench.attention.phases import NotServed
from kvbench.cache.layer import KVLayer
from kvbench.decoding import graphs, recordable
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.recorded import settle
from kvbench.decoding.sampling import Sampling
from kvbench.methods import load_method
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part
from tests.methods.test_quantspec import small

PROMPTS, NEW = [60, 53], 30


def model_of(name: str, window: int) -> Any:
    """Mistral: all layers slide; Qwen2: the second; Gemma 2: the first, with caps."""
    if name == "gemma2":
        return zoo.capped(name, sliding_window=window).eval()
    config_class, model_class, extra = zoo.MODELS[name]
    torch.manual_seed(1)
    config = config_class(**{**zoo.ARCHITECTURE, **extra, "sliding_window": window, "initializer_range": 0.1})
    return model_class(config).eval()


def answer(model: Any, method: Any, how: str, **more: Any) -> Any:
    ids, mask = zoo.padded_batch(PROMPTS, seed=3)
    cache = method.new_cache(model, max_length=PROMPTS[0] + NEW)
    generation = generate(model, cache, ids, mask, max_new_tokens=NEW, graphs=how, **more)  # type: ignore[arg-type]
    method.detach(model)
    return generation, cache


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps run their code, with an oracle as kernel."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))
    plain = graphs.Captured.__init__
    monkeypatch.setattr(
        graphs.Captured, "__init__", lambda self, step, **options: plain(self, step, **{**options, "capture": False})
    )
    refuses = recordable.eager_reason
    monkeypatch.setattr(
        recordable,
        "eager_reason",
        lambda model, cache, how, steps, device, *more: (
            refuses(model, cache, how, 0, device, *more) if how == "never" else None
        ),
    )


SETTINGS: dict[str, Any] = {
    "fp16": lambda: load_method("fp16"),
    "kivi": lambda: load_method("kivi", quantizer="int4", residual=32),
    "kivi with sinks": lambda: load_method("kivi", quantizer="int2", residual=32, sinks=4),
    "atom": lambda: load_method("atom"),
    "quantspec": lambda: small(16, gamma=0),
    "logquant that packs nothing": lambda: load_method("logquant", quantizer="int2", window=32),
}
CASES = [("fp16", 24), ("kivi", 24), ("kivi", 75), ("kivi with sinks", 62), ("atom", 50), ("quantspec", 50)]
CASES += [("logquant that packs nothing", 70)]


@pytest.mark.parametrize(("name", "window"), CASES)
def test_a_captured_step_sees_what_a_mask_shows(name: str, window: int, on_cpu: None) -> None:
    """Windows shorter and longer than the exact tail, which cut groups in two; text that outgrows the window."""
    method = SETTINGS[name]()
    model = model_of("mistral", window)
    captured, cache = answer(model, method, "always")
    eager, other = answer(model, method, "never")
    assert captured.stepping == "graph" and eager.stepping.startswith("eager")
    assert captured.tokens == eager.tokens
    assert cache.bill().used == other.bill().used
    assert cache.path == "oracle"


def test_a_step_too_many_gives_back_what_the_window_showed(on_cpu: None) -> None:
    """Rows end at different steps, while hidden tokens leave before each."""
    model, method = model_of("mistral", 24), load_method("fp16")
    free = answer(model, method, "never")[0].tokens
    early = {*free[0][:8], *free[1][:8]}
    eos = tuple(next(token for token in row[8:] if token not in early) for row in free)
    (captured, cache), (eager, other) = (answer(model, method, how, eos_token_ids=eos) for how in ("always", "never"))
    assert all(8 <= len(row) < NEW - 2 for row in eager.tokens)
    assert captured.tokens == eager.tokens and captured.stepping == "graph"
    assert cache.get_seq_length() == other.get_seq_length() and cache.bill().used == other.bill().used


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_layers_of_both_kinds(name: str, on_cpu: None) -> None:
    method = load_method("kivi", quantizer="int4", residual=32)
    model = model_of(name, 50)
    sampling = Sampling(1.0, seed=4)  # Gemma's greedy answers repeat a token
    captured, eager = (answer(model, method, how, sampling=sampling)[0] for how in ("always", "never"))
    assert captured.stepping == "graph" and captured.tokens == eager.tokens
    assert min(len(set(row)) for row in eager.tokens) > 5


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda: load_method("logquant", quantizer="int2", window=16), "logquant does not keep tokens in the order"),
        (lambda: load_method("streamingllm", budget=64), "streamingllm does not keep tokens in the order"),
        (lambda: load_method("h2o", budget=40), "kernels for h2o cannot leave them out"),
        (lambda: small(16, gamma=3), "different tokens from each of the 4 new tokens"),
    ],
)
def test_what_a_window_forbids_is_named(method: Any, reason: str, on_cpu: None) -> None:
    model = model_of("mistral", 70)
    generation, _ = answer(model, method(), "always")
    assert generation.stepping.startswith("eager (") and reason in generation.stepping


def test_a_window_that_the_text_never_fills_forbids_nothing(on_cpu: None) -> None:
    model, method = model_of("mistral", PROMPTS[0] + NEW + 1), load_method("streamingllm", budget=64)
    captured, eager = (answer(model, method, how)[0] for how in ("always", "never"))
    assert captured.stepping == "graph" and captured.tokens == eager.tokens


def test_hidden_slots_are_in_no_phase() -> None:
    keys, values = [4, 64, 20], [4, 32, 52]
    whole = phases.pairs_of_row(keys, values)
    assert phases.pairs_of_row(keys, values, 88) == phases.pairs_of_row(keys, values, 1000) == whole
    assert phases.pairs_of_row(keys, values, 85) == {**whole, (0, 0): (3, 3, 1)}
    assert phases.pairs_of_row(keys, values, 70) == {(1, 1): (14, 14, 18), (1, 2): (32, 0, 32), (2, 2): (0, 32, 20)}
    assert phases.pairs_of_row(keys, values, 30) == {(1, 2): (54, 22, 10), (2, 2): (0, 32, 20)}
    assert phases.pairs_of_row(keys, values, 1) == {(2, 2): (19, 51, 1)}


def test_slots_in_another_order_hide_nothing_silently() -> None:
    """A method that permutes tokens, once a window is shorter than what is stored."""
    layer = KVLayer(load_method("fp16"), 0, zoo.Progress(), 30)
    zoo.feed(layer, *zoo.random_kv(20))
    layer.order = [torch.arange(20).flip(0)]
    assert phases.divide_into_phases(layer)[0]
    layer.window = 10
    with pytest.raises(NotServed, match="not in the order of the text"):
        phases.divide_into_phases(layer)


def test_tokens_are_not_packed_late_where_others_move() -> None:
    """Each layer packs at once before hidden tokens leave; without windows, packs of all layers are collected."""
    model, method = model_of("mistral", 30), load_method("kivi", quantizer="int4", residual=32)
    cache, seen = method.new_cache(model), []
    cache.settle_layers = lambda: seen.append(cache.progress.packs.jobs is not None)  # type: ignore[method-assign]
    settle(cache)
    for layer in cache.layers:
        layer.window = None
    settle(cache)
    assert seen == [False, True]
