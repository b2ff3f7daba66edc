"""The CUDA decode kernel against attention in fp32 on the dequantized values, and what it is compiled for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.attention.cuda import config, storage
from kvbench.attention.cuda import decode as cuda_decode
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: shared memory of a CTA on an H200
H200 = 227 * 1024
#: key format, value format; a group of 0 channels is the whole head
FORMATS = {
    "int4 G128": (("affine", 4, "channel", 128), ("affine", 4, "token", 0)),
    "int4 G32 V32": (("affine", 4, "channel", 32), ("affine", 4, "token", 32)),
    "int3 G128": (("affine", 3, "channel", 128), ("affine", 3, "token", 0)),
    "int3 G32 V64": (("affine", 3, "channel", 32), ("affine", 3, "token", 64)),
    "groups of 16": (("affine", 4, "channel", 16), ("affine", 4, "token", 16)),
    "int2 G64 V64": (("affine", 2, "channel", 64), ("affine", 2, "token", 64)),
    "int2 G32 V32": (("affine", 2, "channel", 32), ("affine", 2, "token", 32)),
    "int8 two nibbles": (("hierarchical", 8, "channel", 128), ("hierarchical", 8, "token", 0)),
    "int8": (("affine", 8, "channel", 64), ("affine", 8, "token", 32)),
    "atom int4": (("atom", 4, "token", 0), ("atom", 4, "token", 0)),
    "keys per token": (("affine", 2, "token", 32), ("affine", 2, "token", 64)),
    "int4 keys, int2 values": (("affine", 4, "channel", 32), ("affine", 2, "token", 0)),
    "int8 per token and head": (("offset", 8, "token", 0, 0, "fp32"), ("offset", 8, "token", 0, 0, "fp32")),
    "fp8": (("float", 8, "token", 0, 0, ""), ("float", 8, "token", 0, 0, "")),
    "fp8 per token and head": (("float", 8, "token", 0, 0, "fp32"), ("float", 8, "token", 0, 0, "fp32")),
    "int4 per token and head": (("folded", 4, "token", 0, 0, "fp32"), ("folded", 4, "token", 0, 0, "fp32")),
    "q8_0": (("offset", 8, "token", 32), ("offset", 8, "token", 32)),
    "q4_0": (("offset", 4, "token", 32), ("offset", 4, "token", 32)),
    "nvfp4": (("float", 4, "token", 16, 0, "e4m3"), ("float", 4, "token", 16, 0, "e4m3")),
    "iq4_nl": (("iq4_nl", 4, "token", 32), ("iq4_nl", 4, "token", 32)),
    "octave_k3v4": (("octave", 4, "token", 64), ("octave", 4, "token", 0, 0, "fp16", 1)),
    "octave_k3v3": (("octave", 4, "token", 64), ("octave", 3, "token", 0, 0, "fp16", 1)),
    "octave_k3v3_compact": (("octave", 3, "token", 0), ("octave", 3, "token", 0)),
    "nvfp4 keys, fp8 values": (("float", 4, "token", 16, 0, "e4m3"), ("float", 8, "token", 0, 0, "")),
}


def formats(name, channels=128):
    return [Format(kind, bits, axis, group or channels, *rest) for kind, bits, axis, group, *rest in FORMATS[name]]


def make(name, key_lengths, value_lengths, *, heads=2, channels=128, dtype=torch.bfloat16, scale=1.0, seed=0):
    """A layer of one packed segment and an exact tail; lengths are (packed, exact) of each row."""
    key, value = formats(name, channels)
    return layer(
        [Piece(key, [a for a, _ in key_lengths], scale), Piece(FULL, [b for _, b in key_lengths])],
        [Piece(value, [a for a, _ in value_lengths], scale), Piece(FULL, [b for _, b in value_lengths])],
        heads=heads,
        key_dim=channels,
        value_dim=channels,
        dtype=dtype,
        device="cuda",
        seed=seed,
    )


def query(work, group, count, dtype=torch.bfloat16, scale=2.0, seed=1):
    """``[B, Hq, q, D]`` as models have it: a view of ``[B, q, Hq, D]``."""
    rng = torch.Generator("cuda").manual_seed(seed)
    shape = (work.table.shape[0], count, work.heads * group, work.key_dim)
    return (torch.randn(shape, generator=rng, device="cuda") * scale).to(dtype).transpose(1, 2)


def wrong(work, q, **kwargs):
    scaling = q.shape[-1] ** -0.5
    return relative_error(cuda_decode.attend(q, work, scaling, **kwargs), dequantized_attention(q, work, scaling))


class TestBuild:
    def test_query_rows_decide_the_team(self):
        pair = (tuple(formats("int4 G128")), (FULL, FULL))
        chosen = {rows: config.build(pair, 128, rows, True, H200) for rows in (1, 4, 5, 8, 9, 20, 24, 28, 36, 72)}
        assert {rows: made.rows for rows, made in chosen.items()} == {
            1: 4, 4: 4, 5: 8, 8: 8, 9: 16, 20: 24, 24: 24, 28: 16, 36: 24, 72: 24
        }  # fmt: skip
        assert {rows for rows, made in chosen.items() if made.one_column} == {1, 4}
        assert {rows for rows, made in chosen.items() if made.shares == 2} == {20, 24, 36, 72}
        eight = (tuple(formats("int8 two nibbles")), (FULL, FULL))  # with which eight rings do not fit
        assert config.build(eight, 128, 9, True, H200).shares == 2

    def test_a_slot_holds_codes_and_parameters(self):
        # 128 tokens x 128 channels at 4 bits, and scale and minimum of 128 channels: performance notes, 4.1
        assert storage.slot_bytes(Format("affine", 4, "channel", 128), 128) == 8192 + 512
        assert storage.slot_bytes(Format("affine", 4, "token", 32), 128) == 8192 + 2 * 128 * 4 * 2

    def test_factors_are_stored_once_a_group_and_have_a_table(self):
        sizes = {"int8 per token and head": 512, "fp8": 0, "q8_0": 1024, "q4_0": 1024, "nvfp4": 1024}
        tables = {"int8 per token and head": (0, 256), "fp8": (0, 0), "q8_0": (2048, 1024), "nvfp4": (4096, 2048)}
        for name, size in sizes.items():
            form = formats(name)[0]
            assert storage.slot_bytes(form, 128, key=True) == storage.slot_bytes(form, 128) == 2048 * form.bits + size
        for name, sides in tables.items():
            form = formats(name)[0]
            assert (storage.tabulated(form, 128, key=True), storage.tabulated(form, 128)) == sides, name
        assert storage.tabulated(formats("int4 per token and head")[0], 128) == 512  # and zero points
        pair = (tuple(formats("nvfp4")), (FULL, FULL))
        chosen = config.build(pair, 128, 1, True, H200)
        assert (chosen.team, chosen.shares, chosen.teams, chosen.resident) == (1, 1, 8, 1)
        several = config.build(pair, 128, 4, True, H200)
        assert (several.team, several.shares, several.teams, several.resident) == (2, 2, 8, 1)
        assert config.build(pair, 128, 5, True, H200).team == 1  # rows that need more registers
        assert chosen.one_row and chosen.scratch == 256  # groups have columns: weights of a tile, no tables
        for tabled in (several, config.build(pair, 128, 1, True, H200, softcap=True)):
            assert not tabled.one_row and tabled.scratch == 4096 and "#define SCRATCH 4096\n" in tabled.macros()
            assert tabled.shared >= tabled.warps * 4096 + tabled.teams * tabled.stages * tabled.slot
        other = (tuple(formats("nvfp4 keys, fp8 values")), (FULL, FULL))
        assert not config.build(other, 128, 1, True, H200).one_row

    @pytest.mark.parametrize(
        ("lines", "tiles", "splits"),
        [
            (32, 257, 8),  # 7B, 32k: 256 CTAs of 264
            (256, 257, 1),
            (8, 1025, 33),
            (8, 5, 2),  # no CTA without a tile for each team
            (1536, 34, 1),  # 48 sequences of 4k: six waves; more, shorter CTAs would spend their time on beginning
            (128, 33, 2),
        ],
    )
    def test_splits_fill_the_gpu_and_no_last_wave_is_small(self, lines, tiles, splits):
        assert cuda_decode.best_splits(lines, 264, tiles, 4) == splits


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize(("group", "count"), [(1, 1), (1, 5), (4, 1), (4, 5)])
    def test_formats(self, name, group, count):
        work = make(name, [(640, 40), (384, 59)], [(640, 40), (384, 59)])
        assert wrong(work, query(work, group, count)) < 3e-3

    @pytest.mark.parametrize("name", ["int4 G32 V32", "int2 G64 V64", "int8 two nibbles", "atom int4"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_heads_of_64_channels_and_three_query_heads_each(self, name, dtype):
        work = make(name, [(256, 7)], [(256, 7)], channels=64, dtype=dtype)
        for count in (1, 2, 9):
            assert wrong(work, query(work, 3, count, dtype)) < 3e-3

    @pytest.mark.parametrize("channels", [80, 96, 256])
    @pytest.mark.parametrize(
        "name",
        ["int4 G128", "int8 two nibbles", "atom int4", "groups of 16", "nvfp4", "fp8", "int4 per token and head"],
    )
    @pytest.mark.parametrize(("group", "count"), [(1, 1), (4, 5)])
    def test_heads_of_other_sizes(self, name, group, count, channels):
        work = make(name, [(640, 40), (384, 59)], [(540, 140), (384, 59)], channels=channels)
        if (name, channels) == ("groups of 16", 256):
            assert "16 groups a token" in str(cuda_decode.refuses(query(work, group, count), work))
            return
        assert wrong(work, query(work, group, count)) < 3e-3

    @pytest.mark.parametrize("name", ["int4 G128", "int3 G128", "int8 two nibbles", "q8_0", "nvfp4"])
    @pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 9])
    def test_verification_of_several_tokens_with_grouped_queries(self, name, count):
        work = make(name, [(640, 40), (384, 59)], [(540, 140), (384, 59)])
        assert wrong(work, query(work, 4, count)) < 3e-3

    @pytest.mark.parametrize("name", ["int4 G32 V32", "int2 G32 V32", "int8 two nibbles", "keys per token", "q4_0"])
    def test_keys_and_values_that_change_format_at_different_tokens(self, name):
        work = make(name, [(640, 37), (384, 59)], [(540, 137), (425, 18)])
        assert len(work.phases) == 4
        for count in (1, 5):
            assert wrong(work, query(work, 4, count)) < 3e-3

    def test_three_tiers_of_rows_with_different_mixes(self):
        two, four = formats("int2 G32 V32"), formats("int4 G32 V32")
        lengths = [[640, 0, 32], [96, 1024, 0], [41, 9, 300]]
        work = layer(
            [Piece(two[0], lengths[0]), Piece(four[0], lengths[1]), Piece(FULL, lengths[2])],
            [Piece(two[1], lengths[0]), Piece(four[1], lengths[1]), Piece(FULL, lengths[2])],
            heads=2,
            key_dim=128,
            value_dim=128,
            dtype=torch.bfloat16,
            device="cuda",
        )
        assert wrong(work, query(work, 1, 1)) < 3e-3

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        packed=st.lists(st.integers(0, 40), min_size=1, max_size=4),
        tail=st.integers(1, 300),
        later=st.integers(0, 200),
        splits=st.one_of(st.none(), st.integers(1, 20)),
        seed=st.integers(0, 99),
    )
    def test_any_lengths(self, packed, tail, later, splits, seed):
        keys = [(32 * n, tail + later) for n in packed]
        values = [(32 * n + later, tail) for n in packed]
        work = make("int4 G32 V32", keys, values, heads=1, seed=seed)
        assert wrong(work, query(work, 1, 1, seed=seed), splits=splits) < 3e-3

    @pytest.mark.parametrize(("size", "scale"), [(1e3, 1.0), (1e-3, 1.0), (2.0, 1e4), (300.0, 300.0), (2.0, 1e-4)])
    @pytest.mark.parametrize(
        "name",
        ["int4 G128", "int2 G32 V32", "int8 two nibbles", "keys per token", "int8 per token and head", "q4_0"],
    )
    def test_ranges(self, name, size, scale):
        work = make(name, [(512, 33)], [(512, 33)], scale=1.0)
        key, value = work.phases[0]
        key.params[0][..., 5 % key.params[0].shape[-1]] *= min(
            scale, 3e4
        )  # one channel, or one group, far off the rest
        value.params[0].mul_(scale)
        q = query(work, 1, 1, scale=size)
        out = cuda_decode.attend(q, work, 128**-0.5)
        assert bool(torch.isfinite(out).all())
        wanted = dequantized_attention(q, work, 128**-0.5)
        rounding = relative_error(wanted.to(out.dtype), wanted)  # of the output alone: bf16 has eight bits
        assert relative_error(out, wanted) < 3e-3 + rounding

    def test_constant_groups(self):
        work = make("int4 G128", [(512, 5)], [(512, 5)])
        for part in work.phases[0]:
            part.params[0].zero_()
        assert wrong(work, query(work, 1, 1)) < 3e-3

    @pytest.mark.parametrize("name", ["int4 G128", "int2 G32 V32", "int8 two nibbles", "q4_0", "nvfp4"])
    @pytest.mark.parametrize(("tokens", "splits"), [(65536, 1), (262144, 4), (262144, None)])
    def test_long_splits_do_not_drift(self, name, tokens, splits):
        work = make(name, [(tokens, 3)], [(tokens, 3)], heads=1)
        assert wrong(work, query(work, 1, 1), splits=splits) < 3e-3

    def test_a_captured_graph_follows_the_table(self):
        work = make("int4 G32 V32", [(1024, 64)], [(1024, 64)])
        q = query(work, 1, 1)
        cuda_decode.attend(q, work, 0.1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cuda_decode.attend(q, work, 0.1)
        for packed, tail in ((1024, 64), (512, 1), (96, 20)):
            work.counts = [[(0, 0, packed), (0, 0, tail)]]
            work.table.copy_(torch.tensor(work.counts, dtype=torch.int32))
            graph.replay()
            assert relative_error(out, dequantized_attention(q, work, 0.1)) < 3e-3

    def test_what_it_cannot_serve_it_says(self):
        work = make("int4 G128", [(128, 5)], [(128, 5)])
        assert cuda_decode.refuses(query(work, 1, 1), work) is None
        assert "float32" in cuda_decode.refuses(query(work, 1, 1, torch.float32), work)
        assert "but keys in bfloat16" in cuda_decode.refuses(query(work, 1, 1, torch.float16), work)


def test_layers_that_its_addresses_do_not_reach_are_refused(monkeypatch):
    monkeypatch.setattr(cuda_decode, "available", lambda: None)
    monkeypatch.setattr(cuda_decode, "cuda_problem", lambda *asked: None)  # there is nothing to compile for
    pieces = [[Piece(Format("affine", 4, axis, 64), [300]), Piece(FULL, [5])] for axis in ("channel", "token")]
    work = layer(*pieces, heads=2, key_dim=64, value_dim=64)
    q = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    assert cuda_decode.refuses(q, work) is None
    assert "65535" in cuda_decode.refuses(q.expand(40000, -1, -1, -1), work)
    key = work.phases[0][0]
    key.params = [param[:, :, :-2] for param in key.params]  # a window of 256 tokens, cut by the buffer's end
    assert "end within a tile" in cuda_decode.refuses(q, work)


def test_a_kernel_that_cannot_be_compiled_is_a_reason(monkeypatch):
    def fail(*asked):
        raise RuntimeError("nvrtc could not compile the decode kernel\nmore")

    monkeypatch.setattr(cuda_decode, "available", lambda: None)
    monkeypatch.setattr(cuda_decode, "cuda_kernel", fail)
    cuda_decode.cuda_problem.cache_clear()
    work = layer([Piece(FULL, [5])], [Piece(FULL, [5])], heads=1, key_dim=64, value_dim=64)
    reason = cuda_decode.refuses(torch.zeros(1, 1, 1, 64, dtype=torch.float16), work)
    cuda_decode.cuda_problem.cache_clear()
    assert reason == "not compiled: nvrtc could not compile the decode kernel"
