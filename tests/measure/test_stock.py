"""Measurements of stock transformers: its caches, steps and figures, and random keys in place of a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.measure import random_fill, stock
from kvbench.measure.how import How
from kvbench.measure.random_fill import random_layers
from kvbench.methods import load_method
from tests import zoo


class Toy:
    """A model that counts upwards: the token after `n` is `n` + 1; it records how it is called."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(self, input_ids: torch.Tensor, **named: Any) -> Any:
        self.calls.append({"ids": input_ids.clone(), **named})
        logits = torch.nn.functional.one_hot((input_ids + 1) % 50, 50).float()
        return SimpleNamespace(logits=logits)

    __call__ = forward


IDS = torch.tensor([[1, 2, 3], [7, 8, 9]])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes one second on at each look."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(stock, "now", lambda device: float(next(seconds)))


def test_steps_after_the_warm_ups_are_timed_and_greedy(monkeypatch, clock) -> None:
    caches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(stock, "stock_cache", lambda *args: caches.append(args) or "cache")
    model = Toy()
    computed = stock.stock_decode("dynamic", model, IDS, 4, "prefill")
    assert caches == [("dynamic", model, 3 + 4 + 2)]
    assert computed["prefill_s"] == 1.0 and computed["step_s"] == [1.0] * 4
    assert computed["tokens"] == [4, 5, 6, 7, 8, 9, 10]
    prompt, *steps = model.calls
    assert torch.equal(prompt["ids"], IDS) and prompt["use_cache"] is True and prompt["logits_to_keep"] == 1
    assert [step["ids"].tolist() for step in steps] == [[[4 + n], [10 + n]] for n in range(6)]
    assert [step["position_ids"].tolist() for step in steps] == [[[3 + n]] * 2 for n in range(6)]
    assert all(call["past_key_values"] == "cache" for call in model.calls)


def test_random_keys_are_no_prompt_and_the_last_token_of_it_goes_on(monkeypatch, clock) -> None:
    filled: list[tuple[Any, ...]] = []
    updates: list[Any] = []
    cache = SimpleNamespace(update=lambda *args: updates.append(args))
    monkeypatch.setattr(stock, "stock_cache", lambda *args: cache)

    def layers(model: Any, batch: int, tokens: int, seed: int, take: Any) -> None:
        filled.append((batch, tokens, seed))
        take(1, "keys", "values")

    monkeypatch.setattr(stock, "random_layers", layers)
    model = Toy()
    computed = stock.stock_decode("static", model, IDS, 1, "random", 9)
    assert filled == [(2, 3, 9)] and updates == [("keys", "values", 1)]
    assert computed["prefill_s"] is None and computed["tokens"] == [3, 4, 5, 6] and len(model.calls) == 3
    assert model.calls[0]["ids"].tolist() == [[3], [9]]


def test_a_prefill_has_a_cache_of_its_own(monkeypatch, clock) -> None:
    monkeypatch.setattr(stock, "stock_cache", lambda *args: args)
    model = Toy()
    assert stock.stock_prefill(model, IDS) == 1.0
    (call,) = model.calls
    assert call["past_key_values"] == ("dynamic", model, 0) and call["logits_to_keep"] == 1


def measured(monkeypatch, name: str = "dynamic", **how: Any) -> Any:
    model, seconds, calls = zoo.model("llama"), iter([3.0, 9.0, 1.0, 2.0]), []

    def decode(*args: Any) -> dict[str, Any]:
        calls.append(args)
        prefill_s = None if args[4] == "random" else 4.0
        return {"prefill_s": prefill_s, "step_s": [2.0, 1.0, 6.0], "peak": {"decode": 5}, "tokens": list(range(30))}

    monkeypatch.setattr(stock, "stock_prefill", lambda model, ids: next(seconds))
    monkeypatch.setattr(stock, "stock_decode", decode)
    monkeypatch.setattr(stock, "step_traffic", lambda model, figures, rate: {"read_rate": rate})
    monkeypatch.setattr(stock, "predicted_point", lambda model, figures, *rest: rest)
    settings = {"new_tokens": 4, "repeats": 2, "untimed": 1, "seed": 6, "read_rate": 8.0} | how
    ids = torch.zeros(3, 10, dtype=torch.long)
    return stock.stock_point(name, model, ids, How(**settings)), calls, model


