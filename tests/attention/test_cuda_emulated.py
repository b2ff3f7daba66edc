"""The CUDA decode kernel on a CPU, by emulation of its instructions, against attention in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.attention.cuda.config import Build, build, shared_memory
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error
from tests.attention.emulated import attend

BF16, FP16 = torch.bfloat16, torch.float16


#: `make test-slow`: a compiler for each build, two seconds
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "bits", "axis", "groups", "dims", "rows", "changes", "dtype"),
    [
        # group of keys, of values; channels; query heads, new tokens; warps and what they share
        pytest.param("affine", 4, "channel", (128, 128), 128, (1, 1), {"one_column": True}, BF16, id="one row"),
        pytest.param(
            *("affine", 2, "channel", (32, 64), 128, (1, 1)),
            {"one_column": True, "integer": True},
            BF16,
            id="integers, groups of 32 and 64",
        ),
        pytest.param(
            *("affine", 2, "channel", (64, 128), 128, (1, 1)),
            {"one_column": True, "integer": True, "stages": 3},
            FP16,
            id="integers, groups of 64 and 128",
            marks=SLOW,
        ),
        pytest.param(
            *("affine", 2, "channel", (128, 16), 64, (1, 1)),
            {"one_column": True, "integer": True},
            BF16,
            id="integers, 64 channels, groups of 128 and 16",
            marks=SLOW,
        ),
        pytest.param(
            *("affine", 3, "channel", (32, 64), 128, (1, 5)),
            {"stages": 3},
            BF16,
            id="3 bits, rings of three slots",
            marks=SLOW,
        ),
        pytest.param(
            "window 42", 2, "channel", (42, 64), 128, (1, 1), {"one_column": True}, BF16, id="W 42, one row", marks=SLOW
        ),
        pytest.param(
            *("window 85", 4, "channel", (43, 64), 64, (2, 3)),
            {"team": 2, "shares": 2, "blocks": 3},
            FP16,
            id="W 85, six rows, groups of 43 and 42",
        ),
        pytest.param(
            "window 30",
            2,
            "channel",
            (30, 32),
            64,
            (1, 2),
            {"blocks": 2},
            BF16,
            id="W 30, five groups a tile",
            marks=SLOW,
        ),
        pytest.param(
            *("hierarchical", 8, "channel", (128, 128), 128, (4, 5)),
            {"team": 2, "shares": 2, "blocks": 3},
            BF16,
            id="20 rows of two nibbles",
        ),
        pytest.param(
            *("affine", 2, "token", (32, 64), 64, (3, 4)),
            {"blocks": 2},
            FP16,
            id="keys per token, two blocks a warp",
            marks=SLOW,
        ),
        pytest.param(
            *("affine", 3, "channel", (64, 32), 64, (4, 8)),
            {"team": 4, "shares": 2, "blocks": 2, "teams": 1},
            FP16,
            id="3 bits, 32 rows, four warps a tile",
            marks=SLOW,
        ),
        pytest.param(
            *("atom", 2, "token", (64, 64), 64, (5, 4)),
            {"team": 2, "shares": 2, "blocks": 3},
            BF16,
            id="atom, 20 rows",
            marks=SLOW,
        ),
        pytest.param(
            "affine",
            3,
            "channel",
            (32, 32),
            96,
            (1, 2),
            {"one_column": True},
            BF16,
            id="96 channels, 3 bits",
            marks=SLOW,
        ),
        pytest.param(
            *("hierarchical", 8, "channel", (64, 80), 80, (4, 5)),
            {"team": 3},
            BF16,
            id="80 channels, two nibbles",
            marks=SLOW,
        ),
        pytest.param(
            *("affine", 4, "channel", (16, 32), 256, (1, 5)),
            {"teams": 1},
            FP16,
            id="256 channels, groups of 16",
            marks=SLOW,
        ),
        pytest.param(
            *("levels_read", 4, "token", (64, 64), 64, (1, 1)), {"one_column": True}, BF16, id="levels of 4 bits"
        ),
        pytest.param(
            *("levels", 3, "token", (128, 128), 128, (4, 1)),
            {"one_column": True},
            FP16,
            id="levels of 3 bits",
            marks=SLOW,
        ),
        pytest.param(
            *("levels_read", 3, "token", (64, 64), 64, (8, 3)),
            {"team": 2, "shares": 2, "blocks": 3},
            BF16,
            id="levels of 3 bits, 24 rows, lengths in accumulators of their own",
            marks=SLOW,
        ),
    ],
)
def test_formats_and_warps(
    kind: str,
    bits: int,
    axis: str,
    groups: tuple[int, int],
    dims: int,
    rows: tuple[int, int],
    changes: dict[str, int],
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    """Keys change format 60 tokens before values; two CTAs share a head's tokens, which end within a tile."""
    kind, _, window = kind.partition(" ")
    kind = "affine" if window else kind
    key = Format(kind, bits, axis, groups[0], int(window or 0))
    value = Format("affine" if "levels" in kind else kind, bits, "token", groups[1])
    work = layer(
        [Piece(key, [320]), Piece(FULL, [11])],
        [Piece(value, [260]), Piece(FULL, [71])],
        heads=1,
        key_dim=dims,
        value_dim=dims,
        dtype=dtype,
    )
    heads, count = rows
    rng = torch.Generator().manual_seed(1)
    query = (torch.randn(1, count, heads, dims, generator=rng) * 2).to(dtype).transpose(1, 2)
    chosen = {"team": 1, "one_column": False, "teams": 2, "stages": 2, "resident": 1, **changes}
    config = Build(dims, bf16=dtype == BF16, phases=work.signature(), **chosen)
    out = attend(config, query, work, dims**-0.5, 2, tmp_path)
    assert relative_error(out, dequantized_attention(query, work, dims**-0.5)) < 3e-3


