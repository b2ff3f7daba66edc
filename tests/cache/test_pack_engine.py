"""Packing in the engines' formats by one kernel, in Triton's interpreter: bit for bit what the quantizers write."""

import inspect

import pytest
import torch

from tests.cache.packing import both, in_one_launch, interpret, interpreted, new, same, special, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels import engine  # noqa: E402
from kvbench.cache.kernels.pack import served  # noqa: E402
from kvbench.cache.segments.packed import PackedSegment  # noqa: E402
from kvbench.cache.watch import Watch, uncached_message  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.quantizers.engine.amd import Octave, UltraQuant, octave  # noqa: E402
from kvbench.quantizers.engine.llamacpp import IQ4NL, Q8_0, Signed  # noqa: E402
from kvbench.quantizers.engine.vllm import NVFP4, Fp8, Fp8PerTokenHead, Int4PerTokenHead, Int8PerTokenHead  # noqa: E402

ALL = slice(None)
FORMATS = [
    (Int8PerTokenHead(), "key"),
    (Fp8PerTokenHead(), "value"),
    (Fp8(0.7), "key"),
    (Int4PerTokenHead(), "value"),
    (Q8_0(), "value"),
    (Signed(4), "key"),
    (NVFP4(), "key"),
    (NVFP4(0.03), "value"),
    (NVFP4(four=True), "value"),
    (Q8_0(even=True), "key"),
    (IQ4NL(), "value"),
    *zip(octave("octave_k3v4", 64, 64), ("key", "value"), strict=True),
    (octave("octave_k3v3", 64, 64)[1], "value"),
]


@pytest.mark.parametrize(("quantizer", "side"), FORMATS, ids=str)
def test_codes_and_parameters_equal_those_of_torch_bit_for_bit(quantizer, side):
    """Some tokens, one token alone, and tokens across the border of a tile."""
    x = special(11, 64, torch.bfloat16)
    x[0, 0, 10] = torch.tensor([6.0, -6.0]).repeat(32)
    both(quantizer, side, [x, *(tokens(n, 64, torch.bfloat16, n) for n in (1, 118))])


@pytest.mark.parametrize(("quantizer", "side"), FORMATS[3:7], ids=str)
def test_fp16_tokens_of_several_rows_and_heads_of_96_channels(quantizer, side):
    both(quantizer, side, [tokens(5, 96, torch.float16, 1, batch=2, heads=2)])


@pytest.mark.parametrize(
    ("quantizer", "channels"), [(IQ4NL(), 96), *((Octave(n, None, padding=n), 192) for n in (3, 4))]
)
@pytest.mark.parametrize("side", ["key", "value"])
def test_levels_of_tables_in_heads_that_are_no_power_of_two(quantizer, channels, side):
    x = special(17, channels, torch.float16)
    x[0, 0, 11] = torch.arange(channels) % 16 * 2.0 - 15  # ties
    both(quantizer, side, [x])


@pytest.mark.parametrize("channels", [80, 256])
@pytest.mark.parametrize(("quantizer", "side"), [*FORMATS[:4], *FORMATS[6:7]], ids=str)
def test_heads_of_80_and_256_channels(quantizer, side, channels):
    both(quantizer, side, [tokens(3, channels, torch.bfloat16, 1)])


def test_tokens_of_many_layers_are_packed_in_one_launch():
    for quantizer in (Fp8(), Signed(4)):
        in_one_launch(quantizer)


