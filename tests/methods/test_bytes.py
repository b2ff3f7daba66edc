"""Formulas of bytes against the bill of real caches, for every method and variants; what a draft reads."""

import pytest
import torch

from kvbench.cache import Parts, Prompts
from kvbench.errors import ConfigError
from kvbench.methods import Method, load_method
from kvbench.methods.byte_parts import KVBytes
from kvbench.methods.bytes import kv_bytes
from kvbench.util.confdir import group_options
from tests import zoo

#: the random models: 2 layers, 4 query heads, 2 KV heads of 64 channels
SHAPE = {"layers": 2, "query_heads": 4, "heads": 2, "channels": 64}
#: tokens of the prompt, and all tokens when the bill is asked for
LENGTHS = [(1, 1), (3, 9), (127, 130), (255, 257), (300, 300), (301, 347)]
#: as many steps as it takes until all windows are flushed, most of them several times
MANY_STEPS = [(128, 256), (301, 411)]
HF = {"backend": "hqq", "residual": 32}
#: method, quantizer (None: its default), fields
CASES = [
    ("fp16", None, {}),
    ("kivi", None, {}),
    ("kivi", "int3", {"sinks": 5, "residual": 64}),
    ("kivi", "int5", {"residual": 32}),
    ("kivi", "int4_token", {}),
    ("kivi", "int8", {"key_axis": "token"}),
    ("kivi", None, {"evict": True, "sinks": 2, "residual": 32}),
    ("kivi", None, {"window": 40, "sinks": 3, "residual": 32}),
    ("atom", None, {}),
    ("atom", None, {"window": 40, "sinks": 3}),
    ("atom", "int2_token", {"rope": "pre"}),
    ("logquant", None, {}),
    ("logquant", "int4", {"window": 64, "sinks": 2}),
    ("logquant", "int3", {"window": 42, "key_axis": "token"}),
    ("logquant", "int6", {"window": 42}),
    ("logquant", None, {"evict": True, "window": 10}),
    ("partial_logquant", None, {}),
    ("partial_logquant", "int4", {"value_window": "released", "window": 42, "sinks": 2}),
    ("quantspec", None, {"gamma": 0}),
    ("quantspec", None, {"sensitive_layers": 1}),
    ("quantspec", None, {"draft": "kivi", "draft_options": {"residual": 64, "quantizer": "int4"}}),
    ("quantspec", None, {"draft": "full", "draft_weights": "int4", "target": "fp16"}),
    ("streamingllm", None, {"budget": 64}),
    ("streamingllm", None, {"budget": 0.25, "position": "original"}),
    ("streamingllm", None, {"budget": 0.25, "evict": "prefill"}),
    ("snapkv", None, {}),
    ("snapkv", None, {"budget": 0.25}),
    ("h2o", None, {}),
    ("h2o", None, {"group": "max", "budget": 60, "recent": 20}),
    ("h2o", None, {"evict": "prefill"}),
    ("hf_quantized", None, {**HF, "bits": 4, "axis_key": 1, "axis_value": 1}),
    ("hf_quantized", None, {**HF, "bits": 3, "sinks": 2, "recent": 16}),
    ("hf_quantized", None, {**HF, "bits": 2, "recent": 8, "value_residual": 16, "axis_value": 1, "sinks": 4}),
    ("hf_quantized", None, {"backend": "quanto", "bits": 2, "residual": 32}),
    ("hf_quantized", None, {"backend": "quanto", "bits": 4, "residual": 32, "recent": 31, "sinks": 1}),
    ("hf_quantized", None, {"backend": "fp8", "sinks": 2}),
    ("kvquant", None, {"outliers": 0.0}),
    ("kvquant", None, {"outliers": 0.0, "bits": 3, "first_tokens": 3, "q_norm": True}),
    ("oscar", None, {"sinks": 4, "window": 40}),
    ("keep", None, {"residual": 32, "sinks": 3}),
    ("keep", "none", {"keep": 0.25}),
    ("cocktail", None, {"split": (10, 30, 60), "encoder": "bm25"}),
    ("cocktail", None, {"split": (15, 35, 50), "encoder": "bm25", "chunk_size": 16, "key_axis": "token"}),
]


#: methods that take part with their defaults, as soon as conf/method has them
CASES += [(name, None, {}) for name in group_options("method") if name not in {case[0] for case in CASES}]


def filled(method: Method, prompt: int, tokens: int, dtype: torch.dtype = torch.float16, ids=None) -> Parts:
    """The bill of a cache of two layers that was given random keys and values: a prompt, then tokens one by one."""
    model = zoo.model("llama", dtype)
    ids = zoo.padded_batch([prompt], seed=1)[0] if ids is None else ids
    prompts = Prompts.from_batch(
        ids,
        torch.ones_like(ids),
        context_spans=[(0, prompt)],
        queries=["3 4 5"],
        decode=lambda row: " ".join(map(str, row)),
    )
    cache = method.new_cache(model, prompts, tokens)
    try:
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            if method.observe_steps:
                for _ in range(tokens - prompt):
                    model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            elif tokens > prompt:
                for number in range(prompt, tokens):
                    for layer in (one for own in cache.layers for one in own.chain()):
                        zoo.feed(layer, *zoo.random_kv(1, heads=2, channels=64, seed=number))
        return cache.bill().used
    finally:
        method.detach(model)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0], *map(str, case[2].values())])[:60])
