"""``method.attention=engine``: attention by plain formulas with the engine's rounding, its channels, refusals."""

import json

import pytest
import torch

from kvbench.attention import fused, reference
from kvbench.calibration.scales import CLASSES, Scales, classes_of, percentile_of, scales
from kvbench.calibration.stored import load_stored, save
from kvbench.cli.calibrate import calibrate_parser, run_calibration
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.results.identity import short_name
from tests import zoo

#: no power of two, so that it matters if queries are scaled before they are rounded or after
SCALING = 0.17
ALL = slice(None)


def filled(attention, form, **options):
    layer = zoo.new_layer(load_method("engine", format=form, attention=attention, prefill="quantized", **options))
    zoo.feed(layer, *zoo.random_kv(40, channels=64))
    return layer


def by_blocks(x, scale_to, away):
    """8-bit codes in blocks of 32 channels, dequantized, by the formulas of ggml's quantize_row_q8_0."""
    out = torch.zeros_like(x)
    for first in range(0, x.shape[-1], 32):
        part = x[..., first : first + 32]
        most = part.abs().amax(-1, keepdim=True)
        codes = (part / (most / 127) + part.sign() / 2).trunc() if away else (part * (127 / most)).round()
        out[..., first : first + 32] = codes * scale_to(most / 127)
    return out


def expected(layer, query, form, attention):
    """The output for queries in the layer's basis, whose last one is the newest token's."""
    count = query.shape[2]
    keys, values = (s.read(ALL, 0, 40, torch.float32).repeat_interleave(2, 1) for s in layer.stores())
    as_half = lambda x: x.half().float()  # noqa: E731
    many, minima, weigh = attention == "engine_cuda" and count > 2, torch.zeros(()), lambda x: x
    if many:
        keys, values, weigh = as_half(keys), as_half(values), as_half
        scores = as_half(query * SCALING) @ keys.mT
    elif attention == "engine_cuda":
        x = query * SCALING
        rounded = by_blocks(x, lambda d: d, away=True)
        minima = layer.stores()[0].segments[0].read_minima(ALL, 0, 40).repeat_interleave(2, 1)
        scores = rounded @ keys.mT + (x - rounded).unflatten(-1, (2, 32)).sum(-1) @ minima.mT
    elif form == "fp8":
        weigh = lambda x: (x * 256).to(torch.float8_e4m3fn).float() / 256  # noqa: E731
        scores = query.clamp(-448, 448).to(torch.float8_e4m3fn).float() @ keys.mT * SCALING
    else:
        scores = by_blocks(query, as_half, away=False) @ keys.mT * SCALING
    visible = torch.ones(count, 40, dtype=torch.bool).tril(40 - count)
    weights = torch.exp(scores - scores.masked_fill(~visible, -1e30).amax(-1, keepdim=True)) * visible
    return weigh(weights) @ values / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("form", "attention", "count"),
    [("q4_0", "engine", 3), ("fp8", "engine", 3), ("q5_0", "engine_cuda", 2), ("q4_0", "engine_cuda", 3)],
)
def test_attention_is_that_of_plain_formulas(form, attention, count):
    layer = filled(attention, form)
    plain = torch.randn(1, 4, count, 64, generator=torch.Generator().manual_seed(3)) * 2
    basis = layer.transform("key")
    turned = plain if basis is None else basis.queries(plain)
    query = layer.rotated_queries(plain)
    mask = torch.ones(count, 40, dtype=torch.bool).tril(40 - count)[None, None]
    out = reference.attend_reference(torch.nn.Module(), layer, query, mask, SCALING).transpose(1, 2)
    wanted = expected(layer, turned, form, attention)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    exact = expected(layer, turned, "none", "engine") if form == "fp8" else expected(layer, turned, "fp8", "engine")
    assert (out - exact).abs().max() > 1e-3  # another rounding is seen