OFFSET8, OFFSET4 = Format("offset", 8, "token", 32), Format("offset", 4, "token", 32)
E2M1 = Format("float", 4, "token", 16, 0, "e4m3")


IQ4_NL = Format("iq4_nl", 4, "token", 32)


def octave(bits: int, group: int, padding: int = 0) -> Format:
    """One side of an octave format."""
    return Format("octave", bits, "token", group, padding=padding)


def whole(kind: str, bits: int, channels: int, scale: str = "fp32") -> Format:
    """A format with a factor for each token and head."""
    return Format(kind, bits, "token", channels, 0, scale)


@pytest.mark.parametrize(
    ("key", "value", "dims", "rows", "changes", "dtype"),
    [
        pytest.param(OFFSET4, E2M1, 64, (1, 1), {"one_column": True}, FP16, id="q4_0, nvfp4", marks=SLOW),
        pytest.param(
            *(E2M1, OFFSET8, 128, (4, 5), {"team": 2, "shares": 2, "blocks": 3}, BF16), id="nvfp4, q8_0", marks=SLOW
        ),
        pytest.param(E2M1, OFFSET4, 96, (1, 2), {"one_column": True}, BF16, id="96 channels", marks=SLOW),
        pytest.param(OFFSET8, E2M1, 256, (1, 5), {"teams": 1}, FP16, id="256 channels", marks=SLOW),
        pytest.param(
            *(whole("offset", 8, 80), whole("folded", 4, 80), 80, (4, 3), {"team": 2}, BF16),
            id="int8, int4, 80 channels",
            marks=SLOW,
        ),
        pytest.param(
            *(whole("folded", 4, 128), whole("float", 8, 128), 128, (2, 6), {"blocks": 2}, FP16),
            id="int4, fp8 with scales",
            marks=SLOW,
        ),
        pytest.param(
            *(whole("float", 8, 64, ""), whole("offset", 8, 64), 64, (5, 4)),
            {"team": 2, "shares": 2, "blocks": 3},
            BF16,
            id="fp8, int8",
            marks=SLOW,
        ),
        pytest.param(IQ4_NL, IQ4_NL, 64, (1, 1), {"one_column": True}, FP16, id="iq4_nl"),
        pytest.param(
            *(IQ4_NL, E2M1, 128, (4, 5), {"team": 2, "shares": 2, "blocks": 3}, BF16),
            id="iq4_nl, nvfp4, 20 rows",
            marks=SLOW,
        ),
        pytest.param(
            *(octave(4, 64), octave(4, 128, 1), 128, (4, 1), {"team": 2, "shares": 2, "one_column": True}, FP16),
            id="octave_k3v4, 2 values and 1 unused a token",
        ),
        pytest.param(
            *(octave(4, 64), octave(4, 64, 2), 64, (1, 1), {"one_column": True}, BF16),
            id="octave_k3v4, 64 channels, 2 unused a token",
            marks=SLOW,
        ),
        pytest.param(
            *(octave(4, 64), octave(3, 128, 1), 128, (1, 1), {"one_column": True}, FP16),
            id="octave_k3v3",
            marks=SLOW,
        ),
        pytest.param(
            *(octave(3, 64), octave(3, 64), 64, (8, 3), {"team": 2, "shares": 2, "blocks": 3}, FP16),
            id="octave_k3v3_compact, 24 rows",
        ),
        pytest.param(
            *(octave(3, 64), octave(4, 256, 3), 256, (1, 5), {"teams": 1}, FP16),
            id="octave_k3v4 without RoPE, 256 channels, 3 unused a token",
            marks=SLOW,
        ),
    ],
)
def test_factors_and_elements(
    key: Format,
    value: Format,
    dims: int,
    rows: tuple[int, int],
    changes: dict[str, int],
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    """Kinds whose values are a factor of their group times an element of their code."""
    work = layer(
        [Piece(key, [320]), Piece(FULL, [11])],
        [Piece(value, [260]), Piece(FULL, [71])],
        heads=1,
        key_dim=dims,
        value_dim=dims,
        dtype=dtype,
    )
    heads, count = rows
    rng = torch.Generator().manual_seed(1)
    query = (torch.randn(1, count, heads, dims, generator=rng) * 2).to(dtype).transpose(1, 2)
    chosen = {"team": 1, "one_column": False, "teams": 2, "stages": 2, "resident": 1, **changes}
    config = Build(dims, bf16=dtype == BF16, phases=work.signature(), **chosen)
    out = attend(config, query, work, dims**-0.5, 2, tmp_path)
    assert relative_error(out, dequantized_attention(query, work, dims**-0.5)) < (5e-4 if dtype == FP16 else 3e-3)


@pytest.mark.parametrize("factor", [pytest.param(50000.0, marks=SLOW), 2.0**-24])
def test_largest_and_smallest_factors_of_values(factor: float, tmp_path: Path) -> None:
    """fp16 holds 2^-15 and 2^-24 as subnormal numbers only."""
    work = layer(
        [Piece(OFFSET4, [192]), Piece(FULL, [1])],
        [Piece(OFFSET4, [192]), Piece(FULL, [1], scale=factor)],
        heads=1,
        key_dim=64,
        value_dim=64,
        dtype=BF16,
    )
    work.phases[0][1].params[0].copy_(work.phases[0][1].params[0].sign() * factor)
    query = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    config = build(work.signature(), 64, 1, True, shared_memory((9, 0)), (("teams", 1),))
    out, wanted = attend(config, query, work, 0.125, 1, tmp_path), dequantized_attention(query, work, 0.125)
    assert relative_error(out, wanted) < 3e-3


@pytest.mark.parametrize(
    ("window", "groups", "channels", "dtype"),
    [
        pytest.param(42, (42, 64), 128, BF16, marks=SLOW),
        pytest.param(200, (50, 128), 128, BF16, marks=SLOW),
        (150, (150, 32), 64, FP16),  # two groups a tile
    ],
)
@pytest.mark.slow  # 3 s
def test_windows_as_integers(
    window: int, groups: tuple[int, int], channels: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    key, value = Format("affine", 2, "channel", groups[0], window), Format("affine", 2, "token", groups[1])
    sides = [[Piece(form, [420]), Piece(FULL, [11])] for form in (key, value)]
    work = layer(*sides, heads=1, key_dim=channels, value_dim=channels, dtype=dtype)
    rng = torch.Generator().manual_seed(1)
    query = (torch.randn(1, 1, 1, channels, generator=rng) * 2).to(dtype)
    tuning = (("teams", 2), ("integer", 1))
    config = build(work.signature(), channels, 1, dtype == BF16, shared_memory((9, 0)), tuning)
    out = attend(config, query, work, channels**-0.5, 2, tmp_path)
    assert relative_error(out, dequantized_attention(query, work, channels**-0.5)) < 3e-3


@pytest.mark.parametrize("group", [32, 64])
@SLOW
def test_integers_of_a_channel_ten_thousand_times_the_others(group: int, tmp_path: Path) -> None:
    """Sixteen bits of the largest would leave three of the others, which decide between tokens."""
    sides = [[Piece(Format("affine", 2, axis, group), [160]), Piece(FULL, [11])] for axis in ("channel", "token")]
    work = layer(*sides, heads=1, key_dim=64, value_dim=64, dtype=BF16)
    work.phases[0][0].params[0][..., 5] *= 1e4
    query = (torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1)) * 2).to(BF16)
    config = build(work.signature(), 64, 1, True, shared_memory((9, 0)), (("teams", 1),))
    out, wanted = attend(config, query, work, 0.125, 2, tmp_path), dequantized_attention(query, work, 0.125)
    assert config.integer and relative_error(out, wanted) < 1e-3 + relative_error(wanted.to(BF16), wanted)
