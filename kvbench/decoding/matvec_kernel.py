"""Product of a matrix and a vector that reads the matrix as fast as the memory gives it (Triton)."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x, weight, out, rows, stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``out[n] = sum_k weight[n, k] x[k]``, summed in fp32; a program takes ROWS rows.

    Args:
        x: ``[K]``. weight: ``[rows, K]`` with `stride` elements from row to row. out: ``[rows]``.
        BLOCK: columns that are asked for at once. WHOLE: BLOCK divides K. EXACT: ROWS divides rows.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    begin = weight + row.to(tl.int64)[:, None] * stride + column[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    # unrolled: all that a program reads is under way before the first number is here
    for first in tl.static_range(0, K, BLOCK):
        if WHOLE and EXACT:
            w = tl.load(begin + first, eviction_policy="evict_first")
        else:
            there = (first + column < K)[None, :] & (row < rows)[:, None]
            w = tl.load(begin + first, mask=there, other=0.0, eviction_policy="evict_first")
        v = tl.load(x + first + column, mask=first + column < K, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    y = tl.sum(total, 1).to(out.dtype.element_ty)
    tl.store(out + row, y, mask=row < rows)
