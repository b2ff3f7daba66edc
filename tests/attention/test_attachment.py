"""The object that a cache attaches to a model, and a model without it after ``detach``."""

import pytest
import torch

from kvbench.decoding import generate
from kvbench.methods import load_method
from kvbench.models.int4 import Int4Linear
from kvbench.util.attachment import Placement, attached, record_placement
from tests import zoo

METHODS = {
    "kivi": ("kivi", {"quantizer": "int4"}),
    "keys before RoPE": ("atom", {"rope": "pre"}),
    "sinks that move": ("streamingllm", {"budget": 24}),
    "4-bit weights": ("quantspec", {"draft_weights": "int4", "gamma": 2}),
}


def traces(model):
    """Attributes and hooks that are not transformers' own."""
    names = {f"{name}.{key}" for name, module in model.named_modules() for key in vars(module) if "kvbench" in key}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return names, hooks, sum(isinstance(module, Int4Linear) for module in model.modules())


@pytest.mark.parametrize("name", METHODS)
def test_detach_leaves_nothing_on_a_model(name):
    model = zoo.model.__wrapped__("llama")  # fresh: other tests leave theirs attached
    stock, before = model.config._attn_implementation, traces(model)
    assert attached(model) is None and not before[0]
    base, options = METHODS[name]
    method = load_method(base, **options)
    ids = torch.arange(40)[None] + 3
    generate(model, method.new_cache(model), ids, max_new_tokens=4)
    found = attached(model)
    assert found.attention == stock
    assert (bool(found.key_hooks), found.rotary is not None, found.int4 is not None) == {
        "kivi": (False, False, False),
        "keys before RoPE": (True, True, False),
        "sinks that move": (False, True, False),
        "4-bit weights": (False, False, True),
    }[name]
    method.detach(model)
    assert traces(model) == before and model.config._attn_implementation == stock
    method.detach(model)  # once more does no harm


def test_placement_outlives_what_a_method_attached():
    model, method = zoo.model.__wrapped__("llama"), load_method("kivi", quantizer="int4")
    lies = Placement(parameters=12)
    record_placement(model, lies)
    method.new_cache(model)
    method.detach(model)
    assert attached(model).placement is lies and attached(model).attention is None
