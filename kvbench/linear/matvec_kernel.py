"""A Triton kernel for matrix-vector products that reads the matrix at close to memory bandwidth."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_block_product(
    total, x, begin, first, column, row, rows, K: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Multiply one block of columns of the matrix by the vector, and return `total` plus the products.

    Products are not yet summed over columns: the result has the shape of `total`. WHOLE and EXACT are as for
    :func:`matvec_product`.

    Args:
        total: sums so far, fp32 ``[ROWS, BLOCK]``.
        begin: addresses of the elements of the matrix's first block for this program, ``[ROWS, BLOCK]``.
        first: index of the first column of the block to multiply.
        column: the numbers 0 to BLOCK - 1; the block consists of the columns ``first + column``.
        row: indices of the rows that this program computes.
        rows: number of rows of the matrix.
    """
    if WHOLE and EXACT:
        w = tl.load(begin + first, eviction_policy="evict_first")
    else:
        there = (first + column < K)[None, :] & (row < rows)[:, None]
        w = tl.load(begin + first, mask=there, other=0.0, eviction_policy="evict_first")
    v = tl.load(x + first + column, mask=first + column < K, other=0.0)
    return total + w.to(tl.float32) * v.to(tl.float32)[None, :]


@triton.jit
def matvec_product(
    x, weight, bias, out, rows, stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
    BIAS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute ``out[n] = sum_k weight[n, k] x[k] + bias[n]``, summed in fp32; a program computes ROWS elements.

    Args:
        x: the vector, ``[K]``.
        weight: the matrix, ``[rows, K]``.
        bias: the bias, ``[rows]``; read only if `BIAS` is True.
        out: the result, ``[rows]``.
        stride: distance between rows of `weight`, in elements.
        BLOCK: number of columns that a program reads at a time.
        WHOLE: True if BLOCK divides K, so that no columns need masking.
        EXACT: True if ROWS divides `rows`, so that no rows need masking.
        UNROLL: True to unroll the loop over columns, so that a program requests all its data before it sums.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    begin = weight + row.to(tl.int64)[:, None] * stride + column[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if UNROLL:
        for first in tl.static_range(0, K, BLOCK):
            total = add_block_product(total, x, begin, first, column, row, rows, K, WHOLE, EXACT)
    else:
        for first in range(0, K, BLOCK):
            total = add_block_product(total, x, begin, first, column, row, rows, K, WHOLE, EXACT)
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row < rows)
