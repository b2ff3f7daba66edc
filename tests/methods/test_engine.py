"""The engines' formats as a method: bytes by the engines' formulas, rotations, what attends to what, and refusals."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.cache.segments.packed import PackedSegment
from kvbench.decoding.perplexity import decode_nll, simulated_nll
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.engine import rope_share
from kvbench.quantizers.engine.amd import octave
from kvbench.quantizers.engine.formats import FORMATS
from kvbench.results.identity import short_name
from tests import zoo
from tests.zoo import feed, new_layer, random_kv

ALL = slice(None)


def up(count: int, to: int) -> int:
    return -(-count // to) * to


#: bytes of a token's key and value in one head of d channels, by the engine's own layout
BYTES = {
    "int8_per_token_head": lambda d: 2 * (d + 4),
    "fp8_per_token_head": lambda d: 2 * (d + 4),
    "fp8": lambda d: 2 * d,
    "int4_per_token_head": lambda d: 2 * (d // 2 + 4),
    "int8fork": lambda d: 2 * (d + 8),
    "saw_int4": lambda d: 2 * (d // 2 + 8),
    "fp4_mx_block16": lambda d: 2 * (d // 2 + d // 16),
    "nvfp4": lambda d: 2 * (d // 2 + d // 16),
    "nvfp4_4over6": lambda d: 2 * (d // 2 + d // 16),
    "q8_0": lambda d: 2 * (d // 32 * 34),
    "q8_0_cpu": lambda d: 2 * (d // 32 * 34),
    "q5_1": lambda d: 2 * (d // 32 * 24),
    "q5_0": lambda d: 2 * (d // 32 * 22),
    "q4_1": lambda d: 2 * (d // 32 * 20),
    "q4_0": lambda d: 2 * (d // 32 * 18),
    "iq4_nl": lambda d: 2 * (d // 32 * 18),
    "ultraquant_4bit": lambda d: d + 2 * (d // 32),
    "octave_k3v4": lambda d: up(d // 2 + d // 2 + 2 * (d // 64) + 2, 8),
    "octave_k3v3": lambda d: up(d // 2 + d * 3 // 8 + 2 * (d // 64) + 2, 8),
    "octave_k3v3_compact": lambda d: up(d * 3 // 8 + d * 3 // 8 + 2 + 2, 4),
}
REFUSED = [("ultraquant_4bit", 96), ("octave_k3v4", 96), ("octave_k3v3", 96), ("octave_k3v3_compact", 96)]


def test_every_format_has_a_formula():
    assert list(BYTES) == list(FORMATS)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", BYTES)
def test_the_bill_is_the_engines_formula_to_the_byte(name, head_dim):
    method = load_method("engine", format=name)
    if (name, head_dim) in REFUSED:
        with pytest.raises(ConfigError, match=f"method.format={name}: needs heads of .* the model's have {head_dim}"):
            method.check(head_dim)
        return
    method.check(head_dim)
    layer = new_layer(method)
    feed(layer, *(x.bfloat16() for x in random_kv(20, channels=head_dim)))
    feed(layer, *(x.bfloat16() for x in random_kv(3, channels=head_dim, seed=1)))
    layer.settle()
    used = sum(n for store in layer.stores() for s in store.segments for n in s.used(0).values())
    assert used == 2 * 23 * BYTES[name](head_dim)
    assert kv_bytes(method, 23, layers=1, query_heads=4, heads=2, channels=head_dim).total == used


def test_keys_and_values_may_have_different_formats():
    method = load_method("engine", format="q8_0/q4_0")
    layer = new_layer(method)
    feed(layer, *random_kv(40, channels=64))
    key, value = (store.packed for store in layer.stores())
    assert (key.quantizer.bits, value.quantizer.bits) == (8, 4)
    assert sum(key.used(0).values()) == 2 * 40 * 68 and sum(value.used(0).values()) == 2 * 40 * 36


@pytest.mark.parametrize(
    ("name", "head_dim", "key", "value"),
    [
        ("q4_0", 128, "hadamard", "blocks:64"),
        ("q4_0", 96, "none", "none"),  # llama.cpp rotates heads of a multiple of 64 channels
        ("int4_per_token_head", 96, "rht_unnormalised", "rht_unnormalised"),
        ("int8_per_token_head", 128, "none", "none"),
        ("saw_int4", 128, "blocks:16", "none"),
        ("ultraquant_4bit", 64, "hadamard", "none"),
        ("octave_k3v4", 128, "octave", "octave"),
    ],
)
def test_heads_are_rotated_as_the_engine_does_unless_another_rotation_is_chosen(name, head_dim, key, value):
    method = load_method("engine", format=name)
    assert [method.rotation_of(side, head_dim) for side in ("key", "value")] == [key, value]
    plain = load_method("engine", format=name, rotation={"key": "none", "value": "none"})
    assert plain.rotation_of("key", head_dim) == plain.rotation_of("value", head_dim) == "none"
    assert plain.hyperparameters() != method.hyperparameters()


def test_compact_octave_rotates_whole_heads_of_keys():
    layers = [new_layer(load_method("engine", format=name)) for name in ("octave_k3v3", "octave_k3v3_compact")]
    for layer in layers:
        feed(layer, *random_kv(4, channels=128))
    blocks, whole = (layer.method.transform(layer, "key").forward for layer in layers)
    assert int((blocks[0] != 0).sum()) == 64 and int((whole[0] != 0).sum()) == 128


def test_saw_int4_rounds_to_bf16_what_it_rotates():
    method = load_method("engine", format="saw_int4")
    assert [method.make_quantizer(side, 64).bf16 for side in ("key", "value")] == [True, False]
    both = load_method("engine", format="saw_int4", rotation={"key": "blocks:64", "value": "blocks:16"})
    assert both.make_quantizer("value", 64).bf16


def test_saw_int4_takes_heads_that_its_blocks_do_not_divide_in_other_blocks_or_without_rotation():
    with pytest.raises(ConfigError, match=r"blocks of 16 channels, which do not divide the head's 72(?s:.*)up to 8"):
        load_method("engine", format="saw_int4").check(72)
    for key in ("none", "blocks:8"):
        method = load_method("engine", format="saw_int4", rotation={"key": key})
        method.check(72)
        layer = new_layer(method)
        feed(layer, *random_kv(5, channels=72))
        assert sum(sum(store.packed.used(0).values()) for store in layer.stores()) == 2 * 5 * BYTES["saw_int4"](72)


@pytest.mark.parametrize("name", ["int4_per_token_head", "octave_k3v3"])
def test_with_a_quantized_prefill_every_token_reads_what_is_stored(name):
    """Then steps, chunks and one pass over quantized keys and values agree."""
    model = zoo.model("llama")
    ids, _ = zoo.padded_batch([40], seed=2)
    losses = {}
    for own in ("stored", "exact"):
        method = load_method("engine", format=name, prefill="quantized", own=own)
        losses[own] = float(decode_nll(model, method.new_cache(model), ids, 31, prompt=30, chunk=1))
    expected = float(simulated_nll(model, method.new_cache(model), ids, 31))
    method.detach(model)
    assert losses["stored"] == pytest.approx(expected, rel=2e-5)
    assert abs(losses["exact"] - expected) > 1e-4


def test_layers_may_have_formats_of_their_own():
    model = zoo.model("llama")
    method = load_method("engine", format="q8_0", layers="0:fp16,-1:octave_k3v4")
    cache = method.new_cache(model)
    with torch.inference_mode():
        model(torch.arange(3, 43)[None], past_key_values=cache)
    cache.finalize()
    used = cache.bill().used.total
    method.detach(model)
    assert used == 2 * 40 * (2 * 64 * 4 + BYTES["octave_k3v4"](64))
    shape = {"layers": 2, "query_heads": 4, "heads": 2, "channels": 64, "width": 4}
    assert kv_bytes(method, 40, **shape).total == used
    other = load_method("engine", format="q8_0", layers="0:fp16,-1:q4_0")
    assert method.layer_identity() != other.layer_identity()
    with pytest.raises(ConfigError, match=r"method\.layers=q7: is not a format"):
        load_method("engine", layers="0:q7")


def test_a_window_keeps_the_newest_tokens_exact():
    method = load_method("engine", format="q4_0", window=16, sinks=4)
    assert not method.by_token and not method.eager
    layer = new_layer(method)
    feed(layer, *random_kv(60, channels=64))
    feed(layer, *random_kv(1, channels=64, seed=1))
    layer.settle()
    assert [segment.lengths for segment in layer.stores()[0].segments] == [[4], [41], [16]]
    assert kv_bytes(method, 61, layers=1, query_heads=4, heads=2, channels=64, width=4).total == sum(
        n for store in layer.stores() for s in store.segments for n in s.used(0).values()
    )


def test_octave_takes_the_channels_with_rope_from_the_model():
    numbers = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 128}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99, num_attention_heads=2, num_key_value_heads=1, partial_rotary_factor=0.5, **numbers
        )
    ).eval()  # fmt: skip
    method = load_method("engine", format="octave_k3v4")
    cache = method.new_cache(model)
    assert rope_share(model.config.to_dict()) == method.rope_share == 0.5
    with torch.inference_mode():
        model(torch.arange(3, 43)[None], past_key_values=cache)
    cache.finalize()
    assert cache.bill().used.total == 40 * up(64 * 4 // 8 + 64 * 3 // 8 + 64 + 6, 8)
    assert load_method("engine", format="octave_k3v4", rope_dim=128).turned(128) == 128


def test_rope_dim_beyond_the_head_is_refused():
    with pytest.raises(ConfigError, match=r"method\.rope_dim=128(?s:.*)0 to the head's 64, or null"):
        load_method("engine", format="octave_k3v4", rope_dim=128).check(64)


def test_channels_of_three_and_of_four_bits_are_stored_in_one_segment():
    quantizer, _ = octave("octave_k3v4", 128, 64)
    x = random_kv(300, channels=128)[0]
    segment = PackedSegment(1, 2, 128, torch.float32, "cpu", quantizer=quantizer, side="key")
    segment.append(ALL, x[:, :, :170])
    segment.append(ALL, x[:, :, 170:])
    wanted = quantizer.decode(*quantizer.encode(x), torch.float32)
    assert torch.equal(segment.read(ALL, 0, 300, torch.float32), wanted)
    segment.drop_front(ALL, 33)
    assert torch.equal(segment.read(ALL, 0, 267, torch.float32), wanted[:, :, 33:])
    assert segment.used(0) == {"codes": 2 * 267 * (32 + 24), "scales": 2 * 267 * 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "q9_9"}, "method.format=q9_9: is not a format"),
        ({"format": "q8_0/q4"}, r"'q4' is not a format\.(\n.*)*did you mean 'q4_1'\? .*such as q8_0/q4_0"),
        ({"format": "q8_0/q4_0/q4_0"}, "names more than two formats"),
        ({"format": "q8_0/octave_k3v4"}, "mixes an octave format"),
        ({"key_scale": 2.0}, "method.key_scale=2.0: has no effect"),
        ({"format": "fp8", "value_scale": 0.0}, "method.value_scale=0.0: must be greater than 0.0"),
        ({"window": 8, "prefill": "quantized"}, "needs method.prefill=exact"),
        ({"sinks": -1}, "method.sinks=-1"),
        ({"rotation": {"key": "spin"}}, r"method.rotation.key=spin(?s:.*)allowed: engine, none"),
        ({"format": "q8_0/q4_0", "rope_dim": 64}, "method.rope_dim=64: has no effect with method.format=q8_0/q4_0"),
        ({"format": "octave_k3v4", "rope_dim": -64}, "method.rope_dim=-64: is not a number of channels"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_method("engine", **options)


def test_octave_names_the_channels_with_rope_and_only_formats_that_fit_them():
    with pytest.raises(ConfigError, match="RoPE over a multiple of 64 channels of a head; here it turns 32") as raised:
        load_method("engine", format="octave_k3v4", rope_dim=32).check(64)
    assert "octave_k3v3" not in raised.value.allowed and "q5_0" in raised.value.allowed


def test_rows_are_labelled_with_the_format():
    config = {"method": {"_target_": "kvbench.methods.engine.Engine", "format": "q8_0"}}
    assert short_name(config) == "engine q8_0"


def test_a_layer_may_have_two_formats():
    method = load_method("engine", format="fp8", layers="-1:q8_0/q4_0")
    first, last = method.by_layer(2)
    assert first is method and [form.name for form in map(last.side, ("key", "value"))] == ["q8_0", "q4_0"]
