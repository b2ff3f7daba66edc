"""The table of the engines' formats: bytes, heads that fit, rotations, and the names that a person may type."""

import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.quantizers.engine.base import TokenQuantizer
from kvbench.quantizers.engine.build import build
from kvbench.quantizers.engine.formats import FORMATS, EngineFormat, Layout, parse_engine_formats

#: per format: its engine, bits of a code, bytes of each parameter of a group, and the channels of a group
STORED = {
    "int8_per_token_head": ("vLLM", 8, (4,), None),
    "fp8_per_token_head": ("vLLM", 8, (4,), None),
    "fp8": ("vLLM, SGLang, TensorRT-LLM", 8, (), None),
    "int4_per_token_head": ("vLLM", 4, (4,), None),
    "int8fork": ("a fork of SGLang", 8, (4, 4), None),
    "saw_int4": ("SAW-INT4 (a fork of SGLang)", 4, (4, 4), None),
    "fp4_mx_block16": ("SGLang", 4, (1,), 16),
    "nvfp4": ("vLLM, SGLang, TensorRT-LLM", 4, (1,), 16),
    "nvfp4_4over6": ("vLLM, FlashInfer", 4, (1,), 16),
    "q8_0": ("llama.cpp", 8, (2,), 32),
    "q8_0_cpu": ("llama.cpp", 8, (2,), 32),
    "q5_1": ("llama.cpp", 5, (2, 2), 32),
    "q5_0": ("llama.cpp", 5, (2,), 32),
    "q4_1": ("llama.cpp", 4, (2, 2), 32),
    "q4_0": ("llama.cpp", 4, (2,), 32),
    "iq4_nl": ("llama.cpp", 4, (2,), 32),
    "ultraquant_4bit": ("vLLM (AMD)", 4, (1,), 32),
    "octave_k3v4": ("vLLM (AMD)", 4, (2,), None),
    "octave_k3v3": ("vLLM (AMD)", 3, (2,), None),
    "octave_k3v3_compact": ("vLLM (AMD)", 3, (2,), None),
}
LLAMA_CPP = [name for name, (engine, *_) in STORED.items() if engine == "llama.cpp"]
OCTAVE = [name for name in STORED if name.startswith("octave")]


def test_every_format_is_stored_as_its_engine_stores_it():
    assert list(FORMATS) == list(STORED) and all(form.name == name for name, form in FORMATS.items())
    for name, (engine, bits, parameters, group) in STORED.items():
        assert FORMATS[name].engine == engine and FORMATS[name].layout == Layout(bits, parameters, group), name
    assert [name for name, form in FORMATS.items() if form.octave] == OCTAVE
    assert {name for name, form in FORMATS.items() if form.scaled} == {"fp8", "nvfp4", "nvfp4_4over6"}
    assert [name for name, form in FORMATS.items() if form.compact] == ["octave_k3v3_compact"]


def test_bytes_of_a_layout_count_its_narrow_channels_groups_and_padding():
    plain = Layout(4, (2, 2), 32)
    assert plain.codes(128) == 512 and plain.scales(128) == 4 * 4
    assert Layout(8, (4,)).codes(80) == 640 and Layout(8, (4,)).scales(80) == 4
    assert Layout(8).scales(128) == 0
    assert Layout(4, (2,), 64, narrow=64).codes(192) == 128 * 4 + 64 * 3
    assert Layout(3, (2,), padding=6).scales(64) == 8


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_quantizers_store_the_bytes_of_the_table(name, head_dim, side):
    form = FORMATS[name]
    for rope in (0, 64, head_dim) if form.octave else (head_dim,):
        layout = form.layouts(head_dim, rope)[side == "value"]
        quantizer = build(form, side, head_dim, rope)
        assert sum(width * channels for width, channels in quantizer.planes(head_dim)) == layout.codes(head_dim)
        stored = sum(parameter.nbytes(1, head_dim) for parameter in quantizer.parameters(torch.bfloat16))
        assert stored == layout.scales(head_dim)


