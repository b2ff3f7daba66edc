"""Triton kernels of decode attention in full precision that also return the attention that each token receives.

The first kernel stores its partial results and the scores of all tokens in device memory. A score is one number per
query row and token, so this costs little beside reading hundreds of numbers of a key and a value. The second kernel
merges the partial results, and turns the scores into probabilities by the merged log-sum-exp. No key is read twice.

Shapes and parameters as in :mod:`~kvbench.attention.triton.decode_kernel`: R query rows of a program (``BLOCK_ROWS``),
the rows of a KV head padded to at least 8, ``ROWS`` of which exist: query heads of the group x new tokens.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.merge_kernel import NOTHING, clamped, merge_row, place_of, write_part
from kvbench.attention.triton.tiles import exact_dot


@triton.jit(do_not_specialize=["q_batch", "q_head", "q_token", "heads", "key_room", "value_room", "width"])
def attend_and_score(
    q_ptr,
    table_ptr,
    key_ptr,
    value_ptr,
    score_ptr,
    stat_ptr,
    acc_ptr,
    q_batch,
    q_head,
    q_token,
    heads,
    key_room,
    value_room,
    width,
    scaling,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NEW_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute partial attention results of a head's tokens, and store the scores of all of these tokens.

    Grid: (parts into which the tokens of a head are split, sequences x KV heads).

    Args:
        q_ptr: pointer to the queries, ``[B, Hq, q, D]``.
        table_ptr: pointer to the table of the only phase, int32 ``[B, 1, 3]`` (:class:`kvbench.attention.phases.Work`).
        key_ptr: pointer to the buffer of keys, ``[B, H, key_room, D]``.
        value_ptr: pointer to the buffer of values, ``[B, H, value_room, Dv]``.
        score_ptr: pointer to where the scores are stored, in bits (base-2 logarithms), fp32 ``[B, H, ROWS, width]``.
        stat_ptr: pointer to the maxima and sums of partial results
            (:func:`kvbench.attention.triton.merge_kernel.write_part`).
        acc_ptr: pointer to the weighted values of partial results, likewise.
        q_batch, q_head, q_token: strides of the queries over sequences, heads and new tokens, in elements.
        key_room: number of keys per head for which the buffer has room.
        value_room: number of values per head for which the buffer has room.
        width: number of scores per query row for which there is room.
        scaling: factor on scores times log2(e).
        BLOCK: number of tokens per iteration.
    """
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    cell = tl.program_id(1)
    sequence = cell // heads
    head = cell % heads
    ROWS: tl.constexpr = GROUP * NEW_TOKENS
    row = tl.arange(0, BLOCK_ROWS)
    valid = row < ROWS
    row_at = sequence.to(tl.int64) * q_batch + (head * GROUP + row // NEW_TOKENS) * q_head + row % NEW_TOKENS * q_token
    key_first = tl.load(table_ptr + sequence * 3)
    value_first = tl.load(table_ptr + sequence * 3 + 1)
    count = tl.load(table_ptr + sequence * 3 + 2)
    seen = count - NEW_TOKENS + 1 + row % NEW_TOKENS  # each new token sees one token more
    steps = (count + BLOCK - 1) // BLOCK
    first = steps * part // parts
    last = steps * (part + 1) // parts

    d = tl.arange(0, KEY_DIM)
    dv = tl.arange(0, VALUE_DIM)
    query = tl.load(q_ptr + row_at[None, :] + d[:, None], mask=valid[None, :], other=0.0)
    keys = key_ptr + (cell.to(tl.int64) * key_room + key_first) * KEY_DIM
    values = value_ptr + (cell.to(tl.int64) * value_room + value_first) * VALUE_DIM
    scores = score_ptr + (cell.to(tl.int64) * ROWS + row)[None, :] * width
    top = tl.full((BLOCK_ROWS,), NOTHING, tl.float32)
    # kept per token, and added up once at the end
    total = tl.zeros((BLOCK, BLOCK_ROWS), tl.float32)
    acc = tl.zeros((VALUE_DIM, BLOCK_ROWS), tl.float32)
    for u in tl.range(first, last, num_stages=STAGES):
        token = u * BLOCK + tl.arange(0, BLOCK)
        inside = tl.minimum(token, count - 1)  # in place of tokens behind the last one it is read again, and masked
        key = tl.load(keys + inside[:, None] * KEY_DIM + d[None, :])
        value = tl.load(values + inside[:, None] * VALUE_DIM + dv[None, :])
        score = exact_dot(key, query, ASM) * scaling
        score = tl.where(token[:, None] < seen[None, :], score, NOTHING)
        tl.store(scores + token[:, None], score, mask=valid[None, :] & (token < count)[:, None])
        new_top = tl.maximum(top, tl.max(score, 0))
        shrink = tl.exp2(top - new_top)
        top = new_top
        weight = tl.exp2(score - top[None, :])
        total = total * shrink[None, :] + weight
        # in units of 2**-15, where a small weight loses no bits in fp16; bf16 takes a second product for the rest
        lifted = weight * 32768.0
        high = lifted.to(value.dtype)
        fresh = exact_dot(tl.trans(value), high, ASM)
        if value.dtype == tl.bfloat16:
            fresh += exact_dot(tl.trans(value), (lifted - high.to(tl.float32)).to(value.dtype), ASM)
        acc = acc * shrink[None, :] + fresh * (1.0 / 32768.0)
    write_part(
        stat_ptr, acc_ptr, cell.to(tl.int64) * parts + part, top, tl.sum(total, 0), acc, valid, BLOCK_ROWS, VALUE_DIM
    )


@triton.jit(do_not_specialize=["q_batch", "q_head", "heads", "key_room", "value_room", "width"])
def attend_and_score_one(
    q_ptr,
    table_ptr,
    key_ptr,
    value_ptr,
    score_ptr,
    stat_ptr,
    acc_ptr,
    q_batch,
    q_head,
    heads,
    key_room,
    value_room,
    width,
    scaling,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Do what :func:`attend_and_score` does for a KV head with one query row, in fp32 and without matrix instructions.

    A matrix instruction would spend seven of eight columns on padding. The arguments are those of
    :func:`attend_and_score`; partial results have R rows, of which only the first is written.
    """
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    cell = tl.program_id(1)
    sequence = cell // heads
    head = cell % heads
    key_first = tl.load(table_ptr + sequence * 3)
    value_first = tl.load(table_ptr + sequence * 3 + 1)
    count = tl.load(table_ptr + sequence * 3 + 2)
    steps = (count + BLOCK - 1) // BLOCK
    first = steps * part // parts
    last = steps * (part + 1) // parts

    d = tl.arange(0, KEY_DIM)
    dv = tl.arange(0, VALUE_DIM)
    query = tl.load(q_ptr + sequence.to(tl.int64) * q_batch + head * q_head + d).to(tl.float32) * scaling
    keys = key_ptr + (cell.to(tl.int64) * key_room + key_first) * KEY_DIM
    values = value_ptr + (cell.to(tl.int64) * value_room + value_first) * VALUE_DIM
    scores = score_ptr + cell.to(tl.int64) * width
    top = NOTHING
    # kept per token, and added up once at the end
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, VALUE_DIM), tl.float32)
    for u in tl.range(first, last, num_stages=STAGES):
        token = u * BLOCK + tl.arange(0, BLOCK)
        inside = tl.minimum(token, count - 1)  # in place of tokens behind the last one it is read again, and masked
        key = tl.load(keys + inside[:, None] * KEY_DIM + d[None, :])
        value = tl.load(values + inside[:, None] * VALUE_DIM + dv[None, :])
        score = tl.sum(key.to(tl.float32) * query[None, :], 1)
        score = tl.where(token < count, score, NOTHING)
        tl.store(scores + token, score, mask=token < count)
        new_top = tl.maximum(top, tl.max(score, 0))
        shrink = tl.exp2(top - new_top)
        top = new_top
        weight = tl.exp2(score - top)
        total = total * shrink + weight
        acc = acc * shrink + weight[:, None] * value.to(tl.float32)
    index = cell.to(tl.int64) * parts + part
    tl.store(stat_ptr + index * (2 * BLOCK_ROWS), top)
    tl.store(stat_ptr + index * (2 * BLOCK_ROWS) + BLOCK_ROWS, tl.sum(total, 0))
    tl.store(acc_ptr + index * (BLOCK_ROWS * VALUE_DIM) + dv, tl.sum(acc, 0))


@triton.jit(do_not_specialize=["parts", "heads", "width"])
def merge_and_weigh(
    table_ptr,
    score_ptr,
    stat_ptr,
    acc_ptr,
    out_ptr,
    received_ptr,
    parts,
    heads,
    width,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NEW_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    APART: tl.constexpr,
    MEAN: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Merge partial results into the output, and turn stored scores into the attention that tokens receive.

    Grid: (ROWS + blocks of tokens, sequences x KV heads). The first ROWS programs of a head merge a query row each, the
    others process a block of tokens each.

    Args:
        table_ptr: pointer to the table of the only phase, int32 ``[B, 1, 3]``.
        score_ptr: pointer to the scores in bits, fp32 ``[B, H, ROWS, width]``.
        out_ptr: pointer to the output, ``[B, q, Hq, Dv]``.
        received_ptr: pointer to where the attention goes, fp32 ``[B, H, S, q, width]``: S is 1 for a sum or a mean over
            the query heads of a KV head, and `GROUP` to keep them apart.
        width: number of tokens per query row for which there is room in scores and attention.
        BLOCK: number of tokens of a program.
        APART: True to keep the query heads of a KV head apart.
        MEAN: True for the mean over them, False for the sum; used only unless `APART`.
    """
    index = tl.program_id(0)
    cell = tl.program_id(1)
    ROWS: tl.constexpr = GROUP * NEW_TOKENS
    base = cell.to(tl.int64) * parts
    if index < ROWS:
        out = clamped(merge_row(stat_ptr, acc_ptr, base, parts, index, 0.0, BLOCK_ROWS, VALUE_DIM, 16, False), LIMIT)
        target = place_of(out_ptr, cell // heads, cell % heads, index, heads, GROUP, NEW_TOKENS, VALUE_DIM)
        tl.store(target + tl.arange(0, VALUE_DIM), out.to(out_ptr.dtype.element_ty))
    else:
        count = tl.load(table_ptr + cell // heads * 3 + 2)
        token = (index - ROWS) * BLOCK + tl.arange(0, BLOCK)
        inside = token < count
        if (index - ROWS) * BLOCK < count:
            line = cell.to(tl.int64) * ROWS
            for i in tl.static_range(NEW_TOKENS):
                sums = tl.zeros((BLOCK,), tl.float32)
                for g in tl.static_range(GROUP):
                    row = g * NEW_TOKENS + i
                    top = NOTHING
                    total = 0.0
                    for first in tl.range(0, parts, 16):
                        part = first + tl.arange(0, 16)
                        stat = stat_ptr + (base + part) * (2 * BLOCK_ROWS) + row
                        tops = tl.load(stat, mask=part < parts, other=NOTHING)
                        totals = tl.load(stat + BLOCK_ROWS, mask=part < parts, other=0.0)
                        new_top = tl.maximum(top, tl.max(tops, 0))
                        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(tops - new_top) * totals, 0)
                        top = new_top
                    score = tl.load(score_ptr + (line + row) * width + token, mask=inside, other=NOTHING)
                    probability = tl.exp2(score - top) / total
                    if APART:
                        place = (line + g * NEW_TOKENS + i) * width + token
                        tl.store(received_ptr + place, probability, mask=inside)
                    else:
                        sums += probability
                if not APART:
                    if MEAN:
                        sums = sums / GROUP
                    tl.store(received_ptr + (cell.to(tl.int64) * NEW_TOKENS + i) * width + token, sums, mask=inside)
