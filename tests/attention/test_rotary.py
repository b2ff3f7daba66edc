"""Keys that were rotated already are moved on as the model itself would have rotated them.

Keys before RoPE, left at the attention modules that computed them, and models whose keys cannot be moved.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from transformers import CohereConfig, CohereForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from kvbench.attention.rope import rotary as pre_rope
from kvbench.attention.rope.rotary import PROBED, alike, probed, rotary
from kvbench.cache.rope import rotated_slots
from kvbench.errors import CacheError, ModelError
from kvbench.methods import load_method
from kvbench.models.projections import attentions
from kvbench.util.attachment import attached
from tests import zoo

SMALL = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def other(name: str):
    """Architectures with other layouts: a part of the channels, interleaved pairs, scaled cosines and sines."""
    torch.manual_seed(0)
    if name == "gpt_neox":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
        return GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, rope_parameters=rope)).eval()
    if name == "cohere":
        return CohereForCausalLM(CohereConfig(**SMALL, num_key_value_heads=1, pad_token_id=0)).eval()
    model_class, config_class = type(zoo.model("llama")), type(zoo.model("llama").config)
    rope = {"rope_type": name, "rope_theta": 1e4, "factor": 4.0}
    if name == "longrope":
        rope |= {"short_factor": [1.0] * 32, "long_factor": [3.0] * 32, "original_max_position_embeddings": 64}
    config = config_class(**{**zoo.ARCHITECTURE, "num_hidden_layers": 1, "rope_parameters": rope})
    return model_class(config).eval()


SMALL_GROUPED = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: architectures by what they do to keys: configuration
LAYOUTS = {
    "Phi": {**HALF, "num_key_value_heads": 2},  # attention cuts the head, not the rotation
    "Persimmon": {**HALF, "num_key_value_heads": 2},
    "Glm": {**HALF, "head_dim": 32},  # interleaved pairs of a part of the channels
    "Phi3": HALF,
    "Nemotron": {**HALF, "head_dim": 32},
    "Ernie4_5": {"head_dim": 32},
    "GptOss": {"head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Gemma2": {"head_dim": 32},
    "Olmo2": {},
    "Cohere2": MIXED,  # full layers without rotation
    "Exaone4": MIXED,
    "Gemma3": {**MIXED, "head_dim": 32},  # one rotation for sliding layers, another for full ones
    "Olmo3": {},
}


def architecture(name: str):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    made = config(**{**SMALL_GROUPED, **TOKENS, **LAYOUTS[name]})
    return getattr(transformers, f"{name}ForCausalLM")(made).eval()


def keys_at(model, ids: torch.Tensor, first: int, layer: int = 0) -> torch.Tensor:
    """A layer's rotated keys of a text that begins at position `first`."""
    method = load_method("fp16")
    cache = method.new_cache(model)
    with torch.no_grad():
        positions = torch.arange(first, first + ids.shape[1])[None]
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    method.detach(model)
    return cache.layers[layer].stores()[0].tail.view(slice(None)).clone()


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gpt_neox", "cohere", "yarn", "longrope"])
def test_a_turned_key_is_the_key_at_that_position(name):
    model = zoo.model(name) if name in zoo.MODELS else other(name)
    ids = torch.randint(3, 50, (1, 9), generator=torch.Generator().manual_seed(0))
    # longrope beyond its original length, so that the long frequencies are in use for both
    near, by = (100, 900) if name == "longrope" else (0, 1000)
    far = keys_at(model, ids, near + by)
    turned = rotary(model).turn(keys_at(model, ids, near), by)
    torch.testing.assert_close(turned, far, rtol=1e-4, atol=2e-4)
    assert not torch.allclose(turned, rotary(model).turn(turned, 1), atol=1e-2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layer_is_turned_as_it_rotates_or_the_model_is_refused_before_its_first_token(name):
    model, method = architecture(name), load_method("streamingllm", budget=24)
    ids = torch.randint(3, 50, (1, 40), generator=torch.Generator().manual_seed(0))
    refused = {name: f"layers 1 of {name}ForCausalLM do not rotate" for name in ("Cohere2", "Exaone4")}
    refused |= {"Gemma3": "or more than one", "Olmo3": "or more than one"}
    if name in refused:
        with pytest.raises(ModelError, match=rf"position=cache: .*{refused[name]}[^\n]*\n.*=original"):
            method.new_cache(model)
        cache = load_method("streamingllm", budget=24, position="original").new_cache(model)
    else:
        cache = method.new_cache(model)
        for layer in range(2):
            turned = cache.progress.method_state.turn(keys_at(model, ids, 0, layer), 900)
            torch.testing.assert_close(turned, keys_at(model, ids, 900, layer), rtol=1e-4, atol=2e-4)
        cache = method.new_cache(model)
    with torch.no_grad():
        for first, last in ((0, 37), (37, 38), (38, 40)):
            model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True)
    method.detach(model)
    held = cache.layers[1].stores()[0].tail.view(slice(None))
    assert bool(torch.isfinite(held).all())


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_before_rope_are_those_that_attention_gets_or_refused_before_the_first_token(name):
    model, method = architecture(name), load_method("atom", rope="pre", quantizer="int4_token")
    reasons = {
        "Persimmon": "does not have k_proj or qkv_proj",
        "Cohere2": "layers 1 of .* do not rotate",
        "Exaone4": "layers 1 of .* do not rotate",
        "Gemma3": "or more than one",
        "Olmo3": "or more than one",
    }
    if name in reasons:
        with pytest.raises(ModelError, match=reasons[name]):
            method.new_cache(model)
        return
    ids = torch.randint(3, 50, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = method.new_cache(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        store = layer.stores()[0]
        before = torch.cat([s.read(slice(0, 1), 0, s.lengths[0], torch.float32) for s in store.segments], 2)
        after = rotated_slots(layer, slice(0, 1), 0, before.shape[2], before)
        wanted = keys_at(model, ids, 0, index)
        assert (after - wanted).norm() < 0.15 * wanted.norm()  # four bits
    method.detach(model)


def test_a_layer_that_does_more_to_its_keys_is_refused_and_leaves_no_hook(monkeypatch):
    """A norm between projection and rotation that no hook sees."""
    model, method = architecture("Olmo2"), load_method("atom", rope="pre", quantizer="int4_token")
    del model.model.layers[1].self_attn.k_norm
    model.model.layers[1].self_attn.k_norm = lambda keys: 2 * keys
    monkeypatch.setattr("kvbench.models.projections.KEYS", ("k_proj",))
    with pytest.raises(
        ModelError, match="Olmo2Attention of layer 0: rotating the keys before RoPE does not give the keys"
    ):
        method.new_cache(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_looking_at_a_models_layers_leaves_it_as_it_was():
    model = architecture("Phi").train()
    state = torch.random.get_rng_state()
    rotary(model)
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "yarn", "longrope"])
@torch.no_grad()
def test_rows_turned_by_numbers_of_their_own_are_rows_turned_alone(name):
    """Every bit, as a window's result must not depend on the others of its batch; nor do further heads change it."""
    model = zoo.model(name) if name in zoo.MODELS else other(name)
    size = model.config.hidden_size // model.config.num_attention_heads
    keys = torch.randn(5, 6, 3, size, generator=torch.Generator().manual_seed(2))
    by = [1, 4000, 17, 0, 4000]
    for x in (keys, keys.bfloat16()):
        joint = rotary(model).turn(x, by)
        for row, count in enumerate(by):
            alone = torch.cat([rotary(model).turn(x[row : row + 1, head : head + 2], count) for head in (0, 2, 4)], 1)
            assert torch.equal(joint[row], alone[0])


@pytest.mark.parametrize("name", ["llama", "Phi", "Glm", "GptOss", "gpt_neox", "cohere", "yarn", "longrope"])
def test_the_inverse_gives_back_the_keys_before_rope(name):
    """Scaled cosines and sines, too, which scale keys on the way there."""
    model = zoo.model(name) if name in zoo.MODELS else architecture(name) if name in LAYOUTS else other(name)
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = torch.randn(2, 3, 5, size, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2, 700, 701], [5, 6, 7, 8, 9]])
    there = rotary(model).rotate(keys, positions)
    assert not torch.allclose(there, keys, atol=0.1)
    torch.testing.assert_close(rotary(model).rotate(there, positions, inverse=True), keys, rtol=1e-4, atol=1e-4)