@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(MANY_STEPS, marks=pytest.mark.slow)], ids=["", "many steps"])
def test_bytes_are_those_of_the_bill(case, lengths):
    name, quantizer, fields = case
    if name == "hf_quantized":
        pytest.importorskip({"hqq": "hqq", "quanto": "optimum.quanto", "fp8": "torch"}[fields["backend"]])
    if name == "cocktail":
        pytest.importorskip("bm25s")
    made = {"calibration": zoo.calibrations("llama")} if name == "kvquant" else {}
    if name == "oscar":
        made = {"calibration": zoo.rotations("llama")}
    method = load_method(name, quantizer=quantizer, **fields, **made)
    if type(method).layer_bytes is Method.layer_bytes:
        pytest.skip("has no formula: it is optional")
    for prompt, tokens in lengths:
        used = filled(method, prompt, tokens)
        computed = kv_bytes(method, tokens, prompt=prompt, **SHAPE)
        assert (computed.codes, computed.scales, computed.window, computed.index) == (
            used.codes,
            used.scales,
            used.window,
            used.index,
        ), (prompt, tokens)
        assert computed.total == used.total


@pytest.mark.parametrize("name", ["fp16", "kivi", "atom", "h2o"])
def test_scales_of_models_in_fp32_are_fp32(name):
    used = filled(load_method(name), 200, 203, torch.float32)
    assert vars(kv_bytes(load_method(name), 203, prompt=200, width=4, **SHAPE)) == vars(used)


@pytest.mark.parametrize("options", [{}, {"cap_outliers": True, "bits": 3, "first_tokens": 3}])
def test_outliers_of_kvquant_are_as_many_as_were_calibrated_about(options):
    method = load_method("kvquant", outliers=0.05, calibration=zoo.calibrations("llama"), **options)
    text = zoo.padded_batch([96, 96], seed=9)[0][:1]  # a part of what the thresholds were calibrated on
    used, found = filled(method, 96, 96, ids=text), kv_bytes(method, 96, **SHAPE)
    assert (found.codes, found.scales) == (used.codes, used.scales)
    first = options.get("first_tokens", 0) * 2 * 2 * 2 * 64 * 2
    assert found.window - first == found.index  # a value and its place, 2 bytes each
    assert found.index == pytest.approx(used.index, rel=0.15)


def test_a_draft_of_upper_nibbles_reads_half_of_the_codes():
    """7B at 32k: 4 bits a code instead of 8; scales and the exact tokens are read whole."""
    shape = {"layers": 32, "query_heads": 32, "heads": 32, "channels": 128}
    method = load_method("quantspec")
    draft, target, held = (kv_bytes(method, 32768, view=view, **shape) for view in ("draft", "target", "all"))
    packed = 32768 - 128
    assert held == target
    assert held.codes == 2 * 32 * 32 * packed * 128 and draft.codes * 2 == held.codes
    assert draft.scales == held.scales == 2 * 32 * 32 * 4 * packed
    assert draft.window == held.window == 2 * 32 * 32 * 128 * 128 * 2


def test_a_drafts_own_cache_is_billed_and_its_target_does_not_read_it():
    method = load_method("quantspec", draft="streamingllm", target="fp16")
    whole, target, draft = (kv_bytes(method, 4096, view=view, **SHAPE) for view in ("all", "target", "draft"))
    assert draft == kv_bytes(load_method("streamingllm", budget=0.25, sinks=16), 4096, **SHAPE)
    assert target == kv_bytes(load_method("fp16"), 4096, **SHAPE)
    assert whole == target + draft


def test_cocktails_chunks_are_given_or_shares_say_them():
    method = load_method("cocktail", split=(10, 30, 60))
    assert kv_bytes(method, 3200, **SHAPE) == kv_bytes(method, 3200, chunks=(60, 30), **SHAPE)
    exact, packed = 2 * 2 * 2 * 64 * 2 * 320, 2 * 2 * 2 * 64
    codes = packed * (1920 * 2 + 960 * 4) // 8
    scales = 2 * 2 * 4 * (60 + 30) * (64 + 32)  # keys: a group of 32 tokens; values: a group of 64 channels
    assert kv_bytes(method, 3200, **SHAPE) == KVBytes(codes=codes, scales=scales, window=exact)
    with pytest.raises(ConfigError, match=r"split=\[10,30,60\]"):
        kv_bytes(load_method("cocktail"), 3200, **SHAPE)
    with pytest.raises(ConfigError, match="more tokens than the sequence, which has 3200"):
        kv_bytes(method, 3200, chunks=(100, 1), **SHAPE)


def test_a_method_from_outside_has_no_formula():
    with pytest.raises(ConfigError, match=r"read cache\.bill\(\)"):
        kv_bytes(Method(), 10, **SHAPE)


@pytest.mark.parametrize(("dtype", "full"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_ratio_is_to_what_full_precision_holds_in_the_models_dtype(dtype, full):
    model, ids = zoo.model(dtype=dtype), torch.arange(300)[None] % 90 + 3
    bills = {}
    for name in ("fp16", "kivi"):
        cache = load_method(name).new_cache(model)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        bills[name] = cache.bill()
    assert bills["fp16"].used.total == 300 * 2 * 2 * 2 * 64 * full
    assert bills["fp16"].fp16_equivalent == 300 * 2 * 2 * 2 * 64 * 2
    assert bills["fp16"].ratio == 1.0
    assert bills["kivi"].ratio == pytest.approx(bills["fp16"].used.total / bills["kivi"].used.total)


def test_a_sliding_layer_of_fp16_holds_what_a_later_token_can_see():
    """The newest window - 1 tokens; all of them while there are fewer."""
    token = 2 * 2 * 64 * 2  # keys and values of two heads, two bytes each
    for window, held in ((100, 99), (None, 300), (301, 300), (302, 300)):
        assert kv_bytes(load_method("fp16"), 300, **SHAPE, windows=[window] * 2) == KVBytes(window=2 * held * token)
