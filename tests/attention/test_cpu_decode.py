"""The CPU kernel of every instruction set that the machine has, against attention in fp32 on dequantized values."""

import platform

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.attention.cpu import build, decode
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Format, describe_part
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error
from kvbench.cache.segments.packed import PackedSegment
from kvbench.quantizers import AffineQuantizer
from kvbench.util.processor import cpu_flags

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

#: instruction sets of this machine (Linux writes avx512_vnni, compilers avx512vnni); `plain` runs on all
HERE = {flag.replace("_", "") for flag in cpu_flags()}
SETS = [
    name
    for name, flags in build.SETS.items()
    if name != "neon" and all(flag.removeprefix("-m") in HERE for flag in flags)
]
#: largest error for queries in fp32; for 16 bits that of the CUDA kernel (check_kernels.TOLERANCE), of which rounding
#: the output to bf16 takes most
FP32, FP16, BF16 = 2e-5, 3e-3, 4.5e-3
TOLERANCE = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}

#: key format, value format; a group of 0 channels is the whole head
FORMATS = {
    **{
        f"int{bits} G{group}": (("affine", bits, "channel", group), ("affine", bits, "token", group % 128))
        for bits in (2, 3, 4, 5, 6, 8)
        for group in (32, 128)
    },
    "groups of 16": (("affine", 2, "channel", 16), ("affine", 4, "token", 16)),
    "keys per token": (("affine", 2, "token", 32), ("affine", 3, "token", 64)),
    "atom int4": (("atom", 4, "token", 0), ("atom", 2, "token", 0)),
    "int8 two nibbles": (("hierarchical", 8, "channel", 64), ("hierarchical", 8, "token", 0)),
    "scales in fp32": (("affine", 4, "channel", 32, 0, "fp32"), ("affine", 4, "token", 32, 0, "fp32")),
    "W 42": (("affine", 2, "channel", 42, 42), ("affine", 2, "token", 64)),
    "W 85": (("affine", 4, "channel", 43, 85), ("affine", 4, "token", 64)),
    "W 96 in 8 bits": (("affine", 8, "channel", 48, 96), ("affine", 8, "token", 0)),
    "int8 per token and head": (("offset", 8, "token", 0, 0, "fp32"), ("offset", 8, "token", 0, 0, "fp32")),
    "int4 per token and head": (("folded", 4, "token", 0, 0, "fp32"), ("folded", 4, "token", 0, 0, "fp32")),
    "q8_0": (("offset", 8, "token", 32), ("offset", 8, "token", 32)),
    "q4_0": (("offset", 4, "token", 32), ("offset", 4, "token", 32)),
    "fp8 per token and head": (("float", 8, "token", 0, 0, "fp32"), ("float", 8, "token", 0, 0, "fp32")),
    "fp8": (("float", 8, "token", 0, 0, ""), ("float", 8, "token", 0, 0, "")),
    "nvfp4": (("float", 4, "token", 16, 0, "e4m3"), ("float", 4, "token", 16, 0, "e4m3")),
    "iq4_nl": (("iq4_nl", 4, "token", 32), ("iq4_nl", 4, "token", 32)),
    "octave_k3v4": (("octave", 4, "token", 64), ("octave", 4, "token", 0, 0, "fp16", 2)),
    "octave, keys of 3 bits": (("octave", 3, "token", 0), ("octave", 4, "token", 64)),
    "levels of 4 bits": (("levels", 4, "token", 0), ("affine", 4, "token", 0)),
    "levels of 3 bits, normalised": (("levels_read", 3, "token", 0), ("affine", 3, "token", 0)),
    "levels of 4 bits, normalised": (("levels_read", 4, "token", 0), ("float", 8, "token", 0, 0, "fp32")),
    "kvarn": (("cross", 4, "channel", 128), ("cross", 2, "token", 0)),
}


def made(name, packed, exact_tokens, *, heads=2, channels=64, dtype=torch.bfloat16, sliding=None, **more):
    """A layer of one packed segment and an exact tail.

    `exact_tokens` are the newest keys, and the newest values, in full precision.
    """
    key, value = (Format(form[0], form[1], form[2], form[3] or channels, *form[4:]) for form in FORMATS[name])
    keys, values = exact_tokens
    stored = layer(
        [Piece(key, packed), Piece(FULL, [keys] * len(packed))],
        [Piece(value, [n + keys - values for n in packed], **more), Piece(FULL, [values] * len(packed))],
        heads=heads,
        key_dim=channels,
        value_dim=channels,
        dtype=dtype,
        sliding=sliding,
    )
    if key.scale == "fp32" and key.kind == "affine":
        for pair in stored.phases:
            for part in pair:
                part.params = tuple(param.float() for param in part.params)
    return stored