def test_turning_does_not_touch_the_models_frequencies():
    model = other("longrope")
    keys = keys_at(model, torch.full((1, 4), 7), 100)
    before = rotary(model).module.inv_freq.clone()
    rotary(model).turn(keys, 3)  # a small number, but the text is long
    assert torch.equal(rotary(model).module.inv_freq, before)


def test_models_whose_keys_cannot_be_turned_are_refused():
    with pytest.raises(ModelError, match=r"change with the length.*\n.*method.position=original"):
        rotary(other("dynamic"))
    model = other("yarn")
    model.config.no_rope_layers = [1, 0]
    with pytest.raises(ModelError, match="layers without a rotary"):
        rotary(model)
    model.config.no_rope_layers = None
    del model.model.rotary_emb.inv_freq
    with pytest.raises(ModelError, match="has no rotary embedding"):
        load_method("streamingllm").new_cache(model)


def test_one_rounding_is_what_turning_costs():
    """In bf16 a turned key is as near to the exact one as a key that the model rotates itself."""
    model = zoo.model("llama", torch.bfloat16)
    turning = rotary(model)
    plain = torch.randn(1, 2, 512, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = turning.turn(plain.double().float(), 5000)
    came = turning.turn(plain, 40)  # rotated by the model and stored in bf16
    turned = (turning.turn(came, 4960).float() - exact).pow(2).mean().sqrt()
    own = (turning.turn(plain, 5000).float() - exact).pow(2).mean().sqrt()
    assert turned < 1.6 * own  # two roundings instead of one: sqrt(2)


def fresh() -> Any:
    """A model of its own: a method left on a shared one would take the keys."""
    return zoo.model.__wrapped__("llama")


def test_keys_are_taken_once_and_a_module_without_a_hook_has_none() -> None:
    model = fresh()
    layers = attentions(model)
    assert pre_rope.take(layers[0]) is None
    pre_rope.attach_pre_rope(model)
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(5, 25)[None])
        taken = [pre_rope.take(layer) for layer in layers]
        assert all(keys is not None and keys.shape[2] == 20 for keys in taken)
        assert [pre_rope.take(layer) for layer in layers] == [None] * len(layers)
    finally:
        pre_rope.detach_pre_rope(model)
    assert pre_rope.take(layers[0]) is None


