"""Softcap and attention sinks with factored kinds, levels and cross factors in the CUDA kernel, emulated on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.attention.cuda import decode
from kvbench.attention.cuda.config import build, shared_memory
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error
from tests.attention.emulated import attend

SLOW = pytest.mark.slow  # a compiler for each build, two seconds
FOLDED = Format("folded", 4, "token", 64, 0, "fp32")
E2M1 = Format("float", 4, "token", 16, 0, "e4m3")
E4M3 = Format("float", 8, "token", 64, 0, "")
LEVELS3, AFFINE3 = Format("levels_read", 3, "token", 64), Format("affine", 3, "token", 64)


@pytest.mark.parametrize(
    ("key", "value", "rows"),
    [
        # formats of keys and values; query heads, new tokens
        pytest.param(FOLDED, E4M3, (4, 3), id="int4 per token and head, fp8"),
        pytest.param(E2M1, FOLDED, (2, 1), id="nvfp4, int4 per token and head", marks=SLOW),
        pytest.param(
            Format("levels_read", 4, "token", 64), Format("affine", 4, "token", 64), (2, 5), id="levels", marks=SLOW
        ),
        pytest.param(LEVELS3, AFFINE3, (1, 1), id="levels of 3 bits as bytes, one row", marks=SLOW),
        pytest.param(LEVELS3, AFFINE3, (2, 2), id="levels of 3 bits as bytes, four rows", marks=SLOW),
        pytest.param(
            Format("cross", 4, "channel", 128), Format("cross", 2, "token", 64), (2, 5), id="cross", marks=SLOW
        ),
    ],
)
def test_a_softcap_and_sinks(key: Format, value: Format, rows: tuple[int, int], tmp_path: Path) -> None:
    work = layer(
        [Piece(key, [192]), Piece(FULL, [11])],
        [Piece(value, [192]), Piece(FULL, [11])],
        heads=1,
        key_dim=64,
        value_dim=64,
        dtype=torch.bfloat16,
    )
    heads, count = rows
    rng = torch.Generator().manual_seed(1)
    work = replace(work, logits=Logits(softcap=2.0, sinks=torch.randn(heads, generator=rng)))
    query = (torch.randn(1, heads, count, 64, generator=rng) * 2).to(torch.bfloat16)
    extra = decode.extras(query, work)
    config = build(work.signature(), 64, heads * count, True, shared_memory((9, 0)), (("teams", 2),), *extra)
    out = attend(config, query, work, 0.125, 2, tmp_path)
    assert relative_error(out, dequantized_attention(query, work, 0.125)) < 3e-3
