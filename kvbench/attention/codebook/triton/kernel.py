"""The Triton kernel of decode attention over a codebook's codes; keys before RoPE are rotated on the way.

A layer holds up to three *phases*: tokens in full precision (sinks), packed ones, and again tokens in full precision.
Tokens are divided among the programs of a head by iterations, which have the same number of tokens in one phase.

**Rotation.** A key at position p is to be rotated by p times the frequency of each pair of channels. A position is
``128 a + b``, so two small tables of cosines and sines serve all: one for multiples of 128 and one for 0 to 127.
The query is turned back by the position at which a run of N tokens begins (N = 16, or 32 for 4 bits: the tokens of one
field of a tile). Then the key is turned by 0 to N - 1 only, by cosines and sines that stay in registers. The product
needs 8 query rows at least, so a single row takes the eight columns for the eight fields of a tile: each column is the
query turned back to the beginning of another field, and its scores with other fields' tokens are masked.

Shapes: D channels of a key, Dv of a value, R columns of query rows, N tokens of a field.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.codebook.triton.exact import exact_tokens
from kvbench.attention.codebook.triton.packed import packed_tiles
from kvbench.attention.codebook.triton.parts import portion, run, within
from kvbench.attention.codebook.triton.unpack import fields
from kvbench.attention.triton.merge import NOTHING, write_part


@triton.jit(
    do_not_specialize=["heads", "scaling", "cap", "slots", "key_tiles", "value_tiles", "first_room", "last_room"]
)
def decode(
    q_ptr,
    table_ptr,
    starts_ptr,
    fine_ptr,
    near_ptr,
    coarse_ptr,
    KEYS,
    VALUES,
    score_ptr,
    stat_ptr,
    acc_ptr,
    q_batch,
    q_head,
    heads,
    scaling,
    cap,
    slots,
    key_tiles,
    value_tiles,
    first_room,
    last_room,
    PHASES: tl.constexpr,
    PACKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROTATE: tl.constexpr,
    OUTLIERS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUE_CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute partial results of the attention of one new token over all cached tokens, without outliers of values.

    Grid: (parts into which the tokens are split, sequences x KV heads).

    Args:
        q_ptr: pointer to the queries, ``[B, Hq, 1, D]``, after RoPE.
        table_ptr: pointer to the table of phases, int32 ``[B, phases, 3]`` (:class:`kvbench.attention.phases.Work`).
        starts_ptr: pointer to the RoPE position of each row's first slot, int32 ``[B]``; read only if `ROTATE`.
        fine_ptr: pointer to cosines and sines of positions 0 to 127 (:func:`angles`); read only if `ROTATE`.
        near_ptr: pointer to the first rows of the same table in fp16; read only if `ROTATE`.
        coarse_ptr: pointer to cosines and sines of the multiples of 128; read only if `ROTATE`.
        KEYS: for each phase, pointers to its keys: in full precision the buffer; packed the words of each plane, the
            levels, ranges and offsets.
        VALUES: the same for its values.
        score_ptr: pointer to a buffer fp32 ``[B, H, ROWS, slots]``; used only if `OUTLIERS`. It contains what the
            outliers of keys add to the scores (:func:`kvbench.attention.codebook.triton.sparse.key_outliers`) and
            receives the scores, both in bits, of the packed tokens.
        stat_ptr: pointer to the buffer of maxima and sums of partial results.
        acc_ptr: pointer to the buffer of weighted values of partial results.
        q_batch: stride of the queries over sequences, in elements.
        q_head: stride of the queries over heads, in elements.
        heads: number of KV heads.
        scaling: the model's factor on scores times log2(e); with a softcap, ``2 * s * log2(e) / softcap``.
        cap: ``softcap * log2(e)``; 0 without a softcap.
        slots: number of slots per head in `score_ptr`.
        key_tiles: number of tiles of a head in the buffers of packed keys.
        value_tiles: number of tiles of a head in the buffers of packed values.
        first_room: tokens of a head in the buffers of the first phase, if that is in full precision.
        last_room: tokens of a head in the buffers of the last phase, if that is in full precision; keys, then values
            have the same.
        PHASES: number of phases.
        PACKED: number of the packed phase.
        KEY_BITS: bits of a key's code.
        VALUE_BITS: bits of a value's code.
        ROTATE: True if keys are stored before RoPE.
        OUTLIERS: True if there are outliers.
        KEY_DIM: channels of a key, D.
        VALUE_DIM: channels of a value, Dv.
        ROWS: number of query rows of a KV head.
        BLOCK_ROWS: number of columns, R: a power of two, at least 8 and at least `ROWS`.
        CHUNK: number of pairs of channels of keys to process at a time.
        VALUE_CHUNK: number of channels of values to process at a time.
        STAGES: pipeline stages of the loop over tiles.
        CAPPED: True if scores have a softcap.
        ASM: True to use inline PTX (on a GPU), False to use plain Triton operations (in the interpreter).
    """
    N: tl.constexpr = run(KEY_BITS)
    COUNT: tl.constexpr = fields(KEY_BITS)
    ALONE: tl.constexpr = ROWS == 1 and ROTATE
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    cell = tl.program_id(1)
    sequence = cell // heads
    head = cell % heads
    col = tl.arange(0, BLOCK_ROWS)
    if ALONE:
        query_row = 0 * col
    else:
        query_row = tl.minimum(col, ROWS - 1)
    valid = col < ROWS
    row = tl.arange(0, N)

    # the query, normalised to a largest magnitude in [0.5, 1)
    q_at = q_ptr + sequence.to(tl.int64) * q_batch + (head * ROWS + query_row)[None, :] * q_head
    q = tl.max(tl.abs(tl.load(q_at + tl.arange(0, KEY_DIM)[:, None]).to(tl.float32)), 0)
    exponent = q.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    normal = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent + 1) << 23).to(tl.float32, bitcast=True) * scaling
    q_at += tl.arange(0, CHUNK)[:, None]

    # how many iterations there are in all phases, and which of them are this program's
    units = index * 0
    for i in tl.static_range(PHASES):
        count = tl.load(table_ptr + (sequence * PHASES + i) * 3 + 2)
        units += tl.cdiv(count, 128 if i == PACKED else N)
    low, high = portion(units, index, parts)

    begin = index * 0
    far = near_ptr
    near = near_ptr
    if ROTATE:
        begin = tl.load(starts_ptr + sequence)
        # columns are fields if the query has one row: their beginnings lie 0, N, 2 N, ... tokens after that of the tile
        far = fine_ptr + (col % COUNT * N)[None, :] * KEY_DIM + tl.arange(0, CHUNK)[:, None]
        near = near_ptr + row[:, None] * KEY_DIM + tl.arange(0, CHUNK)[None, :]

    top = tl.full((BLOCK_ROWS,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((VALUE_DIM, BLOCK_ROWS), tl.float32)
    slot = index * 0
    before = index * 0
    for i in tl.static_range(PHASES):
        count = tl.load(table_ptr + (sequence * PHASES + i) * 3 + 2)
        if i == PACKED:
            first, last = within(low, high, before, tl.cdiv(count, 128))
            before += tl.cdiv(count, 128)
            top, total, acc = packed_tiles(
                KEYS[i], VALUES[i], score_ptr, fine_ptr, coarse_ptr, q_at, normal, factor, cap, far, near, begin, slot,
                count, first, last, sequence, cell, slots, key_tiles, value_tiles, top, total, acc,
                KEY_BITS, VALUE_BITS, ROTATE, OUTLIERS, KEY_DIM, VALUE_DIM, ROWS, BLOCK_ROWS, CHUNK, VALUE_CHUNK,
                STAGES, CAPPED, ASM,
            )  # fmt: skip
        else:
            first, last = within(low, high, before, tl.cdiv(count, N))
            before += tl.cdiv(count, N)
            room = first_room
            if i > PACKED:
                room = last_room
            line = table_ptr + (sequence * PHASES + i) * 3
            top, total, acc = exact_tokens(
                KEYS[i][0], VALUES[i][0], fine_ptr, coarse_ptr, q_at, normal, factor, cap, near, begin, slot, count,
                first, last, cell, room, tl.load(line), tl.load(line + 1), top, total, acc,
                KEY_BITS, ROTATE, KEY_DIM, VALUE_DIM, ROWS, BLOCK_ROWS, CHUNK, CAPPED, ASM,
            )  # fmt: skip
        slot += count
    first_part = cell.to(tl.int64) * parts
    write_part(stat_ptr, acc_ptr, first_part + index, top, total, acc, valid, BLOCK_ROWS, VALUE_DIM)