@pytest.mark.parametrize(
    ("name", "head_dim", "rope", "key", "value", "slot"),
    [
        ("octave_k3v4", 128, 128, Layout(4, (2,), 64), Layout(4, (2,), padding=2), 136),
        ("octave_k3v4", 64, 64, Layout(4, (2,), 64), Layout(4, (2,), padding=4), 72),
        ("octave_k3v3", 128, 64, Layout(4, (2,), 64, narrow=64), Layout(3, (2,), padding=2), 112),
        ("octave_k3v3", 128, 0, Layout(3, (2,), 64), Layout(3, (2,), padding=2), 104),
        ("octave_k3v3_compact", 128, 64, Layout(3, (2,), 128), Layout(3, (2,), padding=0), 100),
        ("octave_k3v3_compact", 64, 64, Layout(3, (2,), 64), Layout(3, (2,), padding=0), 52),
    ],
)
def test_slots_of_octave_depend_on_the_channels_with_rope(name, head_dim, rope, key, value, slot):
    layouts = FORMATS[name].layouts(head_dim, rope)
    assert layouts == (key, value)
    assert sum(side.codes(head_dim) // 8 + side.scales(head_dim) for side in layouts) == slot


def test_only_octave_has_another_layout_for_keys_than_for_values():
    for name in set(FORMATS) - set(OCTAVE):
        assert FORMATS[name].layouts(128, 64) == (FORMATS[name].layout,) * 2


@pytest.mark.parametrize(
    ("names", "key", "value"),
    [
        (LLAMA_CPP, "hadamard", "blocks:64"),
        (["int4_per_token_head"], "rht_unnormalised", "rht_unnormalised"),
        (["saw_int4"], "blocks:16", "none"),
        (["ultraquant_4bit"], "hadamard", "none"),
        (OCTAVE, "octave", "octave"),
        (["int8_per_token_head", "fp8_per_token_head", "fp8", "int8fork", "fp4_mx_block16"], "none", "none"),
        (["nvfp4", "nvfp4_4over6"], "none", "none"),
    ],
)
def test_keys_and_values_are_rotated_as_in_the_engine(names, key, value):
    for form in (FORMATS[name] for name in names):
        assert (form.rotation("key", 128), form.rotation("value", 128)) == (key, value)


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_llama_cpp_rotates_only_heads_of_a_multiple_of_64_channels(name):
    for head_dim, rotated in ((32, False), (64, True), (65, False), (96, False), (192, True)):
        assert (FORMATS[name].rotation("key", head_dim) != "none") == rotated


def test_other_engines_rotate_heads_of_any_size():
    assert FORMATS["int4_per_token_head"].rotation("value", 80) == "rht_unnormalised"
    assert FORMATS["saw_int4"].rotation("key", 80) == "blocks:16"


@pytest.mark.parametrize(
    ("names", "fit", "reason"),
    [
        (["int8_per_token_head", "fp8", "int8fork"], {2: True, 63: False, 80: True, 81: False}, "multiple of 2 "),
        (["fp4_mx_block16", "nvfp4", "nvfp4_4over6"], {16: True, 24: False, 48: True, 80: True}, "multiple of 16 "),
        (LLAMA_CPP, {32: True, 48: False, 80: False, 96: True}, "multiple of 32 "),
        (["ultraquant_4bit"], {32: True, 48: False, 64: True}, "multiple of 32 "),
        (["ultraquant_4bit"], {96: False, 128: True, 192: False}, "power of two"),
        (["octave_k3v4", "octave_k3v3"], {64: True, 96: False, 192: True, 256: True}, "multiple of 64 "),
        (["octave_k3v3_compact"], {64: True, 192: False, 256: True}, "power of two"),
    ],
)
def test_heads_fit_a_format_or_the_reason_is_given(names, fit, reason):
    for form in (FORMATS[name] for name in names):
        for head_dim, fits in fit.items():
            said = form.misfit(head_dim, 64 if form.octave else head_dim)
            assert (said == "") == fits, (form.name, head_dim)
            assert fits or (reason in said and str(head_dim) in said)


def test_octave_alone_asks_for_rope_over_whole_blocks():
    for name in OCTAVE:
        assert "32" in FORMATS[name].misfit(128, 32) and "RoPE" in FORMATS[name].misfit(128, 32)
        assert FORMATS[name].misfit(128, 0) == FORMATS[name].misfit(128, 128) == ""
    assert FORMATS["q4_0"].misfit(128, 20) == FORMATS["nvfp4"].misfit(128, 20) == ""


def test_a_refusal_names_the_formats_that_fit():
    FORMATS["nvfp4"].check(80, 80)
    with pytest.raises(ConfigError, match=r"method\.format=octave_k3v4: needs heads of a multiple of 64") as raised:
        FORMATS["octave_k3v4"].check(80, 80)
    wanted = [name for name in FORMATS if name not in (*LLAMA_CPP, "ultraquant_4bit", *OCTAVE)]
    with pytest.raises(ConfigError, match="RoPE over a multiple of 64") as other:
        FORMATS["octave_k3v4"].check(192, 32)  # 192 is no power of two, 32 is one
    assert list(other.value.allowed) == [name for name in FORMATS if name not in ("ultraquant_4bit", *OCTAVE)]
    assert list(raised.value.allowed) == wanted and "int8_per_token_head" in str(raised.value)


def test_one_name_is_for_both_sides_and_two_are_for_keys_and_values():
    assert parse_engine_formats("q5_0") == (FORMATS["q5_0"],) * 2
    assert parse_engine_formats("q8_0/q4_0") == (FORMATS["q8_0"], FORMATS["q4_0"])
    assert parse_engine_formats("octave_k3v3/octave_k3v3") == (FORMATS["octave_k3v3"],) * 2


@pytest.mark.parametrize("text", ["octave_k3v4/q8_0", "q8_0/octave_k3v4", "octave_k3v4/octave_k3v3"])
def test_octave_is_not_mixed_with_another_format(text):
    with pytest.raises(ConfigError, match=f"method.format={text}: mixes an octave format"):
        parse_engine_formats(text)


@pytest.mark.parametrize(
    ("text", "said", "suggested"),
    [
        ("q8", "method.format=q8: is not a format", "did you mean 'q8_0'"),
        ("q8_0/iq4_n", "'iq4_n' is not a format", "did you mean 'iq4_nl'"),
        ("zzzzzz/q8_0", "'zzzzzz' is not a format", None),
        ("q8_0/q4_0/q4_0", "names more than two formats", None),
        ("q8_0/q4_0/nvfp5", "'nvfp5' is not a format", "did you mean 'nvfp4'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_one(text, said, suggested):
    with pytest.raises(ConfigError, match=said) as raised:
        parse_engine_formats(text)
    message = str(raised.value)
    assert all(name in message for name in FORMATS) and "q8_0/q4_0" in raised.value.hint
    assert (suggested in message) if suggested else "did you mean" not in message
    if "/" not in text:
        assert f"'{text}'" not in message.split("\n")[0]


def test_a_refusal_names_the_key_under_which_the_format_was_given():
    with pytest.raises(ConfigError, match=r"method\.layers=q7: is not a format"):
        parse_engine_formats("q7", "method.layers")


#: the quantizers by format, as they show themselves
BUILT = {
    "int8_per_token_head": "Int8PerTokenHead()",
    "fp8_per_token_head": "Fp8PerTokenHead()",
    "fp8": "Fp8(scale=1.0)",
    "int4_per_token_head": "Int4PerTokenHead()",
    "int8fork": "Ranged(bits=8, bf16=False)",
    "saw_int4": "Ranged(bits=4, bf16=False)",
    "fp4_mx_block16": "MXBlock16()",
    "nvfp4": "NVFP4(factor=1.0, four=False)",
    "nvfp4_4over6": "NVFP4(factor=1.0, four=True)",
    "q8_0": "Q8_0()",
    "q8_0_cpu": "Q8_0()",
    "q5_1": "Ranged(bits=5)",
    "q5_0": "Signed(bits=5)",
    "q4_1": "Ranged(bits=4)",
    "q4_0": "Signed(bits=4)",
    "iq4_nl": "IQ4NL()",
    "ultraquant_4bit": "UltraQuant()",
}


@pytest.mark.parametrize("name", BUILT)
def test_a_format_is_computed_by_its_engines_arithmetic(name):
    modules = {"vLLM (AMD)": "amd", "llama.cpp": "llamacpp", "vLLM": "vllm", "fp8": "vllm", "nvfp4": "vllm"}
    module = modules.get(name.split("_4over")[0], modules.get(STORED[name][0], "sglang"))
    for side in ("key", "value"):
        quantizer = build(FORMATS[name], side, 128, 128)
        assert repr(quantizer) == BUILT[name] and type(quantizer).__module__.endswith(f".{module}")


def test_options_reach_the_quantizers_that_have_them():
    def built(name: str, **options: object) -> TokenQuantizer:
        return build(FORMATS[name], "key", 128, 128, **options)

    assert [built(name).even for name in ("q8_0", "q8_0_cpu")] == [False, True]
    assert repr(built("fp8", scale=0.5)) == "Fp8(scale=0.5)"
    assert repr(built("nvfp4_4over6", scale=0.5)) == "NVFP4(factor=0.5, four=True)"
    assert repr(built("saw_int4", rotated=True)) == "Ranged(bits=4, bf16=True)"
    assert repr(built("int8fork", rotated=True)) == "Ranged(bits=8, bf16=False)"


def test_octave_has_another_quantizer_for_keys_than_for_values():
    key, value = (build(FORMATS["octave_k3v4"], side, 128, 64) for side in ("key", "value"))
    assert repr(key) == "Octave(bits=4, block=64, wide=64)" and repr(value) == "Octave(bits=4, block=None, wide=None)"


def test_a_format_that_nobody_wrote_a_quantizer_for_is_a_fault():
    with pytest.raises(AssertionError, match="int3"):
        build(EngineFormat("int3", "none", Layout(3)), "key", 64, 64)
