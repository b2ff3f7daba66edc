"""Rotated heads: without quantization nothing changes but rounding, on every path; with it, every token is rotated."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.config.setting import parse_setting
from kvbench.decoding import generate
from kvbench.decoding.perplexity import decode_nll, simulated_nll
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from tests import zoo

BOTH = {"rotation": {"key": "rht", "value": "hadamard"}}
#: of each way to place tokens one method, whose tokens all stay exact here; D 64
EXACT = {
    "fp16": {},
    "kivi": {"residual": 128, "sinks": 3},
    "logquant": {"window": 64, "reserved": 192},
    "streamingllm": {"budget": 64},
    "h2o": {"budget": 100},
    "snapkv": {"budget": 60},
    "quantspec": {"draft": "streamingllm", "draft_options": {"budget": 200, "rotation": {"key": "hadamard"}}},
}


def model_of(channels: int) -> LlamaForCausalLM:
    """A random model in fp32 with heads of a size, three query heads to a KV head."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": channels}
    torch.manual_seed(channels)
    return LlamaForCausalLM(LlamaConfig(**{**zoo.ARCHITECTURE, **sizes}, initializer_range=0.2)).eval()


@torch.inference_mode()
def logits(model, method, ids, mask=None, steps: int = 6, chunk: int | None = None) -> torch.Tensor:
    """Logits of the last prompt token and of the steps after it, for known tokens, ``[B, steps + 1, V]``."""
    prompt = ids.shape[1] - steps
    cache = method.new_cache(model)
    cache.open_prefill()
    parts = []
    bounds = [*range(0, prompt, chunk or prompt), prompt]
    for first, last in [*pairwise(bounds), *((n, n + 1) for n in range(prompt, ids.shape[1]))]:
        if first == prompt:
            cache.finalize()
        seen = None if mask is None else mask[:, :last]
        out = model(ids[:, first:last], attention_mask=seen, past_key_values=cache, logits_to_keep=1).logits
        parts.append(out)
    return torch.cat(parts[len(bounds) - 2 :], 1)


