"""Storing one token inside a Triton kernel: codes among those of its tile, outliers among those of its block."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_plane(words, tiles, token, head, d, codes, there, WIDTH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr):
    """Write one token's codes into a plane of words; the other tokens of these words keep theirs.

    Args:
        words: pointer to the plane of one row, int16 ``[H, tiles, ...]``.
        head: index of the head of each element.
        d: channel of each element.
        codes: codes of the plane, int32 ``[H, D]``.
        there: which elements exist.
        WIDTH: bits of a code in this plane.
        KEYS: True for the order of words of keys, False for that of values.
    """
    N: tl.constexpr = 8 * WIDTH
    field = token % 128 // N
    row = token % 128 % N
    base = (head.to(tl.int64) * tiles + token // 128) * (N * D)
    if KEYS:
        at = words + base + row * D + d
    else:
        at = words + base + d * N + row
    shift = field * WIDTH
    old = tl.load(at, mask=there, other=0).to(tl.int32)
    new = (old & ~(((1 << WIDTH) - 1) << shift)) | (codes << shift)
    tl.store(at, new.to(tl.int16), mask=there)


@triton.jit
def planes(
    WORDS, row, heads, tiles, token, head, d, codes, there, BITS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
):
    """Write one token's codes into all planes of a row; arguments as for :func:`write_plane`."""
    if BITS == 3:
        write_plane(WORDS[0] + row * heads * tiles * (16 * D), tiles, token, head, d, codes >> 1, there, 2, D, KEYS)
        write_plane(WORDS[1] + row * heads * tiles * (8 * D), tiles, token, head, d, codes & 1, there, 1, D, KEYS)
    else:
        write_plane(WORDS[0] + row * heads * tiles * (8 * BITS * D), tiles, token, head, d, codes, there, BITS, D, KEYS)


@triton.jit
def insert(
    values, indices, table, token, x, outlier, head, d, heads, width, H: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Insert one token's outliers among the entries of its row.

    Args:
        values: pointer to the values of the row's entries.
        indices: pointer to their indices, int16.
        table: pointer to the ends of the row's entries, int32 ``[blocks, heads]``.
        x: the token's elements, ``[H, D]``.
        outlier: which of them are outliers.
        heads: number of heads that exist; H is padded.
        width: channels of a token over all heads.
        BLOCK: number of tokens of a block.
        ENTRIES: number of older entries to move at a time.
    """
    there = head < heads
    block = table + token // BLOCK * heads
    begin = tl.where(token >= BLOCK, tl.load(table + tl.maximum(token // BLOCK * heads - 1, 0)), 0)
    old_ends = tl.load(block + head, mask=there, other=0)
    # the table of a block is first written with its first token: until then, its runs are empty
    old_ends = tl.where(token % BLOCK > 0, old_ends, begin)
    stop = tl.max(tl.where(there, old_ends, 0), 0)
    marks = outlier.to(tl.int32)
    counts = tl.sum(marks, 1)
    before = tl.cumsum(counts, 0) - counts
    rank = before[:, None] + tl.cumsum(marks, 1) - marks
    # the entries of later heads first, so that none is overwritten before it has moved
    chunks = tl.cdiv(stop - begin, ENTRIES)
    for i in tl.range(0, chunks):
        at = begin + (chunks - 1 - i) * ENTRIES + tl.arange(0, ENTRIES)
        here = at < stop
        entry = tl.load(indices + at, mask=here, other=0)
        value = tl.load(values + at, mask=here, other=0.0)
        owner = (entry.to(tl.int32) & 65535) % width // D
        shift = tl.sum(tl.where(head[None, :] < owner[:, None], counts[None, :], 0), 1)
        tl.debug_barrier()
        tl.store(indices + at + shift, entry, mask=here)
        tl.store(values + at + shift, value, mask=here)
        tl.debug_barrier()
    at = old_ends[:, None] + rank
    index = token % BLOCK * width + head[:, None] * D + d[None, :]
    tl.store(indices + at, index.to(tl.int16), mask=outlier)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=outlier)
    tl.debug_barrier()
    tl.store(block + head, old_ends + before + counts, mask=there)
