"""Outliers in decode attention over a codebook's codes: what they add to scores, and to weighted values.

The code of an outlier stands for the level nearest to the offset, so the dense kernel reads a known element in its
place, its *stand-in*. An outlier therefore adds its difference to the stand-in: times the query to the score of its
token (before the dense kernel, :func:`key_outliers`), and times the weight of its token to the output (after it,
:func:`value_outliers`, once the scores are known). All sums have a fixed order, so a step can be repeated bit for bit.

Entries are sorted by blocks of tokens and, within them, by head (:class:`kvbench.cache.segments.outliers.Outliers`). A
program takes a tile of 128 tokens of one head, that is one or several blocks, and a fixed number of entries of each
block at a time.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.codebook.triton.parts import entries_of, portion, product, run, within

#: one where two fp16 numbers are equal, else zero
EQUAL = tl.constexpr("set.eq.f16x2.f16x2 $0, $1, $2;")


@triton.jit(do_not_specialize=["heads", "scaling", "slots", "room", "blocks"])
def key_outliers(
    q_ptr,
    table_ptr,
    starts_ptr,
    fine_ptr,
    coarse_ptr,
    score_ptr,
    values_ptr,
    indices_ptr,
    ends_ptr,
    stand_in_ptr,
    q_batch,
    q_head,
    heads,
    scaling,
    slots,
    room,
    blocks,
    PHASES: tl.constexpr,
    PACKED: tl.constexpr,
    ROTATE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Write what the outliers of keys add to the scores of each packed token; zeros where a token has none.

    Grid: (programs, sequences x KV heads). A program takes every so many-th tile.

    Args:
        q_ptr: pointer to the queries, ``[B, Hq, 1, D]``, after RoPE.
        table_ptr: pointer to the table of phases, int32 ``[B, phases, 3]``.
        starts_ptr: pointer to the RoPE position of each row's first slot; read only if `ROTATE`.
        fine_ptr: pointer to cosines and sines of positions 0 to 127; read only if `ROTATE`.
        coarse_ptr: pointer to those of the multiples of 128; read only if `ROTATE`.
        score_ptr: pointer to the result in bits, fp32 ``[B, H, ROWS, slots]``.
        values_ptr: pointer to the values of the entries, ``[B, room]``.
        indices_ptr: pointer to their indices, int16 ``[B, room]``.
        ends_ptr: pointer to the ends of the entries, int32 ``[B, blocks, H]``.
        stand_in_ptr: pointer to the stand-in of each channel, fp32 ``[B, WIDTH]``.
        q_batch: stride of the queries over sequences, in elements.
        q_head: stride of the queries over heads, in elements.
        heads: number of KV heads.
        scaling: factor on scores, including log2(e).
        slots: number of slots per head in `score_ptr`.
        room: number of entries per row in the buffers.
        blocks: number of blocks per row in `ends_ptr`.
        PHASES: number of phases.
        PACKED: number of the packed phase.
        ROTATE: True if keys are stored before RoPE.
        KEY_DIM: channels of a key, D.
        ROWS: number of query rows of a KV head.
        WIDTH: channels of a token over all heads.
        BLOCK: number of tokens of a block.
        ENTRIES: number of entries to process at a time.
    """
    HALF: tl.constexpr = KEY_DIM // 2
    SEGMENTS: tl.constexpr = 128 // BLOCK
    EACH: tl.constexpr = ENTRIES // SEGMENTS
    cell = tl.program_id(1)
    sequence = cell // heads
    head = cell % heads
    slot = cell * 0
    for i in tl.static_range(PACKED):
        slot += tl.load(table_ptr + (sequence * PHASES + i) * 3 + 2)
    count = tl.load(table_ptr + (sequence * PHASES + PACKED) * 3 + 2)
    begin = slot * 0
    if ROTATE:
        begin = tl.load(starts_ptr + sequence) + slot
    q_ptr += sequence.to(tl.int64) * q_batch + (head * ROWS) * q_head
    values_ptr += sequence.to(tl.int64) * room
    indices_ptr += sequence.to(tl.int64) * room
    stand_in_ptr += cell * KEY_DIM
    segment = tl.arange(0, SEGMENTS)
    place = tl.arange(0, BLOCK)
    offset = tl.arange(0, EACH)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, 128), tl.num_programs(0), num_stages=1):
        start, length = entries_of(ends_ptr, sequence, head, heads, tile, blocks, count, BLOCK)
        added = ()
        for _ in tl.static_range(ROWS):
            added = added + (tl.zeros((SEGMENTS, BLOCK), tl.float32),)
        for done in tl.range(0, tl.max(length, 0), EACH, num_stages=1):
            here = (done + offset)[None, :] < length[:, None]
            at = start[:, None] + (done + offset)[None, :]
            entry = tl.load(indices_ptr + at, mask=here, other=0).to(tl.int32) & 0xFFFF
            x = tl.load(values_ptr + at, mask=here, other=0.0).to(tl.float32)
            token = tl.where(here, entry // WIDTH, 0)
            d = tl.where(here, entry % WIDTH - head * KEY_DIM, 0)
            x = tl.where(here, (x - tl.load(stand_in_ptr + d)) * scaling, 0.0)
            if ROTATE:
                position = begin + tile * 128 + segment[:, None] * BLOCK + token
                fine = fine_ptr + position % 128 * KEY_DIM + d % HALF
                coarse = coarse_ptr + position // 128 * KEY_DIM + d % HALF
                c, s, cc, cs = tl.load(fine), tl.load(fine + HALF), tl.load(coarse), tl.load(coarse + HALF)
                cos = cc * c - cs * s
                sin = cs * c + cc * s
                sin = tl.where(d < HALF, sin, -sin)
                partner = tl.where(d < HALF, d + HALF, d - HALF)
            mine = token[:, :, None] == place[None, None, :]
            more = ()
            for r in tl.static_range(ROWS):
                q = tl.load(q_ptr + r * q_head + d).to(tl.float32)
                if ROTATE:
                    q = q * cos + tl.load(q_ptr + r * q_head + partner).to(tl.float32) * sin
                more = more + (added[r] + tl.sum(tl.where(mine, (x * q)[:, :, None], 0.0), 1),)
            added = more
        target = score_ptr + cell.to(tl.int64) * ROWS * slots + slot + tile * 128
        at = segment[:, None] * BLOCK + place[None, :]
        for r in tl.static_range(ROWS):
            tl.store(target + r * slots + at, added[r], mask=tile * 128 + at < count)


@triton.jit(do_not_specialize=["heads", "slots", "room", "blocks", "value_tokens"])
def value_outliers(
    table_ptr,
    score_ptr,
    stat_ptr,
    acc_ptr,
    values_ptr,
    indices_ptr,
    ends_ptr,
    level_ptr,
    scale_ptr,
    offset_ptr,
    heads,
    slots,
    room,
    blocks,
    value_tokens,
    PHASES: tl.constexpr,
    PACKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add what the outliers of values contribute to the partial results of the dense kernel.

    Grid: that of the dense kernel. A program takes the tiles that the dense kernel's program of the same number took,
    and adds to that program's partial result.

    Args:
        table_ptr: pointer to the table of phases, int32 ``[B, phases, 3]``.
        score_ptr: pointer to the scores in bits of the packed tokens, fp32 ``[B, H, ROWS, slots]``.
        stat_ptr: pointer to the maxima and sums of partial results.
        acc_ptr: pointer to the weighted values of partial results, to which is added.
        values_ptr: pointer to the values of the entries, ``[B, room]``.
        indices_ptr: pointer to their indices, int16 ``[B, room]``.
        ends_ptr: pointer to the ends of the entries, int32 ``[B, blocks, H]``.
        level_ptr: pointer to the level of an outlier's code, fp32 ``[B]``.
        scale_ptr: pointer to the ranges of the tokens, ``[B, value_tokens]``.
        offset_ptr: pointer to their offsets.
        heads: number of KV heads.
        slots: number of slots per head in `score_ptr`.
        room: number of entries per row in the buffers.
        blocks: number of blocks per row in `ends_ptr`.
        value_tokens: number of tokens per row in `scale_ptr`.
        PHASES: number of phases.
        PACKED: number of the packed phase.
        KEY_BITS: bits of a key's code, on which the number of tokens of an iteration in full precision depends.
        VALUE_DIM: channels of a value, Dv.
        ROWS: number of query rows of a KV head.
        BLOCK_ROWS: number of columns of a partial result, R.
        WIDTH: channels of a token over all heads.
        BLOCK: number of tokens of a block.
        ENTRIES: number of entries to process at a time.
        ASM: True to use inline PTX (on a GPU), False to use plain Triton operations (in the interpreter).
    """
    SEGMENTS: tl.constexpr = 128 // BLOCK
    EACH: tl.constexpr = ENTRIES // SEGMENTS
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    cell = tl.program_id(1)
    sequence = cell // heads
    head = cell % heads
    N: tl.constexpr = run(KEY_BITS)
    units = index * 0
    before = index * 0
    slot = index * 0
    for i in tl.static_range(PHASES):
        tokens = tl.load(table_ptr + (sequence * PHASES + i) * 3 + 2)
        units += tl.cdiv(tokens, 128 if i == PACKED else N)
        if i < PACKED:
            before += tl.cdiv(tokens, N)
            slot += tokens
    count = tl.load(table_ptr + (sequence * PHASES + PACKED) * 3 + 2)
    low, high = portion(units, index, parts)
    first, last = within(low, high, before, tl.cdiv(count, 128))
    if first < last:
        # 16 at least, as query rows are the rows of the product: as its columns, they would need shared memory
        COLUMNS: tl.constexpr = max(BLOCK_ROWS, 16)
        col = tl.arange(0, COLUMNS)
        d = tl.arange(0, VALUE_DIM)
        segment = tl.arange(0, SEGMENTS)
        offset = tl.arange(0, EACH)
        part = cell.to(tl.int64) * parts + index
        valid = col < ROWS
        top = tl.load(stat_ptr + part * (2 * BLOCK_ROWS) + col, mask=valid, other=0.0)
        values_ptr += sequence.to(tl.int64) * room
        indices_ptr += sequence.to(tl.int64) * room
        level = tl.load(level_ptr + sequence)
        scale_ptr += sequence.to(tl.int64) * value_tokens
        offset_ptr += sequence.to(tl.int64) * value_tokens
        score_ptr += cell.to(tl.int64) * ROWS * slots + slot
        added = tl.zeros((COLUMNS, VALUE_DIM), tl.float32)
        for tile in tl.range(first, last, num_stages=1):
            start, length = entries_of(ends_ptr, sequence, head, heads, tile, blocks, count, BLOCK)
            for done in tl.range(0, tl.max(length, 0), EACH, num_stages=1):
                here = (done + offset)[None, :] < length[:, None]
                at = start[:, None] + (done + offset)[None, :]
                entry = tl.load(indices_ptr + at, mask=here, other=0).to(tl.int32) & 0xFFFF
                x = tl.load(values_ptr + at, mask=here, other=0.0).to(tl.float32)
                channel = tl.where(here, entry % WIDTH - head * VALUE_DIM, 0)
                token = tile * 128 + segment[:, None] * BLOCK + tl.where(here, entry // WIDTH, 0)
                stand_in = level * tl.load(scale_ptr + token).to(tl.float32)
                stand_in += tl.load(offset_ptr + token).to(tl.float32)
                x = tl.reshape(tl.where(here, x - stand_in, 0.0), (ENTRIES,))
                token = tl.reshape(token, (ENTRIES,))
                real = tl.reshape(here, (ENTRIES,))
                channel = tl.reshape(channel, (ENTRIES,))
                if ROWS == 1:
                    score = tl.where(real, tl.load(score_ptr + token, mask=real, other=0.0), -3e38)
                    weighted = x * tl.exp2(score - tl.max(tl.where(valid, top, -3e38), 0))
                    largest = tl.max(tl.abs(weighted), 0)
                    weighted = tl.where(valid[:, None], weighted[None, :], 0.0)
                else:
                    score = tl.load(
                        score_ptr + col[:, None] * slots + token[None, :], mask=valid[:, None] & real[None, :],
                        other=-3e38,
                    )  # fmt: skip
                    weighted = x[None, :] * tl.exp2(score - top[:, None])
                    weighted = tl.where(valid[:, None], weighted, 0.0)
                    largest = tl.max(tl.max(tl.abs(weighted), 1), 0)
                # scaled by a power of two to fit into fp16
                exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
                exponent = tl.minimum(tl.maximum(exponent, 64), 190)
                up = ((253 - exponent) << 23).to(tl.float32, bitcast=True) * 16384.0
                down = ((exponent + 1) << 23).to(tl.float32, bitcast=True) * (1.0 / 16384.0)
                if ASM:
                    hit = tl.inline_asm_elementwise(
                        EQUAL,
                        "=r,r,r",
                        [channel.to(tl.float16)[:, None], d.to(tl.float16)[None, :]],
                        tl.float16,
                        True,
                        2,
                    )
                else:
                    hit = (channel[:, None] == d[None, :]).to(tl.float16)
                added += product((weighted * up).to(tl.float16), hit, ASM) * down
        at = acc_ptr + part * (BLOCK_ROWS * VALUE_DIM) + col[:, None] * VALUE_DIM + d[None, :]
        tl.store(at, tl.load(at, mask=valid[:, None], other=0.0) + added, mask=valid[:, None])