@pytest.mark.parametrize(("key", "value"), [(Q8_0(), Signed(4)), (Int4PerTokenHead(), Fp8()), (NVFP4(), NVFP4())])
def test_the_token_of_a_captured_step_is_packed_at_places_on_the_device(key, value):
    x = tokens(34, 64, torch.bfloat16, batch=2, heads=2)
    wanted = [new(quantizer, side, x) for quantizer, side in ((key, "key"), (value, "value"))]
    computed = [new(quantizer, side, x) for quantizer, side in ((key, "key"), (value, "value"))]
    for segment in wanted:
        segment.append(ALL, x)
    for segment in computed:
        segment.append(ALL, x[:, :, :33])
        assert segment.advance() == [33, 33] and segment.lengths == [34, 34]
    last = x[:, :, 33:]
    engine.pack_engine_tokens(*computed, last, last, torch.full((2, 2), -1, dtype=torch.int32))
    before = [segment.clone() for segment in computed]
    engine.pack_engine_tokens(*computed, last, last, torch.full((2, 2), 33, dtype=torch.int32))
    for done, alike, earlier in zip(computed, wanted, before, strict=True):
        same(done, alike)
        assert any(not torch.equal(a, b) for a, b in zip(done.words, earlier.words, strict=True))
    assert engine.engine_refusal(*computed) is None
    assert "UltraQuant" in engine.engine_refusal(new(UltraQuant(), "key", x), computed[1])
    assert "float32" in engine.engine_refusal(new(Q8_0(), "key", x.float()), computed[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_by_its_place(bad):
    x = tokens(64, 64, torch.float16, heads=2)
    x[0, 1, 37, 5] = bad
    segment = new(Int8PerTokenHead(), "key", x)
    with pytest.raises(NonFiniteError, match=r"\(0, 1, 37, 5\)"):
        segment.append(ALL, x)


def test_no_argument_has_a_name_that_the_launcher_uses_itself():
    """Triton's generated launcher has local variables of these names; the interpreter has no such launcher."""
    from kvbench.cache.kernels import engine_kernel

    for kernel in (engine_kernel.pack_engine_row_tokens, engine_kernel.pack_engine_layers, engine_kernel.pack_step):
        names = set(inspect.signature(kernel.fn).parameters)
        assert len(names) > 20 and not names & {"params", "options", "specialization"}


def test_what_the_kernel_does_not_serve_is_packed_by_torch():
    x = tokens(3, 64, torch.float16)
    for quantizer, reason in ((UltraQuant(), "codes of UltraQuant"), (Signed(5), "5-bit codes")):
        assert served(new(quantizer, "key", x), x) == reason


def step_of(key, value, x, y):
    """Pack the last token of keys and values by a captured step, into buffers of different lengths."""
    sides = []
    for quantizer, side, tokens_of, capacity in ((key, "key", x, 128), (value, "value", y, 300)):
        shape = {"batch": x.shape[0], "heads": x.shape[1], "channels": tokens_of.shape[3], "capacity": capacity}
        made = PackedSegment(**shape, dtype=x.dtype, device="cpu", quantizer=quantizer, side=side)
        made.append(ALL, tokens_of[:, :, :-1].contiguous())
        assert made.advance() == [x.shape[2] - 1] * x.shape[0]
        sides.append(made)
    return sides, torch.full((x.shape[0], 2), x.shape[2] - 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((NVFP4(0.03), Int8PerTokenHead()), (Fp8(0.7), Signed(4)), (Q8_0(), NVFP4(0.5, four=True))),
        *((Octave(4, 64), IQ4NL()), (Octave(3, None), Octave(3, None, padding=2))),
    ],
    ids=str,
)
def test_keys_and_values_of_a_captured_step_have_formats_strides_and_channels_of_their_own(key, value):
    x = tokens(4, 64, torch.float16, batch=2, heads=2).contiguous()
    y = tokens(4, 96, torch.float16, 1, batch=2, heads=2)
    sides, places = step_of(key, value, x, y)
    engine.pack_engine_tokens(*sides, x[:, :, 3:], y[:, :, 3:], places)
    for done, quantizer, side, like in zip(sides, (key, value), ("key", "value"), (x, y), strict=True):
        wanted = new(quantizer, side, like)
        wanted.append(ALL, like)
        assert torch.equal(done.codes(ALL, 0, 4), wanted.codes(ALL, 0, 4))
        assert torch.equal(*(each.read(ALL, 0, 4, torch.float32) for each in (done, wanted)))


@pytest.mark.parametrize("side", [0, 1])
def test_a_token_of_a_captured_step_that_is_not_finite_is_recorded_with_the_tag_of_its_side(side):
    both_sides = tokens(3, 64, torch.float16, batch=2, heads=2), tokens(3, 96, torch.float16, batch=2, heads=2)
    sides, places = step_of(Int8PerTokenHead(), Q8_0(), *both_sides)
    watch = Watch(torch.device("cpu"))
    watch.tag(uncached_message)
    for segment in sides:
        segment.watch = watch, watch.tag(uncached_message)
    last = [x[:, :, 2:].clone() for x in both_sides]
    engine.pack_engine_tokens(*sides, *last, places)
    assert not watch.record.any()
    last[side][1, 0, 0, 40] = float("inf")
    engine.pack_engine_tokens(*sides, *last, places)
    assert watch.record.tolist() == [1, 1 + side, 1, 0, 2, 40]


def test_channels_of_a_captured_step_that_are_not_contiguous_are_copied_first():
    x = tokens(2, 64, torch.float16)
    found = []
    for spread in (False, True):
        sides, places = step_of(Q8_0(), Int8PerTokenHead(), x, x)
        last = x[:, :, 1:]
        last = torch.stack([last, last], -1)[..., 0] if spread else last
        assert (last.stride(-1) == 1) is not spread
        engine.pack_engine_tokens(*sides, last, last, places)
        found.append([segment.codes(ALL, 0, 2) for segment in sides])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("quantizer", "rule"),
    [
        (Q8_0(), "q8_0"), (Q8_0(even=True), "q8_0_cpu"), (Signed(4), "q4_0"), (NVFP4(), "nvfp4"),
        (NVFP4(four=True), "4over6"), (Int8PerTokenHead(), "int8"), (Fp8PerTokenHead(), "fp8_head"), (Fp8(), "fp8"),
        (Int4PerTokenHead(), "int4"), (IQ4NL(), "iq4_nl"),
        (Octave(3, None), "octave"), (Octave(4, 64, 64), None), (UltraQuant(), None),
    ],
    ids=str,
)  # fmt: skip
def test_a_quantizer_has_the_kernels_rule_of_its_own(quantizer, rule):
    assert engine.rule(quantizer) == rule and (rule is None or rule in engine.KINDS)


