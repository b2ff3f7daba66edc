"""The CUDA decode kernel for one query row over e2m1 codes, on a CPU: emulated, against attention in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.attention.cuda.config import Build
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error
from tests.attention.emulated import attend

BF16, FP16 = torch.bfloat16, torch.float16
OFFSET4, E2M1 = Format("offset", 4, "token", 32), Format("float", 4, "token", 16, 0, "e4m3")
#: `make test-slow`: a compiler for each build, two seconds
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("dims", "changes", "dtype"),
    [
        pytest.param(64, {"team": 2, "shares": 2, "teams": 1}, FP16, id="64 channels"),
        pytest.param(128, {"team": 1}, BF16, id="one warp a tile", marks=SLOW),
        pytest.param(128, {"team": 2, "shares": 2, "stages": 3}, FP16, id="two warps a tile", marks=SLOW),
    ],
)
def test_groups_have_columns(dims: int, changes: dict[str, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """Between phases whose groups have none: keys of another kind, and values in full precision."""
    work = layer(
        [Piece(OFFSET4, [256]), Piece(E2M1, [300]), Piece(FULL, [11])],
        [Piece(E2M1, [500]), Piece(FULL, [67])],
        heads=1,
        key_dim=dims,
        value_dim=dims,
        dtype=dtype,
    )
    assert len(work.phases) == 4
    query = (torch.randn(1, 1, 1, dims, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    chosen = {"one_column": True, "one_row": True, "teams": 2, "stages": 2, "resident": 1, **changes}
    config = Build(dims, bf16=dtype == BF16, phases=work.signature(), **chosen)
    out = attend(config, query, work, dims**-0.5, 1, tmp_path)
    assert relative_error(out, dequantized_attention(query, work, dims**-0.5)) < (5e-4 if dtype == FP16 else 3e-3)