def test_the_figures_of_a_stock_cache(monkeypatch) -> None:
    figures, calls, model = measured(monkeypatch)
    ((name, used, ids, *rest),) = calls
    assert (name, used is model, ids.shape, rest) == ("dynamic", True, (3, 10), [3, "prefill", 6])
    config = model.config
    channels = config.hidden_size // config.num_attention_heads
    elements = 2 * 3 * config.num_hidden_layers * config.num_key_value_heads * channels * 10
    assert figures == {
        "status": "ok",
        "prompt": 10,
        "batch": 3,
        "new_tokens": 4,
        "prefill_s": 6.5,  # of 3, 9 and 4 seconds the first is untimed
        "ttft_s": 6.5,
        "repeats": 2,
        "tpot_s": {"median": 2.0, "mean": 3.0, "p10": 1.2, "p90": 5.2, "p99": 5.92, "n": 3},
        "itl_s": {"p50": 2.0, "p90": 5.2, "p99": 5.92},
        "decode_s": 9.0,
        "tokens_per_s": pytest.approx(3 * 4 / 15.5, abs=1e-6),
        "stepping": "DynamicCache, eager",
        "weights": sum(p.numel() * 4 for p in model.parameters()) + sum(b.nbytes for b in model.buffers()),
        "kv_used": {"total": elements * 4},
        "peak": {"decode": 5},
        "tokens": list(range(16)),
        "predicted": (10, 3, None, False),
        "read_rate": 8.0,
    }


def test_packed_baselines_count_their_bits_and_random_fills_have_no_prefill(monkeypatch) -> None:
    plain, _, _ = measured(monkeypatch)
    for name, bits in (("quanto4", 4), ("quanto2", 2), ("hqq4", 4)):
        assert measured(monkeypatch, name)[0]["kv_used"]["total"] == plain["kv_used"]["total"] * bits // 32
    figures, calls, _ = measured(monkeypatch, "static", fill="random")
    assert calls[0][4] == "random" and figures["fill"] == "random" and figures["stepping"] == "StaticCache, eager"
    assert (figures["prefill_s"], figures["ttft_s"], figures["repeats"], figures["tokens_per_s"]) == (
        None,
        None,
        0,
        None,
    )
    assert "fill" not in plain


def test_a_model_gets_its_attention_back(monkeypatch) -> None:
    chosen: list[str] = []
    detached: list[Any] = []
    own = SimpleNamespace(_attn_implementation="kvbench")
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: own), set_attn_implementation=chosen.append
    )
    monkeypatch.setattr(stock, "detach", detached.append)
    with pytest.raises(ValueError, match="inside"), stock.stock_attention(model):
        assert chosen == ["sdpa"] and detached == [model]
        raise ValueError("inside")
    assert chosen == ["sdpa", "kvbench"]


def test_what_was_compiled_for_other_shapes_is_discarded_before_and_after(monkeypatch) -> None:
    resets: list[int] = []
    monkeypatch.setattr(stock, "compiled_anew", lambda: resets.append(1))
    measured(monkeypatch)
    assert len(resets) == 2

    def full(*_: Any) -> Any:
        raise MemoryError

    measured_decode = stock.stock_decode
    monkeypatch.setattr(stock, "stock_decode", full)
    with pytest.raises(MemoryError):
        stock.stock_point(
            "dynamic", zoo.model("llama"), torch.zeros(1, 4, dtype=torch.long), How(new_tokens=2, repeats=1)
        )
    assert len(resets) == 4 and measured_decode is not full


