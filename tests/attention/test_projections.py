"""Sources of keys and values: the cache receives what the projections give."""

import pytest
import torch
from transformers import DynamicCache

from kvbench.attention.rope.rotary import rotary
from kvbench.models.projections import attentions, head_dim, key_source, kv_heads, value_source
from tests import zoo


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss", "gemma2"])
def test_sources_give_keys_before_rope_and_values(name):
    """Projections of their own and side by side with the queries'; ``[B, H, q, D]``."""
    model, cache, outs = zoo.model(name), DynamicCache(), []
    assert (head_dim(model), kv_heads(model)) == (64, 2)
    hooks = []
    for attention in attentions(model):
        for source in (key_source(model, attention), value_source(model, attention)):

            def note(module, inputs, out, source=source):
                outs.append(source.cut(out, 64))

            hooks.append(source.module.register_forward_hook(note))
    ids, _ = zoo.padded_batch([30])
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    positions = torch.arange(30)[None]
    for index, (keys, values) in enumerate(zip(outs[::2], outs[1::2], strict=True)):
        layer = cache.layers[index]
        assert torch.equal(values, layer.values)
        torch.testing.assert_close(rotary(model).rotate(keys, positions), layer.keys)
        assert not torch.allclose(keys, layer.keys, atol=1e-2)
