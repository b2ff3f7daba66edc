"""On a GPU: the Triton kernel that visits runs where they stand, compiled, and replayed while its last run grows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvbench.attention.phases import Format, Work
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 4.5e-3}
FORMATS = {bits: (Format("affine", bits, "channel", 32), Format("affine", bits, "token", 64)) for bits in (2, 4)}
FORMATS[16] = (FULL, FULL)


def kernel() -> Any:
    in_place = pytest.importorskip("kvbench.attention.triton.in_place")
    if in_place.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1: this process interprets kernels on the CPU")
    return in_place


def runs(chunks: int, heads: int, dtype: torch.dtype, batch: int = 1) -> Work:
    """Return a layer of chunks of 32 tokens in mixed widths, each run of one width a segment of its own."""
    drawn = random.Random(chunks)
    widths = [drawn.choice((2, 2, 2, 4, 16)) for _ in range(chunks)]
    joined: list[list[int]] = []
    for width in widths:
        if joined and joined[-1][0] == width:
            joined[-1][1] += 32
        else:
            joined.append([width, 32])
    joined.append([16, 77])
    sides = ([Piece(FORMATS[width][side], [count] * batch, room=40) for width, count in joined] for side in (0, 1))
    return layer(*sides, heads=heads, key_dim=128, value_dim=128, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "group", "count"), [(8, 1, 1), (2, 4, 1), (2, 4, 3)])
def test_runs_in_place(heads: int, group: int, count: int, dtype: torch.dtype) -> None:
    in_place, work = kernel(), runs(60, heads, dtype, batch=2)
    query = torch.randn(2, heads * group, count, 128, device="cuda").to(dtype)
    assert in_place.refuses(query, work) is None
    out = in_place.attend(query, work, 128**-0.5)
    assert relative_error(out, dequantized_attention(query, work, 128**-0.5)) < TOLERANCE[dtype]


def test_a_replayed_launch_sees_the_tokens_that_came_since() -> None:
    """The table of phases is in device memory; hundreds of runs."""
    in_place, work = kernel(), runs(300, 4, torch.float16)
    query = torch.randn(1, 4, 1, 128, device="cuda").half()
    for key, value in work.phases[-1:]:
        for part in (key, value):
            assert part.buffer is not None
            part.buffer.nan_to_num_(0.25)
    assert in_place.refuses(query, work) is None
    in_place.attend(query, work, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = in_place.attend(query, work, 0.1)
    for _ in range(3):
        graph.replay()
        assert relative_error(out, dequantized_attention(query, work, 0.1)) < TOLERANCE[torch.float16]
        work.table[:, -1, 2] += 1
        work.counts = [[*row[:-1], (*row[-1][:2], row[-1][2] + 1)] for row in work.counts]
