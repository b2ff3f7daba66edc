"""Many new tokens that see packed ones: by the CPU kernel that unpacks tiles, against the reference path."""

import pytest
import torch

from kvbench.attention import chunks
from kvbench.attention.cpu import build
from kvbench.cache.progress import Options
from kvbench.cache.segments.packed import PackedSegment
from kvbench.decoding.passes import forward, prefill
from kvbench.decoding.perplexity import simulated_logits
from kvbench.methods import load_method
from tests import zoo

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

SETTINGS = {
    "kivi": ("kivi", {"quantizer": "int2", "residual": 32, "sinks": 2}),
    "logquant": ("logquant", {"quantizer": "int4", "window": 32}),
    "atom": ("atom", {}),
}


def no_reading(monkeypatch, kernels):
    if kernels == "auto":
        monkeypatch.setattr(PackedSegment, "read", lambda *args: pytest.fail("a segment was dequantized"))


@pytest.mark.parametrize("name", SETTINGS)
def test_simulated_quantization(monkeypatch, name):
    kind, options = SETTINGS[name]
    model, ids = zoo.model("llama"), zoo.padded_batch([140], seed=2)[0]
    logits = {}
    for kernels in ("reference", "auto"):
        no_reading(monkeypatch, kernels)
        cache = load_method(kind, **options).new_cache(model)
        cache.options = Options(kernels=kernels)
        logits[kernels] = simulated_logits(model, cache, ids)
        assert (build.kernel_name() in cache.path) == (kernels == "auto")
    assert torch.allclose(logits["auto"], logits["reference"], atol=2e-5)


def test_several_tokens_that_are_packed_before_they_attend(monkeypatch):
    """Padded rows; then a step of 20 tokens."""
    model, (ids, mask) = zoo.model("llama"), zoo.padded_batch([90, 77], seed=2)
    logits = {}
    for kernels in ("reference", "auto"):
        no_reading(monkeypatch, kernels)
        cache = load_method("atom").new_cache(model)
        cache.options = Options(kernels=kernels)
        with torch.inference_mode():
            prefill(model, cache, ids[:, :70], mask[:, :70])
            positions = mask.cumsum(-1)[:, 70:] - 1
            logits[kernels] = forward(model, cache, ids[:, 70:], mask, positions, all_logits=True)
    assert torch.allclose(logits["auto"], logits["reference"], atol=2e-5)


def test_what_it_does_not_serve_is_named(monkeypatch):
    layer = zoo.new_layer(load_method("h2o", budget=16))
    layer.window, layer.seen = 8, 30
    for change, reason in (
        ({"observe_steps": True}, "h2o needs attention weights"),
        ({"observe_steps": False}, "a sliding window hides different tokens from each of the 3 new tokens"),
    ):
        for key, value in change.items():
            monkeypatch.setattr(type(layer.method), key, value)
        with pytest.raises(chunks.NotServed, match=reason):
            chunks.check_causal_chunk(layer, None, 3)