@pytest.mark.parametrize("channels", [64, 80, 96, 128])
@pytest.mark.parametrize("key", ["hadamard", "rht_unnormalised"])
def test_without_quantization_the_logits_are_those_of_fp16(channels, key):
    model, (ids, mask) = model_of(channels), zoo.padded_batch([41, 30], seed=channels)
    wanted = logits(model, load_method("fp16"), ids, mask)
    rotation = {"key": key, "value": "rht" if key == "hadamard" else key}
    for name in ("fp16", "kivi"):
        rotated = logits(model, load_method(name, rotation=rotation), ids, mask)
        assert (rotated - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max())), name
        chunked = logits(model, load_method(name, rotation=rotation), ids, mask, chunk=7)
        assert (chunked - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize(
    ("name", "architecture"),
    [(name, "mistral" if name in ("kivi", "streamingllm", "quantspec", "snapkv") else "llama") for name in EXACT],
)
@pytest.mark.slow  # 8 s
def test_methods_place_observe_and_drop_the_same_tokens(name, architecture):
    """Padded rows, a sliding window, prompts that are observed, sinks whose positions change, a draft's own cache."""
    model, (ids, mask) = zoo.model(architecture), zoo.padded_batch([90, 71], seed=5)
    plain = load_method(name, **EXACT[name])
    rotated = load_method(name, **EXACT[name], **BOTH)
    new = {"max_new_tokens": 24}
    made = [generate(model, zoo_cache(method, model, ids, mask), ids, mask, **new) for method in (plain, rotated)]
    assert made[0].tokens == made[1].tokens
    caches = [method.new_cache(model) for method in (plain, rotated)]
    outputs = [model(ids, attention_mask=mask, past_key_values=cache).logits for cache in caches]
    assert torch.allclose(*outputs, atol=1e-5)
    assert caches[0].bill().used == caches[1].bill().used


def zoo_cache(method, model, ids, mask):
    from kvbench.cache import Prompts

    return method.new_cache(model, Prompts.from_batch(ids, mask, decode=str))


def test_stored_tokens_are_rotated_also_in_windows_and_codes():
    """A layer stores the rotated form of fp16's tokens; codes are within half a step of the quantizer."""
    model, (ids, _) = zoo.model("llama"), zoo.padded_batch([150])
    caches = {}
    for name, options in (("fp16", {}), ("kivi", {"residual": 32, "sinks": 2, "quantizer": "int8", **BOTH})):
        caches[name] = load_method(name, **options).new_cache(model)
        model(ids[:, :140], past_key_values=caches[name])
        for n in range(140, 150):
            model(ids[:, n : n + 1], past_key_values=caches[name])
    row = slice(0, 1)
    exact, rotated = (caches[name].layers[0] for name in ("fp16", "kivi"))
    tokens, stored = (
        [
            torch.cat([store.read(row, a, b, torch.float32) for a, b in pairwise(store.cuts(row, 0, 150))], 2)
            for store in layer.stores()
        ]
        for layer in (exact, rotated)
    )
    for wanted, held in zip(rotated.rotated(*tokens), stored, strict=True):
        assert not torch.allclose(tokens[0], stored[0], atol=0.1)
        assert torch.allclose(wanted[:, :, :2], held[:, :, :2], atol=1e-5)
        assert torch.allclose(wanted[:, :, 140:], held[:, :, 140:], atol=1e-5)
        assert (wanted - held).abs().max() < 0.01 * wanted.abs().max()
    for wanted, held in zip(tokens, rotated.unrotated(*stored), strict=True):
        assert (wanted - held).abs().max() < 0.01 * wanted.abs().max()


@pytest.mark.parametrize("setting", ["kivi:int4:residual=32", "atom:int4_token:prefill=quantized:rope=post"])
@pytest.mark.slow  # 5 s
def test_perplexity_of_a_rotated_cache_is_the_same_by_turn_and_token_by_token(setting):
    """Known tokens in one pass, of which some are packed on the way; token by token; and in a simulated pass."""
    model, (ids, _) = zoo.model("llama"), zoo.padded_batch([120], seed=3)
    method = parse_setting(f"{setting}:rotation.key=hadamard:rotation.value='blocks:16'").load()
    assert (method.rotation.key, method.rotation.value) == ("hadamard", "blocks:16")
    together = decode_nll(model, method.new_cache(model), ids, 40, prompt=40)
    single = 0.0
    with torch.inference_mode():
        cache = method.new_cache(model)
        out = model(ids[:, :40], past_key_values=cache).logits[:, -1:]
        for n in range(40, 120):
            single += float(torch.nn.functional.cross_entropy(out[0], ids[0, n : n + 1]))
            out = model(ids[:, n : n + 1], past_key_values=cache).logits
    assert float(together) == pytest.approx(single, rel=1e-4)
    plain = parse_setting(setting).load()
    assert float(decode_nll(model, plain.new_cache(model), ids, 40, prompt=40)) != pytest.approx(single, rel=1e-6)
    simulated = [float(simulated_nll(model, one.new_cache(model), ids, 40)) for one in (method, plain)]
    assert simulated[0] != pytest.approx(simulated[1], rel=1e-6)
    assert simulated[0] == pytest.approx(simulated[1], rel=0.2)


def test_a_transform_may_be_chosen_by_layer_side_and_head():
    """As OSCAR does: a matrix per KV head, on one layer and for keys only."""
    from kvbench.methods.fp16 import FP16
    from kvbench.rotation import Transform

    asked = set()

    class Own(FP16):
        def transform(self, layer, side):
            asked.add((layer.index, side))
            if layer.index == 1 or side == "value":
                return None
            generator = torch.Generator().manual_seed(1)
            own = torch.randn(layer.heads, layer.key_dim, layer.key_dim, generator=generator, dtype=torch.float64)
            return Transform.of(torch.linalg.qr(own)[0])

    model, (ids, mask) = zoo.model("llama"), zoo.padded_batch([30, 25])
    wanted, own = (logits(model, method, ids, mask) for method in (FP16(), Own()))
    assert torch.allclose(wanted, own, atol=1e-5)
    assert asked == {(layer, side) for layer in (0, 1) for side in ("key", "value")}


def test_caches_of_keys_before_rope_refuse_rotated_keys_but_not_values():
    for name, options in (("kvquant", {}), ("atom", {"rope": "pre"})):
        method = load_method(name, **options, rotation={"value": "hadamard"})
        assert method.rotation.value == "hadamard"
        with pytest.raises(ConfigError, match=r"(?s)method\.rotation\.key=rht.*before RoPE.*rotate only the values"):
            load_method(name, **options, **BOTH)


def test_the_default_rotation_leaves_run_ids_alone():
    assert "rotation" not in load_method("kivi").hyperparameters()
    assert load_method("kivi", **BOTH).hyperparameters()["rotation"] == {"key": "rht", "value": "hadamard"}
    with pytest.raises(ConfigError, match=r"method\.rotation\.keys"):
        load_method("kivi", rotation={"keys": "hadamard"})
    with pytest.raises(ConfigError, match="did you mean 'hadamard'"):
        load_method("kivi", rotation={"key": "hadamar"})


def test_a_file_for_another_number_of_kv_heads_is_refused(tmp_path):
    matrix = torch.eye(64).repeat(3, 1, 1)
    save_file({"key.0": matrix, "key.1": matrix.clone()}, tmp_path / "a.safetensors")
    method = load_method("fp16", rotation={"key": str(tmp_path / "a.safetensors")})
    with pytest.raises(ConfigError, match=r"rotation\.key: the file has matrices for 3 KV heads, but layer 0 has 2"):
        logits(zoo.model("llama"), method, zoo.padded_batch([20])[0])
    cache = method.new_cache(zoo.model("llama"))
    cache.progress.rank = 0, 2  # a process with as many heads of its own as the file has
    layer = cache.layers[0]
    layer.heads, layer.key_dim, layer.device = 3, 64, torch.device("cpu")
    with pytest.raises(ConfigError, match="matrices for 3 KV heads, but layer 0 has 6"):
        layer.transform("key")