def test_the_kernels_parameters_follow_the_format():
    """Channels are padded to a power of two, 16 at least; a group of all channels is as wide; 4 warps take 8 rows."""
    for channels, wide in ((8, 16), (64, 64), (80, 128), (96, 128), (256, 256)):
        form = engine.kernel_form(Int8PerTokenHead(), channels)
        assert (form.channels, form.group, form.rows, form.parts, form.warps) == (wide, wide, 8, 4, 4)
        assert (form.kind, form.bits, form.scale, form.table) == ("int8", 8, 1.0, ())
    assert engine.kernel_form(Q8_0(), 96).group == 32 and "groups of 32" in engine.kernel_form(Q8_0(), 80)
    assert engine.kernel_form(Fp8(0.7), 64).scale == 0.7 and engine.kernel_form(NVFP4(0.03), 64).scale == 0.03
    assert engine.kernel_form(UltraQuant(), 64) is None
    assert engine.kernel_form(octave("octave_k3v4", 64, 64)[1], 64).padding == 2


@pytest.mark.parametrize("quantizer", [Q8_0(), Signed(4)], ids=str)
def test_scales_beyond_the_range_of_fp16_are_its_largest_number(quantizer):
    x = tokens(2, 64, torch.bfloat16)
    x[0, 0, 0, :2] = torch.tensor([3e8, -4e8])
    both(quantizer, "key", [x])
