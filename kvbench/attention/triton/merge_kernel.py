"""Writing partial attention results and merging them by log-sum-exp (flash decoding's second step).

A program writes, for each query row, the largest score ``top``, the sum ``total`` of the weights 2**(score - top), and
the weighted values ``acc``. Shapes and parameters as in :mod:`~kvbench.attention.triton.decode_kernel`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

#: maximum before any token: finite, so that the difference of two such maxima is 0 and not NaN
NOTHING = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_of(
    out_ptr, sequence, head, row, heads, GROUP: tl.constexpr, NEW_TOKENS: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Return a pointer to the output of one query row in a tensor ``[B, q, Hq, Dv]``.

    Args:
        row: index of the query row within the KV head: ``query head within the group * NEW_TOKENS + new token``.
    """
    return (
        out_ptr
        + ((sequence * NEW_TOKENS + row % NEW_TOKENS) * (heads * GROUP) + head * GROUP + row // NEW_TOKENS).to(tl.int64)
        * VALUE_DIM
    )


@triton.jit
def clamped(x, LIMIT: tl.constexpr):
    """Clamp a block to ``LIMIT``, the largest number of the output's dtype, so that converting yields no infinities."""
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def write_part(stat_ptr, acc_ptr, index, top, total, acc, valid, BLOCK_ROWS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Store one program's partial result in device memory, for a later merge.

    Args:
        stat_ptr: pointer to the buffer of maxima and sums: fp32 ``[all partial results, 2, R]``.
        acc_ptr: pointer to the buffer of weighted values: fp32 ``[all partial results, R, Dv]``.
        index: number of this partial result in both buffers.
        acc: weighted values, not divided by the sum of the weights, ``[Dv, R]``.
    """
    # sums stay unnormalised: the division is done once, after the merge
    row = tl.arange(0, BLOCK_ROWS)
    stat = stat_ptr + index * (2 * BLOCK_ROWS)
    tl.store(stat + row, top)
    tl.store(stat + BLOCK_ROWS + row, total)
    at = index * (BLOCK_ROWS * VALUE_DIM) + row[None, :] * VALUE_DIM + tl.arange(0, VALUE_DIM)[:, None]
    tl.store(acc_ptr + at, acc, mask=valid[None, :])


@triton.jit
def sink_of(sinks_ptr, head, row, valid, GROUP: tl.constexpr, NEW_TOKENS: tl.constexpr, SINKS: tl.constexpr):
    """Load the attention sinks of some query rows of a KV head, as base-2 logarithms (multiplied by log2(e)).

    Args:
        row: indices of query rows within the KV head, a vector or a scalar.
        SINKS: True if the model has sinks; otherwise the result is 0.
    """
    if SINKS:
        sink = tl.load(sinks_ptr + head * GROUP + row // NEW_TOKENS, mask=valid, other=0.0).to(tl.float32) * LOG2E
    else:
        sink = 0.0
    return sink


@triton.jit
def merge_row(
    stat_ptr, acc_ptr, index, parts, row, sink, BLOCK_ROWS: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query row, and return its output ``[Dv]``.

    Args:
        index: index of the row's first partial result in both buffers.
        row: index of the query row within its block of R rows.
        CHUNK: number of partial results to load at a time.
    """
    top = NOTHING
    total = 0.0
    acc = tl.zeros((VALUE_DIM,), tl.float32)
    d = tl.arange(0, VALUE_DIM)
    for first in tl.range(0, parts, CHUNK):
        part = first + tl.arange(0, CHUNK)
        here = part < parts
        stat = stat_ptr + (index + part) * (2 * BLOCK_ROWS) + row
        # .cg: bypass L1, which may hold stale copies of what other multiprocessors wrote
        tops = tl.load(stat, mask=here, other=NOTHING, cache_modifier=".cg")
        sums = tl.load(stat + BLOCK_ROWS, mask=here, other=0.0, cache_modifier=".cg")
        at = ((index + part) * BLOCK_ROWS + row)[:, None] * VALUE_DIM + d[None, :]
        values = tl.load(acc_ptr + at, mask=here[:, None], other=0.0, cache_modifier=".cg")
        # a part without tokens has top = NOTHING and so the weight 2**(NOTHING - top) = 0
        new_top = tl.maximum(top, tl.max(tops, 0))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(tops - new_top)
        total = total * shrink + tl.sum(weights * sums, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        top = new_top
    # the sink is added here, once, and not by each part
    if SINKS:
        total += tl.exp2(sink - top)
    return acc / total


@triton.jit(do_not_specialize=["parts", "heads"])
def merge(
    stat_ptr,
    acc_ptr,
    out_ptr,
    sinks_ptr,
    parts,
    heads,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    NEW_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the partial results of all query rows into the output of the step.

    Grid: (query rows of a KV head, sequences x KV heads).

    Args:
        parts: number of partial results of each block of query rows.
        ROWS: number of query rows of a KV head: ``GROUP * NEW_TOKENS``.
    """
    row = tl.program_id(0)
    cell = tl.program_id(1)
    index = (cell * ((ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS) + row // BLOCK_ROWS).to(tl.int64) * parts
    sink = sink_of(sinks_ptr, cell % heads, row, row >= 0, GROUP, NEW_TOKENS, SINKS)
    out = clamped(
        merge_row(stat_ptr, acc_ptr, index, parts, row % BLOCK_ROWS, sink, BLOCK_ROWS, VALUE_DIM, CHUNK, SINKS), LIMIT
    )
    target = place_of(out_ptr, cell // heads, cell % heads, row, heads, GROUP, NEW_TOKENS, VALUE_DIM)
    tl.store(target + tl.arange(0, VALUE_DIM), out.to(out_ptr.dtype.element_ty))
