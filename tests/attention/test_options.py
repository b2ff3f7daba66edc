"""Two caches on one model, each served by the kernels of its own options."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.attention import interpreter

interpreter.require()

from kvbench.attention.cpu import build  # noqa: E402
from kvbench.cache.progress import Options  # noqa: E402
from kvbench.methods import load_method  # noqa: E402


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )
    return LlamaForCausalLM(config).half().eval()


@torch.no_grad()
def test_interleaved_caches_keep_their_kernels():
    llama, method = model(), load_method("kivi", quantizer="int4", residual=32)
    ids = torch.arange(150)[None] % 50 + 3
    caches = {name: method.new_cache(llama) for name in ("auto", "reference", "triton")}
    for name in ("reference", "triton"):
        caches[name].options = Options(kernels=name)
    for cache in caches.values():
        llama(ids, past_key_values=cache)
    logits = {}
    for step in range(3):
        for name, cache in caches.items():
            logits[name] = llama(ids[:, step : step + 1], past_key_values=cache).logits
    assert {name: cache.path for name, cache in caches.items()} == {
        "auto": f"reference (cpu: {build.missing()})" if build.missing() else build.kernel_name(),
        "reference": "reference",
        "triton": "triton",
    }
    torch.testing.assert_close(logits["auto"], logits["reference"], atol=2e-3, rtol=2e-2)
    assert not torch.equal(logits["triton"], logits["reference"])
    torch.testing.assert_close(logits["triton"], logits["reference"], atol=2e-3, rtol=2e-2)
    twin = caches["triton"].clone()
    twin.options = Options(kernels="reference")
    llama(ids[:, :1], past_key_values=twin)
    llama(ids[:, :1], past_key_values=caches["triton"])
    assert twin.path == "reference+triton" and caches["triton"].path == "triton"


def test_options_reach_a_cache_that_is_led():
    llama = model().float()
    cache = load_method("quantspec", draft="kivi", draft_options={"quantizer": "int4"}).new_cache(llama)
    cache.options = Options(kernels="reference", mlp_chunk=16)
    assert cache.follower.options == cache.options
    assert load_method("kivi").new_cache(llama).options == Options()
