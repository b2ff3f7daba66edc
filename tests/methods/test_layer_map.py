"""Formats of single layers: the map as it is typed, its errors, and caches whose layers differ."""

from copy import copy

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.config.setting import parse_setting
from kvbench.decoding import generate
from kvbench.decoding.perplexity import decode_nll
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.byte_parts import KVBytes
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.layer_map import forms, parse_layer_map, written
from tests import zoo

#: of each kind of method one, on the two layers of the test models
MIXED = {
    "kivi": {"quantizer": "int4", "residual": 32, "layers": "0:int8/int2"},
    "kivi, fp16 last": {"quantizer": "int2", "residual": 64, "layers": "-1:fp16"},
    "logquant": {"window": 32, "quantizer": "int2_g64", "layers": "0:int4_g64"},
    "atom": {"layers": "1-:int2_token"},
    "snapkv": {"budget": 60, "layers": "0:fp16"},
    "h2o": {"budget": 60, "layers": "1:fp16"},
    "streamingllm": {"budget": 64, "layers": "0:fp16"},
    "cocktail": {"encoder": "bm25", "chunk_size": 16, "layers": "0:fp16"},
    "quantspec": {"layers": "0:fp16"},
    "kvquant": {"outliers": 0.05, "layers": "0:fp16"},
}


def made(name: str):
    options = dict(MIXED[name])
    if name == "kvquant":
        options["calibration"] = zoo.calibrations("llama")
    return load_method(name.partition(",")[0], **options)


def test_a_map_is_typed_as_text_a_list_or_a_mapping():
    texts = "0-1:fp16,2-29:int4,30-:int8"
    for given in (texts, tuple(texts.split(",")), {"0-1": "fp16", "2-29": "int4", "30-": "int8"}):
        assert written(given) == texts
        assert forms(given, 32) == ["fp16"] * 2 + ["int4"] * 28 + ["int8"] * 2
    assert forms("-2-:fp16,0:int8/int4", 5) == ["int8/int4", None, None, "fp16", "fp16"]
    assert forms("0--2:int8", 4) == ["int8"] * 3 + [None]
    assert forms(None, 3) == [None] * 3 and written(None) is None and parse_layer_map(None) == ()


@pytest.mark.parametrize(
    ("name", "layers", "words"),
    [
        ("kivi", "0-1", ["0-1", "is not LAYERS:FORMAT", "method.layers=[0-1:fp16"]),
        ("kivi", [], ["names no layer", "leave it out, or method.layers=[0-1:fp16"]),
        ("kivi", {}, ["names no layer"]),
        ("kivi", "first:fp16", ["is not LAYERS:FORMAT", "30- (to the last)"]),
        ("kivi", "0:int7", ["int7", "fp16", "int4_g128", "did you mean 'int"]),
        ("kivi", "0:int4/fp16", ["in a pair KEYS/VALUES both sides are packed"]),
        ("kivi", "0:int8,0-1:int4", ["names layer 0, which already has the format int8", "name each layer once"]),
        ("kivi", "0-2:int8", ["does not have: it has 2", "0 to 1", "method.layers=[0-:int8]"]),
        ("kivi", "1-0:int8", ["names no layer", "put the smaller number first: 0-1"]),
        ("cocktail", "0:int8", ["method=cocktail", "its own format or fp16", "method.layers=[0-1:fp16]"]),
        ("kvquant", "0:int4", ["method=kvquant", "fp16"]),
        ("kivi", "0:int8_g128", ["int8_g128", "is not a format that method=kivi takes"]),
    ],
)
def test_maps_that_cannot_be_say_what_to_type(name, layers, words):
    with pytest.raises(ConfigError) as error:
        load_method(name, layers=layers).by_layer(2)
    assert error.value.key == "method.layers"
    assert all(word in str(error.value) for word in words), str(error.value)


def test_each_format_is_checked_by_the_method_s_rule():
    with pytest.raises(ConfigError, match=r"method\.residual=32.*quantizer\.key\.group_size=128"):
        load_method("kivi", quantizer="int4", residual=32, layers="0:int4_g128")
    model = zoo.model("llama")
    with pytest.raises(ConfigError, match="it has 2"):
        load_method("kivi", layers="2:fp16").new_cache(model)


