"""Partial attention results: written, and merged by their log-sum-exp (flash decoding's second step)."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

#: maximum of what has seen no token: finite, so that the difference of two of them is 0 and not NaN
NOTHING = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_of(out_ptr, sequence, head, row, heads, GROUP: tl.constexpr, Q: tl.constexpr, DV: tl.constexpr):
    """Where query row `row` of a KV head is written in the output ``[B, q, Hq, DV]``."""
    return out_ptr + ((sequence * Q + row % Q) * (heads * GROUP) + head * GROUP + row // Q).to(tl.int64) * DV


@triton.jit
def rounded(x, LIMIT: tl.constexpr):
    """`x` clamped to what the output's dtype holds."""
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def write_part(stat_ptr, acc_ptr, index, top, total, acc, valid, R: tl.constexpr, DV: tl.constexpr):
    """Store one program's maximum and sum ``[R]`` and weighted values ``[DV, R]`` (unnormalised, fp32)."""
    row = tl.arange(0, R)
    stat = stat_ptr + index * (2 * R)
    tl.store(stat + row, top)
    tl.store(stat + R + row, total)
    at = index * (R * DV) + row[None, :] * DV + tl.arange(0, DV)[:, None]
    tl.store(acc_ptr + at, acc, mask=valid[None, :])


@triton.jit
def sink_of(sinks_ptr, head, row, valid, GROUP: tl.constexpr, Q: tl.constexpr, SINKS: tl.constexpr):
    """Sinks of query rows `row` of a KV head, in bits (0 where the model has none)."""
    if SINKS:
        found = tl.load(sinks_ptr + head * GROUP + row // Q, mask=valid, other=0.0).to(tl.float32) * LOG2E
    else:
        found = 0.0
    return found


@triton.jit
def merge_row(
    stat_ptr, acc_ptr, index, parts, row, sink, R: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Output ``[DV]`` of one query row from `parts` partial results, `CHUNK` of them at a time side by side."""
    top = NOTHING
    total = 0.0
    acc = tl.zeros((DV,), tl.float32)
    d = tl.arange(0, DV)
    for first in tl.range(0, parts, CHUNK):
        part = first + tl.arange(0, CHUNK)
        here = part < parts
        stat = stat_ptr + (index + part) * (2 * R) + row
        tops = tl.load(stat, mask=here, other=NOTHING, cache_modifier=".cg")
        sums = tl.load(stat + R, mask=here, other=0.0, cache_modifier=".cg")
        at = ((index + part) * R + row)[:, None] * DV + d[None, :]
        values = tl.load(acc_ptr + at, mask=here[:, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(tops - new_top)
        total = total * shrink + tl.sum(weights * sums, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        top = new_top
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
    Q: tl.constexpr,
    R: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge all rows; grid (query rows of a KV head, sequences x KV heads)."""
    row = tl.program_id(0)
    cell = tl.program_id(1)
    index = (cell * ((ROWS + R - 1) // R) + row // R).to(tl.int64) * parts
    sink = sink_of(sinks_ptr, cell % heads, row, row >= 0, GROUP, Q, SINKS)
    out = rounded(merge_row(stat_ptr, acc_ptr, index, parts, row % R, sink, R, DV, CHUNK, SINKS), LIMIT)
    target = place_of(out_ptr, cell // heads, cell % heads, row, heads, GROUP, Q, DV)
    tl.store(target + tl.arange(0, DV), out.to(out_ptr.dtype.element_ty))
