"""KVarN's cross factors in the CUDA decode kernel, emulated on a CPU, against attention in fp32."""

from pathlib import Path

import pytest
import torch

from kvbench.attention.cuda.config import build, shared_memory
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error
from tests.attention.emulated import attend

BF16, FP16 = torch.bfloat16, torch.float16
SLOW = pytest.mark.slow  # a compiler for each build, two seconds


@pytest.mark.parametrize(
    ("bits", "tile", "channels", "rows", "step", "dtype"),
    [
        # bits of keys, of values; query heads, new tokens; size of a step between codes of values
        ((4, 2), 64, 64, (1, 1), 40.0, FP16),
        pytest.param((4, 2), 128, 128, (1, 1), 1.0, BF16, marks=SLOW),
        pytest.param((4, 4), 64, 64, (4, 5), 40.0, FP16, marks=SLOW),
        pytest.param((4, 4), 128, 128, (1, 1), 40.0, FP16, marks=SLOW),
        pytest.param((4, 2), 64, 128, (1, 1), 1.0, BF16, marks=SLOW),
        pytest.param((2, 4), 64, 128, (2, 8), 1.0, BF16, marks=SLOW),
        pytest.param((3, 3), 64, 64, (3, 1), 1.0, FP16, marks=SLOW),
        pytest.param((8, 8), 64, 128, (1, 1), 1.0, FP16, marks=SLOW),
        pytest.param((8, 2), 128, 80, (4, 5), 1.0, BF16, marks=SLOW),
    ],
)
def test_factors_of_tokens_and_channels(
    bits: tuple[int, int],
    tile: int,
    channels: int,
    rows: tuple[int, int],
    step: float,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    """Exact tokens come before and after; two CTAs share the tokens, of which the last tile is incomplete."""
    key, value = Format("cross", bits[0], "channel", tile), Format("cross", bits[1], "token", channels)
    work = layer(
        [Piece(FULL, [5]), Piece(key, [320]), Piece(FULL, [11])],
        [Piece(FULL, [5]), Piece(value, [320], scale=step, tile=tile), Piece(FULL, [11])],
        heads=1,
        key_dim=channels,
        value_dim=channels,
        dtype=dtype,
    )
    heads, count = rows
    query = torch.randn(1, heads, count, channels, generator=torch.Generator().manual_seed(1)).to(dtype)
    scaling = channels**-0.5
    config = build(work.signature(), channels, heads * count, dtype == BF16, shared_memory((9, 0)), (("teams", 2),))
    assert not config.integer
    out = attend(config, query, work, scaling, 2, tmp_path)
    assert relative_error(out, dequantized_attention(query, work, scaling)) < 3e-3
