"""Odd input: order of reading, a reset while open, where a NaN was, models without attention."""

import pytest
import torch
import transformers
from transformers import MambaConfig, MambaForCausalLM

from kvbench.attention import reference
from kvbench.cache import Prompts
from kvbench.cache.segments import FullSegment
from kvbench.cache.store import Store
from kvbench.decoding import generate
from kvbench.errors import ConfigError, ModelError, NonFiniteError
from kvbench.methods import load_method
from tests.zoo import feed, model, new_layer, padded_batch, random_kv


def test_without_reorder_attention_visits_chunk_by_chunk(monkeypatch):
    """``reorder=false`` is an ablation of what attention does, not of what the row says."""
    llama, (ids, _) = model("llama"), padded_batch([200])
    visits = {}
    for reorder in (True, False):
        method = load_method("cocktail", encoder="bm25", chunk_size=8, split=(10, 40, 50), reorder=reorder)
        cache = method.new_cache(llama, Prompts.from_batch(ids, decode=lambda ids: " ".join(map(str, ids))))
        seen, read = [], Store.read
        with monkeypatch.context() as patch:
            patch.setattr(Store, "read", lambda *a, seen=seen, read=read: (seen.append(a[2:4]), read(*a))[1])
            generate(llama, cache, ids, max_new_tokens=2)
        keys = seen[: len(seen) // len(cache.layers)][::2]  # of the first layer; values in between
        if not reorder:
            layer, row = cache.layers[0], slice(0, 1)
            packed = [(first, last) for first, last in method.reading_order(layer, row) if last - first == 8]
            assert len(packed) > 10 and keys[: len(packed)] == packed
            assert reference.blocks(layer, row) == keys
        visits[reorder] = keys
    assert len(visits[True]) < 5 < len(visits[False])


def test_reset_closes_an_open_prompt():
    llama, (ids, _) = model("llama"), padded_batch([150])
    cache = load_method("kivi").new_cache(llama)
    cache.open_prefill()
    llama(ids, past_key_values=cache)
    cache.reset()
    llama(ids, past_key_values=cache)
    assert all(layer.sealed for layer in cache.layers)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kivi", {"residual": 32, "sinks": 3}),
        ("logquant", {"window": 8}),
        ("partial_logquant", {"window": 8}),
        ("atom", {}),
    ],
)
def test_nan_of_a_decoded_token_is_named_by_its_own_position(name, settings, side):
    layer, tensors = new_layer(load_method(name, **settings)), random_kv(200, channels=64)
    tensors[side][0, 1, 100, 3] = float("nan")
    keys, values = tensors
    feed(layer, keys[:, :, :70], values[:, :, :70])
    side_name = ("key", "value")[side]
    with pytest.raises(NonFiniteError, match=f"in the {side_name} at position 100 "):
        for t in range(70, 200):
            feed(layer, keys[:, :, t : t + 1], values[:, :, t : t + 1])


def test_a_model_without_attention_is_refused():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ModelError, match="no attention heads"):
        load_method("fp16").new_cache(mamba)


def test_cocktails_value_groups_are_checked_before_the_prompt_runs():
    """phi3-mini has heads of 96 channels, which the default groups of 64 do not divide."""
    method = load_method("cocktail", encoder="bm25")
    with pytest.raises(ConfigError, match=r"method\.value_group_size=32"):
        method.check(head_dim=96)
    load_method("cocktail", encoder="bm25", value_group_size=32).check(head_dim=96)
    for channels in (32, 64, 128):
        method.check(head_dim=channels)


def test_selected_rows_keep_where_their_windows_begin():
    keys, _ = random_kv(10, batch=2)
    window = FullSegment(2, 2, 32, keys.dtype, "cpu", capacity=16)
    window.append(slice(0, 2), keys)
    window.drop_front(slice(0, 1), 4)
    window.select(torch.tensor([1, 0]))
    assert torch.equal(window.view(slice(0, 1)), keys[1:])
    assert torch.equal(window.view(slice(1, 2)), keys[:1, :, 4:])


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Falcon", {}, "attention interface"),
        ("DeepseekV3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}, "MLA"),
    ],
)
def test_models_whose_attention_the_stores_cannot_serve_are_refused_at_once(name, settings, reason):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, **settings
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(ModelError, match=reason):
        load_method("fp16").new_cache(model)
    assert model.config._attn_implementation != "kvbench"
