"""Keys before RoPE, left at the attention modules that computed them."""

from __future__ import annotations

import torch

from kvbench.attention.rope import pre_rope
from kvbench.models.projections import attentions
from tests import zoo


def test_keys_are_taken_once_and_a_module_without_a_hook_has_none() -> None:
    model = zoo.model.__wrapped__("llama")  # one of its own: a method left on a shared model would take the keys
    layers = attentions(model)
    assert pre_rope.take(layers[0]) is None
    pre_rope.attach(model)
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(5, 25)[None])
        taken = [pre_rope.take(layer) for layer in layers]
        assert all(keys is not None and keys.shape[2] == 20 for keys in taken)
        assert [pre_rope.take(layer) for layer in layers] == [None] * len(layers)
    finally:
        pre_rope.detach(model)
    assert pre_rope.take(layers[0]) is None