def queries(work, rows, *, group=3, count=1, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, work.heads * group, count, work.key_dim, generator=rng).to(dtype)


def agrees(query, work, instructions=None):
    """Compare the kernel with attention in fp32; the gate must not refuse the step."""
    assert decode.refuses(query, work) is None
    found = decode.attend(query, work, 0.2, instructions)
    assert found.dtype == query.dtype
    wanted = dequantized_attention(query, work, 0.2)
    assert relative_error(found, wanted) < TOLERANCE[query.dtype]
    return found


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_by_every_instruction_set(name, dtype, instructions):
    window = int(name.split()[1]) if name.startswith("W") else 10
    work = made(name, [1020 // window * window, 0], (37, 37))
    agrees(queries(work, 2, dtype=dtype), work, instructions)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize(("count", "group"), [(1, 1), (1, 7), (2, 4), (5, 3), (16, 4)])
def test_several_new_tokens_see_each_other_causally(count, group, instructions):
    work = made("int4 G32", [700, 130], (20, 100))
    agrees(queries(work, 2, group=group, count=count), work, instructions)
    agrees(queries(work, 2, group=group, count=count, dtype=torch.float16), work, instructions)


@pytest.mark.parametrize("channels", range(32, 257, 16))
def test_heads_of_all_sizes(channels):
    work = made("groups of 16", [300], (9, 9), channels=channels)
    agrees(queries(work, 1), work)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", [torch.bfloat16, torch.float16, torch.float32])
def test_queries_and_storage_have_dtypes_of_their_own(asked, stored):
    work = made("int2 G32", [520], (130, 33), dtype=stored)
    agrees(queries(work, 1, dtype=asked), work)


@pytest.mark.parametrize("logits", [Logits(3.0), Logits(50.0), Logits(None, torch.tensor([4.0, -1, 2, 0.5, 9, -20]))])
@pytest.mark.parametrize("count", [1, 3])
def test_caps_and_sinks(logits, count):
    work = made("int4 G32", [700, 3], (37, 37))
    work.logits = logits
    agrees(queries(work, 2, count=count), work)


@pytest.mark.parametrize("sliding", [1, 30, 129, 300, 5000])
def test_a_sliding_window_begins_inside_a_tile_and_a_group(sliding):
    work = made("int3 G32", [700, 65], (20, 128), sliding=sliding)
    agrees(queries(work, 2), work)


def test_exact_tokens_alone():
    work = made("int4 G32", [0, 0], (1300, 1300))
    agrees(queries(work, 2, count=2), work)


def test_keys_and_values_of_different_sizes():
    forms = [Format("affine", 4, "channel", 32), Format("affine", 4, "token", 32)]
    keys, values = ([Piece(form, [400]), Piece(FULL, [7])] for form in forms)
    work = layer(keys, values, heads=2, key_dim=192, value_dim=128)
    agrees(queries(work, 1), work)


@given(
    name=st.sampled_from([name for name in FORMATS if not name.startswith(("W", "kvarn"))]),
    packed=st.lists(st.integers(0, 1100), min_size=1, max_size=3),
    keys=st.integers(1, 140),
    values=st.integers(1, 140),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    count=st.integers(1, 16),
    channels=st.sampled_from([64, 128]),
    dtype=st.sampled_from(list(TOLERANCE)),
    instructions=st.sampled_from(SETS),
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_random_layers(name, packed, keys, values, heads, group, count, channels, dtype, instructions):
    packed = [n + max(values - keys, 0) for n in packed]  # the values' packed segment is not negative
    work = made(name, packed, (max(keys, count), max(values, count)), heads=heads, channels=channels)
    agrees(queries(work, len(packed), group=group, count=count, dtype=dtype), work, instructions)


@pytest.mark.parametrize("instructions", SETS)
def test_neither_threads_nor_other_rows_change_a_bit(instructions, monkeypatch):
    rows = [2300, 700, 108]
    work = made("int2 G32", rows, (20, 128))
    query = queries(work, 3, count=2, dtype=torch.bfloat16)
    outs = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outs.append(decode.attend(query, work, 0.2, instructions))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    for row in range(3):
        one, alone = slice(row, row + 1), made("int2 G32", rows, (20, 128))
        for part in {id(part): part for pair in alone.phases for part in pair}.values():
            part.words = [words[one].clone() for words in part.words]
            part.params = [param[one].clone() for param in part.params]
            part.buffer = None if part.buffer is None else part.buffer[one].clone()
        alone.table, alone.counts = alone.table[one].clone(), alone.counts[one]
        assert torch.equal(decode.attend(query[one], alone, 0.2, instructions), outs[0][one])


def test_what_the_lists_do_not_name_is_refused():
    work = made("int4 G32", [300], (9, 9))
    assert decode.refuses(queries(work, 1, dtype=torch.float64), work) == "queries in float64"
    assert decode.refuses(queries(work, 1, group=100, count=3), work) == ("300 query rows of a KV head, more than 256")
    narrow = made("groups of 16", [300], (9, 9), channels=16)
    assert decode.refuses(queries(narrow, 1), narrow) == "heads of 16 channels"
    wide = Format("levels", 4, "token", 32)
    other = layer([Piece(wide, [300]), Piece(FULL, [9])], [Piece(FULL, [309])], heads=2, key_dim=64, value_dim=64)
    assert "keys in " in decode.refuses(queries(other, 1), other)
    meta = torch.zeros(1, 6, 1, 64, device="meta")
    assert decode.refuses(meta, work) == "the tokens are not on a CPU"


def test_the_set_that_is_chosen_is_among_those_that_are_tested():
    assert build.instructions() in (*SETS, "neon")


def test_torchs_limit_on_instructions_is_obeyed(monkeypatch):
    for capability, machine, flags, wanted in (
        ("AVX512", "x86_64", {"avx512_vnni"}, "avx512_vnni"),
        ("AVX512", "x86_64", set(), "avx512"),
        ("AVX2", "x86_64", {"avx512_vnni"}, "avx2"),
        ("DEFAULT", "x86_64", {"avx512_vnni"}, "plain"),
        ("DEFAULT", "aarch64", set(), "neon"),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert build.instructions() == wanted and build.kernel_name() == f"cpu-{wanted}"


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", ["int4 G32", "keys per token"])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_query_that_is_not_a_number_gives_no_number(name, softcap, instructions):
    work = made(name, [300], (37, 41))
    work.logits = Logits(softcap=softcap)
    query = queries(work, 1)
    query[:, 0] = float("nan")
    found = decode.attend(query, work, 0.2, instructions)
    assert found[:, :, 0].isnan().all() and found[:, :, 1:].isfinite().all()


def test_a_row_without_tokens_gets_zeros():
    work = made("int4 G32", [300, 0], (37, 37))
    work.table[1, :, 2] = 0
    found = decode.attend(queries(work, 2), work, 0.2)
    assert not found[1].any() and found[0].any()


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_channel_of_the_query_that_is_far_larger_hides_no_other(dtype, instructions):
    """All keys agree in channel 0, so the others alone decide which tokens are seen, 4096 times smaller as they are."""
    work = made("keys per token", [300], (37, 37))
    keys = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(4)).clamp(-3, 3).bfloat16()
    keys[..., 0], keys[..., 1] = -4.0, 4.0  # the least and the most of its group, in every token
    segment = PackedSegment(
        1, 2, 64, keys.dtype, "cpu", quantizer=AffineQuantizer(4, 32, "token"), side="key", capacity=300
    )
    segment.append(slice(0, 1), keys)
    tail = work.phases[-1][0].buffer
    tail[..., 0], tail[..., 1] = -4.0, 4.0
    work.phases[0] = (describe_part(segment, 64), work.phases[0][1])
    query = queries(work, 1)
    query[..., 0] = 4096.0
    found = decode.attend(query.to(dtype), work, 0.2, instructions)
    wanted = dequantized_attention(query.to(dtype), work, 0.2)
    # scores are about 3,000: fp32 has them to 2e-4, as the reference does
    assert relative_error(found, wanted) < max(TOLERANCE[dtype], 1e-3)


@pytest.mark.parametrize("name", ["int4 G32", "int2 G128", "atom int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_of_16_bits_is_as_near_as_the_reference_paths(name, dtype):
    """Against queries in float32, where the kernel's error is a hundredth of what rounding the output adds."""
    work = made(name, [700], (37, 37))
    query = queries(work, 1, group=8, dtype=dtype)
    exact = decode.attend(query.float(), work, 0.2)
    found, rounded = decode.attend(query, work, 0.2), dequantized_attention(query, work, 0.2).to(dtype)
    assert relative_error(found, exact) < 1.02 * relative_error(rounded, exact)