def test_the_sum_of_an_engines_queries_reaches_the_minima_of_keys():
    layer = filled("engine", "q4_1")
    query = torch.full((1, 4, 1, 64), 100.0) + torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    rounding = layer.rounding(1)
    assert rounding is not None and rounding.rounds == "sums of queries"
    keys = layer.stores()[0].read(ALL, 0, 40, torch.float32).repeat_interleave(2, 1)
    q, sums = reference.rounded_queries(layer, query, SCALING, rounding)
    assert sums is not None
    least = reference.minima_of(layer.stores()[0], ALL, 0, 40)
    scores = (q @ layer.stores()[0].read(ALL, 0, 40, torch.float32).mT + sums @ least.mT).view(1, 4, 40)
    blocks = query.unflatten(-1, (2, 32))
    codes = (blocks * (127 / blocks.abs().amax(-1, keepdim=True))).round()
    total = (codes.sum(-1) * (blocks.abs().amax(-1) / 127)).half().float()  # as llama.cpp stores it in q8_1
    products = by_blocks(query, lambda d: d.half().float(), away=False).unflatten(-1, (2, 32))
    least = least.repeat_interleave(2, 1)
    parts = (products.unsqueeze(-3) * (keys.unflatten(-1, (2, 32)) - least[..., None]).unsqueeze(-4)).sum(-1)
    wanted = (parts + total.unsqueeze(-2) * least.unsqueeze(-3)).sum(-1) * SCALING
    torch.testing.assert_close(scores, wanted.view(1, 4, 40), rtol=1e-5, atol=1e-2)


def test_kernels_serve_rounded_queries_and_refuse_the_rest_by_name():
    for form, reason in (("q4_0", None), ("fp8", "probabilities are rounded"), ("q4_1", "sums of queries are rounded")):
        layer = filled("engine", form)
        query = layer.rotated_queries(torch.randn(1, 4, 1, 64))
        out = fused.attend_fused(layer, query, None, SCALING)
        assert (out is None) == (reason is not None)
        assert reason is None or any(reason in path for path in layer.paths)


def test_keys_of_llama_lie_in_the_order_of_gguf_files():
    layer = filled("engine", "q8_0")
    layer.method.suit({"model_type": "llama"})
    basis, usual = layer.transform("key"), load_method("engine", format="q8_0").transform(layer, "key")
    assert basis is not None and usual is not None
    keys, queries = torch.randn(1, 2, 5, 64), torch.randn(1, 4, 5, 64)
    order = [i // 2 + 32 * (i % 2) for i in range(64)]
    torch.testing.assert_close(basis.keys(keys), usual.keys(keys[..., order]))
    exact = queries @ keys.repeat_interleave(2, 1).mT
    torch.testing.assert_close(basis.queries(queries) @ basis.keys(keys).repeat_interleave(2, 1).mT, exact)
    layer.method.suit({"model_type": "qwen2"})
    torch.testing.assert_close(layer.transform("key").keys(keys), usual.keys(keys))
    chosen = filled("engine", "q8_0", rotation={"key": "hadamard"})
    chosen.method.suit({"model_type": "llama"})
    torch.testing.assert_close(chosen.transform("key").keys(keys), usual.keys(keys))
    whole = filled("engine", "q8_0", rotation={"key": "engine", "value": "none"}).method
    whole.suit({"model_type": "llama"})
    assert not load_method("engine", format="q8_0").interleaves and whole.interleaves


def test_exact_attention_leaves_identity_and_name_as_they_were():
    plain = load_method("engine", format="fp8")
    assert not {"attention", "query_scale", "calibration"} & plain.hyperparameters().keys()
    assert load_method("engine", format="fp8", attention="engine").hyperparameters()["attention"] == "engine"
    target = {"preset": "engine", "_target_": "kvbench.methods.engine.Engine", "format": "fp8"}
    named = [short_name({"method": {**target, "attention": value}}) for value in ("exact", "engine")]
    assert named == ["engine fp8", "engine fp8 attention=engine"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "nvfp4", "attention": "engine"}, r"method\.attention=engine: is known for keys in q8_0.*nvfp4"),
        ({"format": "fp8", "attention": "engine_cuda"}, "llama.cpp's attention on CUDA, which reads q8_0.*not fp8"),
        ({"format": "iq4_nl", "attention": "engine_cuda"}, "not iq4_nl"),
        ({"format": "q8_0/iq4_nl", "attention": "engine_cuda"}, "not iq4_nl"),
        ({"format": "fp8/q4_0", "attention": "engine"}, r"none reads keys in fp8 and values in q4_0(?s:.*)format=fp8,"),
        ({"format": "q8_0/nvfp4", "attention": "engine"}, "none reads keys in q8_0 and values in nvfp4"),
        ({"format": "q8_0", "attention": "engine", "window": 8}, r"keeps no token exact; method\.window is 8"),
        ({"format": "q8_0", "attention": "engine", "own": "exact"}, r"method\.own=stored"),
        ({"format": "fp8", "query_scale": 2.0}, "queries are not rounded to fp8"),
        ({"format": "q8_0", "calibration": "x"}, "holds scales of fp8, but the format is q8_0"),
        ({"format": "fp8", "calibration": "x", "key_scale": 2.0}, "also given as options"),
        ({"format": "fp8", "calibration": "x", "rotation": {"key": "hadamard"}}, "heads that are not rotated"),
        ({"format": "fp8", "calibration": "none.safetensors"}, "does not exist(?s:.*)kvbench.calibrate method=engine"),
    ],
)
def test_what_has_no_effect_or_is_not_known_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_method("engine", **options)