def test_hooks_are_installed_once() -> None:
    model = fresh()
    first = pre_rope.attach_pre_rope(model)
    hooks = list(attached(model).key_hooks)
    assert pre_rope.attach_pre_rope(model) == first == rotary(model).rotate
    assert attached(model).key_hooks == hooks
    assert all(len(layer.k_proj._forward_hooks) == 1 for layer in attentions(model))
    pre_rope.detach_pre_rope(model)
    assert attached(model).key_hooks == [] and not any(layer.k_proj._forward_hooks for layer in attentions(model))
    pre_rope.detach_pre_rope(fresh())  # nothing to remove


def test_keys_are_stored_before_rope_where_a_layer_asks_for_it_and_their_positions_noted() -> None:
    model = fresh()
    rotate, ids = rotary(model).rotate, torch.tensor([[5, 6, 7, 8, 30, 31]])
    before, _ = zoo.random_kv(6, channels=64)
    keys = rotate(before, ids)
    plain, layer = (zoo.new_layer(load_method("atom", rope="pre")) for _ in range(2))
    assert pre_rope.stored(plain, keys, before, model, ids) is keys and plain.progress.positions.runs == []
    layer.rope = rotate
    layer.update(keys, keys)
    assert pre_rope.stored(layer, keys, before, model, ids) is before
    assert layer.progress.positions.runs == [[(0, 5), (4, 30)]]
    # a layer that leads one with keys before RoPE notes positions for it, and stores its own keys after RoPE
    plain.follower = layer
    plain.update(keys, keys)
    assert pre_rope.stored(plain, keys, before, model, ids) is keys
    assert plain.progress.positions.runs == [[(0, 5), (4, 30)]]


