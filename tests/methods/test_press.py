"""Presses as the choice of tokens, by stand-ins with kvpress's interface."""

import pytest
import torch

from kvbench.errors import CacheError, ConfigError, ModelError
from kvbench.methods import load_method
from tests.zoo import feed, model, new_layer, padded_batch, random_kv

KEYS, VALUES = random_kv(60, heads=2, channels=32, seed=5)


class KeyNorm:
    """kvpress's KnormPress, restated."""

    compression_ratio = 0.0

    def __init__(self, sign: float = -1.0) -> None:
        self.sign = sign

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.sign * keys.norm(dim=-1)


class Observed:
    """kvpress's ObservedAttentionPress, restated: the mean attention that a token receives."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        count = keys.shape[2]
        scores = attentions.sum(2) / torch.arange(count, 0, -1)
        return scores.view(*keys.shape[:2], -1, count).mean(2)


class Hidden:
    """A press that projects hidden states."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return module.q_proj(hidden_states)


class Compressing:
    """A press that does not score tokens."""


def press(name: str, **fields):
    fields = {"takes": ["int4", "none"], "residual": 32, **fields}
    return load_method({"_target_": "kvbench.methods.press.Press", "press": f"{__name__}.{name}", **fields}, "int4")


def test_a_press_chooses_and_the_rest_is_packed():
    for sign in (-1.0, 1.0):
        method = press("KeyNorm", options={"sign": sign}, keep=42)
        method.ready()
        layer = new_layer(method)
        feed(layer, KEYS, VALUES)
        for head in range(2):
            order = (sign * KEYS[0, head].norm(dim=-1)).argsort(descending=True)[:42]
            assert layer.positions(0)[head].tolist() == order.sort().values.tolist()
        assert [segment.length(slice(0, 1)) for segment in layer.segments()] == [32, 10, 10, 32]


def test_a_press_may_see_the_attention_of_the_prompt():
    method, net = press("Observed", attentions=True, keep=0.5), model("llama")
    ids, _ = padded_batch([60])
    cache = method.new_cache(net)
    with torch.no_grad():
        net(ids, past_key_values=cache)
    assert cache.layers[0].positions(0).shape == (2, 30) and 0 in cache.layers[0].positions(0)[0]
    method.detach(net)


@pytest.mark.parametrize(("attentions", "keep", "queries"), [(True, 0.5, -1), (False, 0.5, 0), (True, 1, 0)])
def test_attention_is_asked_for_where_a_press_reads_it_and_tokens_are_dropped(attentions, keep, queries):
    assert press("Observed", attentions=attentions, keep=keep).observe_prompt == queries


def test_what_a_press_cannot_do_is_said():
    layer = new_layer(press("Hidden"))
    with pytest.raises(CacheError, match=r"Hidden\.score failed \(AttributeError(?s:.*)not the module or its hidden"):
        feed(layer, KEYS, VALUES)
    with pytest.raises(ModelError, match="has no method score"):
        press("Compressing").ready()
    with pytest.raises(ModelError, match=r"Absent cannot be made(?s:.*)transformers below 5\.3"):
        press("Absent").ready()
    with pytest.raises(ModelError, match="cannot be made"):
        press("KeyNorm", options={"ratio": 1}).ready()
    with pytest.raises(ConfigError, match=r"method\.press=KnormPress: is not a class as MODULE\.CLASS"):
        load_method({"_target_": "kvbench.methods.press.Press", "press": "KnormPress", "takes": ["none"]})