def test_scales_are_the_largest_magnitudes_by_layer_or_head(tmp_path):
    model = zoo.model("llama")
    ids = torch.randint(3, model.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(2))
    seen: dict[str, list[torch.Tensor]] = {}
    cache = load_method("fp16").new_cache(model)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    cache.finalize()
    for side, store in zip(("key", "value"), cache.layers[1].stores(), strict=True):
        seen[side] = [store.read(ALL, 0, 48, torch.float32)]
    load_method("fp16").detach(model)
    each, shared = (scales(model, ids, name="llama", per_head=per_head) for per_head in (True, False))
    for side, (x,) in seen.items():
        torch.testing.assert_close(each.tensors[side][1], x.abs().amax((0, 2, 3)) / 448)
        torch.testing.assert_close(shared.tensors[side][1], (x.abs().max() / 448).expand(2))
        cut = scales(model, ids, name="llama", percentile=90.0).tensors[side][1, 0]
        beyond = (x.abs() > cut * 448).float().mean()
        assert 0.09 < beyond < 0.1
    save(each, tmp_path / "each.safetensors")
    method = load_method("engine", format="fp8", attention="engine", calibration=str(tmp_path / "each.safetensors"))
    assert len(method.identity()["calibration"]) == 16
    cache = method.new_cache(model)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    stored = cache.layers[1].stores()[0].segments[0].quantizer
    assert torch.equal(stored.scale, each.tensors["key"][1]) and stored.kind == "engine"
    assert torch.equal(method.arithmetic(cache.layers[1], 1).scale, each.tensors["query"][1])
    method.detach(model)
    with pytest.raises(ConfigError, match="was made with another model"):
        method.new_cache(zoo.model("qwen2"))
    assert json.loads(json.dumps(dict(each.info)))["rule"] == "minmax"
    assert load_stored(tmp_path / "each.safetensors", Scales).of("key", 1, slice(1, 2)) == each.tensors["key"][1, 1:]


def test_a_head_that_has_only_zeros_keeps_the_scale_1():
    model = zoo.fresh("llama")
    rows = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[:rows] = 0.0
    ids = torch.arange(3, 19)[None]
    for percentile in (None, 99.0):
        first, second = scales(model, ids, name="llama", per_head=True, percentile=percentile).tensors["value"][0]
        assert first == 1.0 and 0.0 < second < 0.1


def test_a_percentile_is_the_end_of_the_class_that_reaches_it():
    x = torch.cat([torch.full((99,), 1.0), torch.tensor([1000.0])]).view(100, 1, 1)
    counts = classes_of(x)
    assert counts.shape == (1, CLASSES) and int(counts.sum()) == 100
    assert 1.0 <= float(percentile_of(counts, 0.99)) < 1.0 + 2**-7 + 1e-6
    assert 1000.0 <= float(percentile_of(counts, 0.995)) < 1004.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=oscar", "--percentile", "99"], "--percentile=99.0: has no effect(?s:.*)method=engine"),
        (["method=engine", "--bits", "2"], "--bits=2: has no effect on a calibration for method=engine"),
        (["method=engine", "--percentile", "100"], "50 to below 100"),
    ],
)
def test_calibration_options_are_checked(words, message):
    arguments = calibrate_parser(None).parse_args([*words, "--model", "tiny", "--text", "mini"])
    with pytest.raises(ConfigError, match=message):
        run_calibration(arguments)
