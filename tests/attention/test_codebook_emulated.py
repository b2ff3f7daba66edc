"""The CUDA kernel for a codebook's codes on a CPU, by emulation of its instructions, against attention in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.attention.codebook.decode import configured
from kvbench.attention.logits import Logits
from kvbench.attention.synthetic import relative_error
from tests.attention.codebook_support import layer
from tests.attention.emulated import attend_looked_up

BF16, FP16 = torch.bfloat16, torch.float16
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("bits", "heads", "group", "channels", "lengths", "starts", "outliers", "splits", "dtype"),
    [
        pytest.param(3, 2, 1, 128, [(0, 290, 0)], [0], 0.02, 3, BF16, id="3 bits, three CTAs a head"),
        pytest.param(
            3, 2, 4, 64, [(3, 140, 2), (0, 5, 0)], [7, 300], 0.05, 1, FP16, id="3 bits, four rows, sinks, a tail"
        ),
        pytest.param(2, 2, 1, 64, [(0, 290, 3)], [0], 0.02, 2, FP16, id="2 bits, one row, two CTAs"),
        pytest.param(4, 2, 1, 64, [(3, 290, 2), (0, 5, 0)], [7, 300], 0.05, 1, BF16, id="4 bits, one row, a short one"),
        pytest.param(4, 2, 3, 128, [(0, 300, 3)], [0], 0.02, 2, BF16, id="4 bits, three rows", marks=SLOW),
        pytest.param(2, 3, 2, 64, [(2, 300, 0)], [0], 0.0, 1, FP16, id="2 bits, no outliers", marks=SLOW),
        pytest.param(4, 3, 8, 64, [(2, 140, 40)], [1000], 0.9, 1, FP16, id="nearly all are outliers", marks=SLOW),
        pytest.param(2, 2, 11, 64, [(0, 200, 0)], [0], 0.02, 1, FP16, id="rows for two blocks", marks=SLOW),
    ],
)
def test_output_is_that_of_attention_in_fp32(
    bits, heads, group, channels, lengths, starts, outliers, splits, dtype, tmp_path: Path
):
    at = layer(lengths, bits=bits, heads=heads, channels=channels, outliers=outliers, dtype=dtype, starts=starts)
    query = queries(len(lengths), heads * group, channels, dtype)
    config = replace(configured(query, at.work), warps=2)
    out = attend_looked_up(config, query, at.work, channels**-0.5, splits, tmp_path)
    assert relative_error(out, at.exact(query, channels**-0.5)) < (3e-3 if dtype == FP16 else 4.5e-3)


@SLOW
def test_keys_after_rope_with_a_softcap_and_attention_sinks(tmp_path: Path):
    at = layer([(2, 200, 0)], bits=3, heads=2, outliers=0.02, rotate=False)
    at.work.logits = Logits(softcap=5.0, sinks=torch.randn(4).half())
    query = queries(1, 4, 64, FP16)
    config = replace(configured(query, at.work), warps=1)
    out = attend_looked_up(config, query, at.work, 0.2, 2, tmp_path)
    assert relative_error(out, at.exact(query, 0.2, at.work.logits)) < 3e-3


def queries(batch: int, heads: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(batch, heads, 1, channels, generator=torch.Generator().manual_seed(1)) * 1.5).to(dtype)
