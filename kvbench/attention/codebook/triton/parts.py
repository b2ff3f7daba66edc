"""Pieces of the Triton kernels for a codebook's codes: division of the tokens, rotation, loads and conversions."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.codebook.triton.unpack import fields


@triton.constexpr_function
def run(bits):
    """Return the number of tokens of a field: 32 with codes of 4 bits, else 16."""
    return 128 // fields(bits)


@triton.jit
def portion(count, index, parts):
    """Return the first of a program's iterations and one past its last, out of `count` that are divided evenly.

    Args:
        count: number of iterations of all programs.
        index: number of this program.
        parts: number of programs.
    """
    low = (count.to(tl.int64) * index // parts).to(tl.int32)
    high = (count.to(tl.int64) * (index + 1) // parts).to(tl.int32)
    return low, high


@triton.jit
def within(low, high, before, count):
    """Return the range of a phase's iterations that lie in a program's range.

    Args:
        low: first iteration of the program, counted over all phases.
        high: one past its last.
        before: number of iterations of the phases before.
        count: number of iterations of the phase.
    """
    return tl.minimum(tl.maximum(low - before, 0), count), tl.minimum(tl.maximum(high - before, 0), count)


@triton.jit
def angles(fine_ptr, coarse_ptr, position, KEY_DIM: tl.constexpr, FIRST, COUNT: tl.constexpr):
    """Return cosines and sines of some frequencies at one position, two fp32 vectors ``[COUNT]``.

    Args:
        fine_ptr: pointer to the table of positions 0 to 127: cosines, then sines, fp32 ``[128, D]``.
        coarse_ptr: pointer to the table of the multiples of 128.
        position: the position, a scalar.
        KEY_DIM: channels of a key, D.
        FIRST: index of the first frequency.
        COUNT: number of frequencies.
    """
    HALF: tl.constexpr = KEY_DIM // 2
    j = FIRST + tl.arange(0, COUNT)
    fine = fine_ptr + position % 128 * KEY_DIM + j
    coarse = coarse_ptr + position // 128 * KEY_DIM + j
    c, s, cc, cs = tl.load(fine), tl.load(fine + HALF), tl.load(coarse), tl.load(coarse + HALF)
    return cc * c - cs * s, cs * c + cc * s


@triton.jit
def turned_back(first, second, cos, sin):
    """Turn both halves of a query back by angles, and return them in fp16 ``[D / 2, R]``.

    Args:
        first: first half of the channels, fp32 ``[D / 2, R]``.
        second: second half.
        cos: cosines, which broadcast over the query.
        sin: sines.
    """
    return (first * cos + second * sin).to(tl.float16), (second * cos - first * sin).to(tl.float16)


@triton.jit
def softened(score, cap, CAPPED: tl.constexpr):
    """Apply the model's softcap to scores that include a factor ``2 * log2(e) / softcap``, if it has one."""
    if CAPPED:
        score = cap - 2.0 * cap / (tl.exp2(score) + 1.0)
    return score


@triton.jit
def product(a, b, ASM: tl.constexpr):
    """Return the matrix product of two fp16 blocks, accumulated in fp32."""
    if ASM:
        c = tl.dot(a, b)
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32))
    return c


@triton.jit
def code_words(PLANES, base, KEYS: tl.constexpr, CHANNELS: tl.constexpr, FIRST, COUNT: tl.constexpr, BITS: tl.constexpr):  # fmt: skip  # noqa: E501
    """Load the words of some channels of a tile, and how far to shift those of a second plane.

    Args:
        PLANES: pointers to the planes' words of one row and head.
        base: number of the tile.
        KEYS: True for keys, whose blocks are ``[N, channels]``, False for values, ``[channels, N]``.
        CHANNELS: channels of a head.
        FIRST: first channel to load.
        COUNT: number of channels to load.
        BITS: bits of a code.

    Returns:
        The blocks of words, a tuple; and the shift, int16 in their shape.
    """
    N: tl.constexpr = run(BITS)
    row = tl.arange(0, N)
    d = FIRST + tl.arange(0, COUNT)
    if KEYS:
        at = row[:, None] * CHANNELS + d[None, :]
    else:
        at = d[:, None] * N + row[None, :]
    words = (tl.load(PLANES[0] + base * (N * CHANNELS) + at),)
    shift = 0
    if BITS == 3:  # the plane of single bits has 8 rows: 16 tokens of 8 fields there are two halves of a row here
        if KEYS:
            low = (row % 8)[:, None] * CHANNELS + d[None, :]
            shift = (row // 8)[:, None] + 0 * d[None, :]
        else:
            low = d[:, None] * 8 + (row % 8)[None, :]
            shift = (row // 8)[None, :] + 0 * d[:, None]
        words = words + (tl.load(PLANES[1] + base * (8 * CHANNELS) + low),)
        shift = shift.to(tl.int16)
    return words, shift


@triton.jit
def largest(stored, COUNT: tl.constexpr):
    """Return a power of two that brings the largest of some ranges of values to at most 1, and its inverse."""
    top = tl.abs(stored[0])
    for i in tl.static_range(1, COUNT):
        top = tl.maximum(top, tl.abs(stored[i]))
    exponent = (tl.max(top, 0).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    return ((253 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent + 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def clamped(x):
    """Convert fp32 numbers to fp16, those beyond its range to its largest."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def entries_of(ends_ptr, sequence, head, heads, tile, blocks, count, BLOCK: tl.constexpr):
    """Return where the entries of a head begin in each block of a tile, and how many they are, two ``[128 / BLOCK]``.

    Args:
        ends_ptr: pointer to the ends of the entries, int32 ``[B, blocks, heads]``.
        sequence: row of the batch.
        head: KV head.
        heads: number of KV heads.
        tile: number of the tile.
        blocks: number of blocks of a row in `ends_ptr`.
        count: number of packed tokens of the row.
        BLOCK: number of tokens of a block.
    """
    SEGMENTS: tl.constexpr = 128 // BLOCK
    block = tile * SEGMENTS + tl.arange(0, SEGMENTS)
    here = block * BLOCK < count
    at = block * heads + head
    ends = ends_ptr + sequence.to(tl.int64) * blocks * heads
    stop = tl.load(ends + at, mask=here, other=0)
    start = tl.load(ends + at - 1, mask=here & (at > 0), other=0)
    return start, tl.where(here, stop - start, 0)
