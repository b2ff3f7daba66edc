"""Sources of keys before RoPE and of values, for separate and for fused projections."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvbench.errors import ModelError
from kvbench.models.projections import ProjectionSource, attentions, head_dim, key_source, kv_heads, value_source
from tests import zoo


def test_a_cut_puts_heads_before_tokens() -> None:
    out = torch.arange(2 * 3 * 20.0).view(2, 3, 20)
    cut = ProjectionSource(nn.Identity(), "qkv_proj", 8, 16).cut(out, 4)
    assert cut.shape == (2, 2, 3, 4)
    assert torch.equal(cut[1, 1, 2], out[1, 2, 12:16]) and torch.equal(cut[0, 0, 1], out[0, 1, 8:12])
    assert ProjectionSource(nn.Identity(), "k_proj").cut(out, 4).shape == (2, 5, 3, 4)
    normed = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    assert torch.equal(ProjectionSource(nn.Identity(), "k_norm", 99).cut(normed, 4), normed.transpose(1, 2))


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_keys_and_values_are_those_of_the_projections(architecture: str) -> None:
    model = zoo.model(architecture)
    layers = attentions(model)
    assert layers == [layer.self_attn for layer in model.model.layers]
    attention, x = layers[1], torch.randn(2, 3, model.config.hidden_size)
    size, heads, queries = head_dim(model), kv_heads(model), model.config.num_attention_heads
    keys, values = key_source(model, attention), value_source(model, attention)
    if architecture == "llama":
        assert (keys.name, values.name) == ("k_proj", "v_proj")
        expected = attention.k_proj(x), attention.v_proj(x)
    else:
        assert keys.name == values.name == "qkv_proj"
        out = attention.qkv_proj(x)
        begin = queries * size
        expected = out[..., begin : begin + heads * size], out[..., begin + heads * size :]
        assert expected[1].shape[-1] == heads * size
    for source, channels in zip((keys, values), expected, strict=True):
        computed = source.cut(source.module(x), size)
        assert torch.equal(computed, channels.view(2, 3, heads, size).transpose(1, 2))


def test_keys_behind_a_norm_come_from_the_norm() -> None:
    model = zoo.model("llama")
    attention = nn.Module()
    attention.k_proj, attention.k_norm, attention.v_proj = nn.Identity(), nn.Identity(), nn.Identity()
    computed = key_source(model, attention)
    assert computed.module is attention.k_norm and computed.name == "k_norm"
    assert value_source(model, attention).module is attention.v_proj


def test_sizes_without_their_own_keys_follow_from_the_others() -> None:
    model = zoo.model("llama")
    config = model.config
    assert (head_dim(model), kv_heads(model)) == (config.head_dim, config.num_key_value_heads)

    class Plain:
        hidden_size, num_attention_heads, head_dim, num_key_value_heads = 96, 4, None, None

    bare = nn.Module()
    bare.config = type("Config", (), {"get_text_config": lambda self, decoder: Plain()})()
    assert (head_dim(bare), kv_heads(bare)) == (24, 4)


def test_a_layer_without_a_projection_of_keys_is_refused() -> None:
    model = zoo.model("llama")
    layer = model.model.layers[0].self_attn
    projection = layer.k_proj
    del layer.k_proj
    try:
        with pytest.raises(ModelError, match=r"LlamaForCausalLM .*k_proj or qkv_proj in each of its"):
            attentions(model)
    finally:
        layer.k_proj = projection
    assert len(attentions(model)) == model.config.num_hidden_layers
