"""The room that methods reserve: segments, their capacities, and layers that pack nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.methods import load_method
from tests import zoo
from tests.zoo import feed, new_layer, random_kv

#: tokens of a text, of which the prompt has 40
LONGEST, PROMPT = 300, 40
#: method, options, and the tokens for which its last segment has room at first and whenever it grows
TAILS: list[tuple[str, dict[str, Any], int, int]] = [
    ("atom", {}, 1, 0),
    ("atom", {"window": 48}, 48 + 16, 16),
    ("kivi", {"residual": 64}, 64 + 16, 16),
    ("kivi", {"residual": 64, "window": 32}, 64 + 32 + 16, 16),
    ("kvarn", {"window": 24, "sinks": 0}, 24 + 128 + 16, 16),
    ("oscar", {"basis": "rotation", "window": 48}, 48 + 16, 16),
    ("logquant", {"window": 20}, 3 * 20 + 16, 16),
    ("hf_quantized", {"backend": "fp8"}, 1 + 64, 64),
    ("keep", {"quantizer": "none", "by": "key_norm", "keep": 48, "newest": 8}, LONGEST, 64),
    ("keep", {"quantizer": "none", "by": "key_norm", "keep": 20, "newest": 8}, 20 + LONGEST - PROMPT, 64),
    ("keep", {"quantizer": "int4", "by": "key_norm", "residual": 32, "keep": 20, "newest": 8, "sinks": 4}, 32 + 16, 16),
]


def made(name: str, options: dict[str, Any], tokens: int = PROMPT) -> Any:
    """A layer that holds a prompt of a text whose length is known."""
    layer = new_layer(load_method(name, **options))
    layer.progress.max_length = LONGEST
    feed(layer, *random_kv(tokens, channels=64))
    return layer


@pytest.mark.parametrize(("name", "options", "capacity", "slack"), TAILS)
def test_the_newest_tokens_have_room_for_the_window_and_some_steps(name, options, capacity, slack) -> None:
    for store in made(name, options).stores():
        assert (store.tail.capacity, store.tail.slack) == (capacity, slack)


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("kivi", {"sinks": 44}, LONGEST - 44),
        ("atom", {}, LONGEST),
        ("oscar", {"basis": "rotation", "sinks": 45}, LONGEST - 45),
        (
            "keep",
            {"quantizer": "int4", "by": "key_norm", "keep": 20, "newest": 8, "sinks": 8, "residual": 32},
            20 + 260 - 8,
        ),
    ],
)
def test_packed_tokens_have_room_for_the_whole_text_but_its_sinks(name, options, tokens) -> None:
    """Codes are stored in tiles of 128 tokens."""
    for store in made(name, options).stores():
        packed = store.segments[-2]
        assert packed.packed and packed.capacity == -(-tokens // 128) * 128


@pytest.mark.parametrize("name", ["kivi", "kvarn", "oscar", "atom"])
def test_sinks_have_room_of_their_own(name) -> None:
    options = {"oscar": {"basis": "rotation"}}.get(name, {})
    for store in made(name, {**options, "sinks": 7}).stores():
        assert len(store.segments) == 3 and store.segments[0].capacity == 7
        assert [segment.packed for segment in store.segments] == [False, True, False]


@pytest.mark.parametrize("name", ["kivi", "kvarn", "oscar", "atom"])
def test_a_layer_that_packs_nothing_has_one_segment_for_all_tokens(name, monkeypatch) -> None:
    options = {"oscar": {"basis": "rotation"}, "atom": {"window": 8}}.get(name, {})
    method = load_method(name, **options)
    monkeypatch.setattr(type(method), "exact_layers", 1)
    assert not method.packs(0, None) and method.packs(1, None)
    layer = new_layer(method)
    layer.progress.max_length = LONGEST
    keys, values = random_kv(250, channels=64)
    feed(layer, keys[:, :, :200], values[:, :, :200])
    for at in range(200, 250):
        feed(layer, keys[:, :, at : at + 1], values[:, :, at : at + 1])
        layer.settle()
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        (only,) = store.segments
        if name in ("kvarn", "oscar"):
            assert only.capacity == LONGEST
        assert only.length(slice(0, 1)) == 250 and (name == "kvarn" or torch.equal(only.view(slice(0, 1)), x))
    assert all(bool((times > 10**6).all()) for times in method.demotions(layer, 250))


def test_sums_of_attention_have_room_for_the_budget_and_some_steps() -> None:
    layer = new_layer(load_method("h2o", budget=48, recent=20))
    layer.progress.max_length = LONGEST
    layer.observed = torch.rand(1, 4, 1, PROMPT)
    feed(layer, *random_kv(PROMPT, channels=64))
    assert [store.tail.capacity for store in layer.stores()] == [48 + 64] * 2
    assert layer.positions(0) is None or layer.positions(0).tolist() == list(range(PROMPT))


@pytest.mark.parametrize(
    ("options", "resident"),
    [
        ({"budget": 40}, 40),
        ({"budget": 200, "sinks": 0}, 200),
        ({"budget": 800}, 800),
        ({"budget": 0.5}, 500),  # of the longest text
        ({"budget": 20, "evict": "prefill"}, 20 + 1000 - PROMPT),
        ({"budget": 0.5, "evict": "prefill"}, 20 + 1000 - PROMPT),
    ],
    ids=str,
)
def test_a_rolling_window_is_moved_back_once_in_64_steps_or_more(options, resident) -> None:
    layer = new_layer(load_method("streamingllm", position="original", **options))
    layer.progress.max_length = 1000
    feed(layer, *random_kv(PROMPT, channels=64))
    for store in layer.stores():
        assert store.tail.capacity == resident + max(64, resident // 8)
        assert store.tail.turn is None and store.tail.sinks == options.get("sinks", 4)


@torch.inference_mode()
def test_sinks_move_in_the_models_basis_if_heads_are_stored_in_another() -> None:
    """A rotation of keys changes no answer; dropped tokens do."""
    model, (ids, _) = zoo.model("llama"), zoo.padded_batch([60], seed=4)
    logits = []
    for options in ({}, {"rotation.key": "hadamard"}, {"budget": 16}):
        method = load_method("streamingllm", **{"budget": 24, **options})
        cache = method.new_cache(model)
        model(ids[:, :50], past_key_values=cache)
        steps = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(50, 60)]
        logits.append(torch.cat(steps, 1))
        method.detach(model)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-4)
    assert float((logits[2] - logits[0]).abs().max()) > 1e-3