def test_keys_that_were_not_captured_or_are_not_only_rotated_are_refused() -> None:
    model = fresh()
    rotate, ids = rotary(model).rotate, torch.arange(6)[None]
    before, _ = zoo.random_kv(6, channels=64)
    keys = rotate(before, ids)

    def stored(before: Any, ids: Any, earlier: int = 0) -> torch.Tensor:
        layer = zoo.new_layer(load_method("atom", rope="pre"))
        layer.rope = rotate
        if earlier:
            zoo.feed(layer, keys[:, :, :earlier], keys[:, :, :earlier])
        layer.update(keys, keys)
        return pre_rope.stored(layer, keys, before, model, ids)

    assert stored(before, ids) is before
    for odd in (None, ids[0]):
        with pytest.raises(ModelError, match="LlamaForCausalLM does not pass plain position ids"):
            stored(before, odd)
    for odd in (None, before[:, :, :5]):
        with pytest.raises(CacheError, match="LlamaForCausalLM: the keys before RoPE were not captured"):
            stored(odd, ids)
    for wrong in ((1.5 * before, ids), (before, ids + 1)):
        with pytest.raises(ModelError, match="rotating the keys before RoPE does not give the keys"):
            stored(*wrong)
    assert stored(before, ids + 6, earlier=3) is before  # only a layer's first tokens are compared
    keys[0, 0, -1, 0] = float("nan")
    assert stored(before, ids) is before  # what is not finite is found, with its place, when it is packed


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (None, "transformers.models.llama.modeling_llama does not define apply_rotary_pos_emb"),
        (lambda q, k, cos, sin: (q, 2 * k), "LlamaForCausalLM's rotary embedding is not a rotation"),
        (
            lambda q, k, cos, sin: (q, k[..., :8]),
            "LlamaForCausalLM's rotary embedding does not fit heads of 64 channels",
        ),
    ],
)
def test_rotations_that_cannot_be_used_are_refused_with_what_to_set(apply: Any, message: str, monkeypatch: Any) -> None:
    model = fresh()
    file = sys.modules["transformers.models.llama.modeling_llama"]
    if apply is None:
        monkeypatch.delattr(file, "apply_rotary_pos_emb")
    else:
        monkeypatch.setattr(file, "apply_rotary_pos_emb", apply)
    with pytest.raises(ModelError, match=rf"^position=cache: {message}\.\n  hint: method.position=original$"):
        rotary(model)
    with pytest.raises(ModelError, match=rf"^mine: {message}\.\n  hint: other$"):
        rotary(model, "mine", "other")
    monkeypatch.undo()
    assert rotary(model) is rotary(model)  # found once, and remembered


def test_turns_by_other_numbers_are_not_taken_from_the_last_one() -> None:
    turning, (keys, _) = rotary(fresh()), zoo.random_kv(4, channels=64)
    three = turning.turn(keys, 3)
    assert torch.equal(turning.turn(keys, [3]), three) and torch.equal(turning.turn(keys, 3), three)
    torch.testing.assert_close(turning.turn(turning.turn(keys, 4), -1), three, rtol=1e-4, atol=1e-4)
    assert turning.turn(keys.half(), 3).dtype == torch.float16


@pytest.mark.parametrize("training", [True, False])
def test_a_probe_gives_a_token_at_two_places_and_leaves_the_mode(training: bool) -> None:
    model = fresh().train(training)
    keys = probed(model, lambda layer: torch.tensor(layer))
    assert model.training is training and [int(before) for _, before in keys.values()] == [0, 1]
    assert all(found.shape == (2, 2, 1, 64) for found, _ in keys.values())
    apart, together = (rotary(model).turn(found[:1], by) for found, _ in [keys[1]] for by in (PROBED, 0))
    assert alike(apart, keys[1][0][1:]) and alike(together, keys[1][0][:1]) and not alike(together, keys[1][0][1:])


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2), (torch.float64, 1e-4)]
)
def test_keys_are_alike_up_to_rounding_of_the_largest(dtype: torch.dtype, share: float) -> None:
    expected = torch.tensor([-4.0, 1.0, 0.0]).to(dtype)
    for factor, same in ((0.9, True), (1.2, False)):
        nudged = expected.double() + torch.tensor([0.0, 0.0, -4 * factor * share])
        assert alike(nudged, expected) is same
    assert not alike(expected[None], expected) and not alike(expected[:2], expected)