def test_each_baseline_has_its_cache(monkeypatch) -> None:
    from transformers import DynamicCache, StaticCache, cache_utils

    model = zoo.model("llama")
    assert type(stock.stock_cache("dynamic", model, 0)) is DynamicCache
    for name in ("static", "static-compiled"):
        cache = stock.stock_cache(name, model, 37)
        assert type(cache) is StaticCache and cache.layers[0].max_cache_len == 37
    asked: list[Any] = []
    monkeypatch.setattr(cache_utils, "QuantizedCache", lambda *args, **named: asked.append((args, named)))
    stock.stock_cache("quanto4", model, 0)
    stock.stock_cache("hqq4", model, 0)
    common = {"q_group_size": 64, "residual_length": 128, "nbits": 4}
    assert asked == [
        (("quanto", model.config), {**common, "axis_key": 0, "axis_value": 0}),
        (("hqq", model.config), {**common, "axis_key": 1, "axis_value": 1}),
    ]

    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("no quanto")

    monkeypatch.setattr(cache_utils, "QuantizedCache", missing)
    with pytest.raises(ConfigError, match=r"--baselines=quanto2: needs a package that is not installed \(no quanto\)"):
        stock.stock_cache("quanto2", model, 0)


def drawn(seed: int = 3, team: Any = None, monkeypatch: Any = None) -> list[Any]:
    taken: list[Any] = []
    random_layers(zoo.model("llama"), 2, 40, seed, lambda *layer: taken.append(layer))
    return taken


def test_random_keys_have_the_shape_of_each_layer_and_a_seed_of_their_own(monkeypatch) -> None:
    model = zoo.model("llama")
    config = model.config
    layers = drawn()
    shape = (2, config.num_key_value_heads, 40, config.hidden_size // config.num_attention_heads)
    assert [number for number, _, _ in layers] == list(range(config.num_hidden_layers))
    for number, keys, values in layers:
        assert keys.shape == values.shape == shape and keys.dtype == model.dtype
        generator = torch.Generator().manual_seed(3 + number)
        assert torch.equal(keys, torch.randn(shape, generator=generator))
        assert torch.equal(values, torch.randn(shape, generator=generator))
    assert not torch.equal(layers[0][1], drawn(4)[0][1])
    team = SimpleNamespace(team=SimpleNamespace(size=2))
    monkeypatch.setattr(random_fill, "placement", lambda model: team)
    assert drawn()[0][1].shape[1] == config.num_key_value_heads // 2


def test_random_keys_before_rope_have_the_positions_of_a_prompt() -> None:
    model = zoo.model("llama")
    method = load_method("kvquant", calibration=zoo.calibrations("llama"), outliers=0.05)
    cache = method.new_cache(model)
    made = random_fill.go_on(model, cache, 2, 40, max_new_tokens=4, sampling=How(new_tokens=4).sampling(2))
    assert cache.progress.positions.runs == [[(0, 0)], [(0, 0)]]
    assert cache.layers[0].seen == 43 and [len(row) for row in made.tokens] == [4, 4]
    method.detach(model)


@pytest.mark.parametrize("speculation", [None, "speculation"])
def test_decoding_goes_on_from_tokens_that_differ_between_the_rows(monkeypatch, speculation) -> None:
    model, calls, phases, placed = zoo.model("llama"), [], [], []

    def continued(
        model: Any, cache: Any, token: torch.Tensor, mask: Any, lengths: torch.Tensor, *rest: Any, **named: Any
    ):
        calls.append((token.tolist(), mask, lengths.tolist(), rest[-1], named))
        return {"step_s": [0.5], "stepping": "eager"}

    monkeypatch.setattr(random_fill, "continued", continued)
    monkeypatch.setattr(random_fill, "fill_at_random", lambda *args: placed.append(args[1:]))
    monkeypatch.setattr(random_fill, "prepare_draft", lambda model, drafting: phases.append(drafting))
    cache: Any = SimpleNamespace(method=SimpleNamespace(speculation=speculation))
    observer: Any = SimpleNamespace(phase=phases.append)
    sampling = How(new_tokens=4).sampling(3)
    named = {"max_new_tokens": 7, "sampling": sampling, "graphs": "always", "compile": True, "seed": 5}
    computed = random_fill.go_on(model, cache, 3, 40, observer=observer, **named)
    vocabulary = model.config.vocab_size
    settings = {"speculation": speculation, "graphs": "always", "compile": True, "observer": observer}
    assert calls == [([3, 20 % vocabulary, 37 % vocabulary], None, [40] * 3, 7, settings)]
    assert placed == [(cache, 3, 40, 5)] and phases == [speculation, "prefill", "decode", "end"]
    assert (computed.ttft_s, computed.prompt_tokens, computed.step_s, computed.text) == (0.0, [40] * 3, [0.5], [])