def cache_of(method, model, ids, mask=None):
    return method.new_cache(model, Prompts.from_batch(ids, mask, decode=lambda ids: " ".join(map(str, ids))))


@pytest.mark.parametrize("name", [name for name in MIXED if name != "cocktail"])  # whose bytes depend on its chunks
def test_the_bill_of_a_mixed_cache_is_the_sum_of_its_layers_in_each_format(name):
    """By formula and in real buffers, and each layer's as if all layers had its format."""
    model, (ids, _) = zoo.model("llama"), zoo.padded_batch([300])
    method, new = made(name), 3
    cache = cache_of(method, model, ids)
    generate(model, cache, ids, max_new_tokens=new)
    used = cache.bill().used
    shape = {"query_heads": 4, "heads": 2, "channels": 64, "width": 4}
    total, whole = KVBytes(), dict(tokens=300 + new - 1, prompt=300, **shape)
    for layer, own in zip(cache.layers, method.by_layer(2), strict=True):
        assert layer.method == own
        single = copy(own)
        single.layers = None
        part = kv_bytes(single, layers=2, **whole)
        total += KVBytes(*(getattr(part, field) // 2 for field in ("codes", "scales", "window", "index")))
    assert kv_bytes(method, layers=2, **whole) == total
    if name != "kvquant":  # whose outliers depend on the text
        assert all(getattr(used, part) == getattr(total, part) for part in ("codes", "scales", "window", "index"))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.slow  # 8 s
def test_a_layer_holds_what_it_would_hold_in_a_cache_of_its_format(name):
    """The first layer, whose keys and values do not depend on other layers' formats; and rows padded or alone."""
    model, (ids, mask) = zoo.model("llama"), zoo.padded_batch([200, 131], seed=4)
    method = made(name)
    single = method.by_layer(2)[0] if name != "quantspec" else load_method("fp16")
    caches = [cache_of(each, model, ids, mask) for each in (method, single)]
    for cache in caches:
        generate(model, cache, ids, mask, max_new_tokens=2)
        cache.settle()
    first, alone = (cache.layers[0] for cache in caches)
    for mine, other in zip(first.segments(), alone.segments(), strict=True):
        assert type(mine) is type(other) and mine.lengths == other.lengths
        for row in range(2):
            one = slice(row, row + 1)
            stored = [segment.read(one, 0, segment.length(one), torch.float32) for segment in (mine, other)]
            assert torch.equal(*stored)
    again = [generate(model, cache_of(method, model, ids[:1]), ids[:1], max_new_tokens=5).tokens[0]]
    padded = generate(model, cache_of(method, model, ids, mask), ids, mask, max_new_tokens=5)
    assert padded.tokens[0] == again[0]


@pytest.mark.slow  # 2 s
def test_perplexity_of_a_mixed_cache_is_that_of_single_steps():
    """Two formats whose segments are equally long, packed at different times."""
    model, (ids, _) = zoo.model("llama"), zoo.padded_batch([150], seed=3)
    method = load_method("kivi", quantizer="int2", residual=32, layers="0:int8")
    together = float(decode_nll(model, method.new_cache(model), ids, 60, prompt=60))
    single = 0.0
    with torch.inference_mode():
        cache = method.new_cache(model)
        out = model(ids[:, :60], past_key_values=cache).logits[:, -1:]
        for n in range(60, 150):
            single += float(torch.nn.functional.cross_entropy(out[0], ids[0, n : n + 1]))
            out = model(ids[:, n : n + 1], past_key_values=cache).logits
    assert together == pytest.approx(single, rel=1e-4)


def test_a_map_is_part_of_the_identity_but_only_if_there_is_one():
    assert "layers" not in load_method("kivi", layers=None).hyperparameters()
    method = parse_setting("kivi:int4:layers=[0:fp16,1:int8/int4]").load()
    assert method.hyperparameters()["layers"] == "0:fp16,1:int8/int4"
    assert method == load_method("kivi", quantizer="int4", layers=("0:fp16", "1:int8/int4"))
    first, second = method.layer_identity()
    assert first == [0, 0, None] and [side["bits"] for side in second[2]] == [8, 4]


def test_a_method_is_called_what_one_types():
    with pytest.raises(ConfigError, match=r"with method=hf_quantized, whose layers are all of its own format"):
        load_method("hf_quantized", layers="0:int4")
