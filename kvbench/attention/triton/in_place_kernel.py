"""Decode attention over runs of tokens that stay where they stand in the text, in one Triton launch.

Without reordering (Cocktail without its module II), each run of chunks of one width is a segment with buffers of its
own, so a layer has dozens or hundreds of phases, of few formats. The kernel of
:mod:`kvbench.attention.triton.decode_kernel` is compiled for a list of phases; this one is compiled for the formats
alone, visits the phases in the order of the text in a loop, and reads the addresses of their buffers from a table.
The arithmetic of a phase, the division of the work and the merge are the other kernel's; shapes and parameters too.

More parameters:
    KEY_FORMS, VALUE_FORMS: the formats, of which the last is full precision on both sides.
    phases: number of phases; form_ptr: index of the format of each, int32 ``[phases]``.
    address_ptr: addresses of the buffers of each phase, those of the keys and then those of the values, int64
        ``[phases, 2 * ADDRESSES]``.
    extent_ptr: four sizes of each phase (``EXTENTS``), int32 ``[phases, 4]``.
    like_ptr: pointer to any buffer in full precision, for its type.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import FULL, kind, planes
from kvbench.attention.triton.decode_kernel import part_of_tile, phase, price, span
from kvbench.attention.triton.merge_kernel import NOTHING, clamped, merge_row, place_of, sink_of, write_part

#: addresses of a side of a phase, at most: two planes of words, scales, minima
ADDRESSES = tl.constexpr(4)


@triton.jit
def aimed(address_ptr, like_ptr, FORM: tl.constexpr):
    """Return the pointers to the buffers of one side of a phase, in the order of ``located``."""
    if kind(FORM) == FULL:
        parts = (tl.multiple_of(tl.load(address_ptr).to(like_ptr.dtype), 16),)
    else:
        parts = ()
        for i in tl.static_range(planes(FORM)):
            parts = parts + (tl.multiple_of(tl.load(address_ptr + i).to(tl.pointer_type(tl.int16)), 16),)
        for i in tl.static_range(planes(FORM), planes(FORM) + 2):
            parts = parts + (tl.multiple_of(tl.load(address_ptr + i).to(tl.pointer_type(tl.float16)), 16),)
    return parts


@triton.jit(do_not_specialize=["phases", "heads", "scaling", "cap", "fused"])
def decode_in_place(
    q_ptr,
    out_ptr,
    table_ptr,
    form_ptr,
    address_ptr,
    extent_ptr,
    like_ptr,
    stat_ptr,
    acc_ptr,
    arrived_ptr,
    sinks_ptr,
    q_batch,
    q_head,
    q_token,
    phases,
    heads,
    scaling,
    cap,
    fused,
    KEY_FORMS: tl.constexpr,
    VALUE_FORMS: tl.constexpr,
    WHOLE_COSTS: tl.constexpr,
    PART_COSTS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NEW_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FULL_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PART_STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute the attention of a step's new tokens over all cached tokens, run by run.

    The grid is that of ``decode_attention``; `phases` are in the order of the text.
    """
    block = tl.program_id(0)
    index = tl.program_id(1)
    parts = tl.num_programs(1)
    cell = tl.program_id(2)
    sequence = cell // heads
    head = cell % heads
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ROWS: tl.constexpr = GROUP * NEW_TOKENS
    valid = row < ROWS
    row_at = sequence.to(tl.int64) * q_batch + (head * GROUP + row // NEW_TOKENS) * q_head + row % NEW_TOKENS * q_token
    lines = table_ptr + sequence * phases * 3

    cost = sequence * 0
    for i in tl.range(0, phases):
        form = tl.load(form_ptr + i)
        for f in tl.static_range(len(KEY_FORMS)):
            if form == f:
                steps: tl.constexpr = part_of_tile(KEY_FORMS[f], VALUE_FORMS[f], FULL_STEP)
                cost += price(span(lines + i * 3, KEY_FORMS[f], VALUE_FORMS[f], steps), WHOLE_COSTS[f], PART_COSTS[f])
    low = (cost.to(tl.int64) * index // parts).to(tl.int32)
    high = (cost.to(tl.int64) * (index + 1) // parts).to(tl.int32)

    # as in decode_attention: each query row's largest magnitude lies in [0.5, 1)
    d = tl.arange(0, KEY_DIM)
    rows_of_queries = tl.load(q_ptr + row_at[None, :] + d[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(rows_of_queries), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    normal = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent + 1) << 23).to(tl.float32, bitcast=True) * scaling

    top = tl.full((BLOCK_ROWS,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((VALUE_DIM, BLOCK_ROWS), tl.float32)
    at = sequence * 0
    for i in tl.range(0, phases):
        form = tl.load(form_ptr + i)
        for f in tl.static_range(len(KEY_FORMS)):
            if form == f:
                step: tl.constexpr = part_of_tile(KEY_FORMS[f], VALUE_FORMS[f], FULL_STEP)
                here = span(lines + i * 3, KEY_FORMS[f], VALUE_FORMS[f], step)
                dear = price(here, WHOLE_COSTS[f], PART_COSTS[f])
                if (at < high) & (at + dear > low):
                    addresses = address_ptr + i * (2 * ADDRESSES)
                    extents = extent_ptr + i * 4
                    room = (tl.load(extents), tl.load(extents + 1), tl.load(extents + 2), tl.load(extents + 3))
                    count = here[2]
                    # new tokens are in the last phase, which is in full precision: each sees one token more
                    later = NEW_TOKENS - 1 - row % NEW_TOKENS
                    seen = count - tl.where(i == phases - 1, later, 0)
                    keys = aimed(addresses, like_ptr, KEY_FORMS[f])
                    values = aimed(addresses + ADDRESSES, like_ptr, VALUE_FORMS[f])
                    top, total, acc = phase(
                        (top, total, acc), q_ptr, row_at, valid, normal, factor, seen, keys, values,
                        room, here, cell.to(tl.int64), low, high, at, KEY_FORMS[f], VALUE_FORMS[f],
                        WHOLE_COSTS[f], PART_COSTS[f], step, f == len(KEY_FORMS) - 1 and NEW_TOKENS > 1,
                        ROWS, KEY_DIM, VALUE_DIM, BLOCK_ROWS, STAGES, PART_STAGES, ASM, cap, CAPPED,
                    )  # fmt: skip
                at += dear

    if parts == 1:
        if SINKS:
            total += tl.exp2(sink_of(sinks_ptr, head, row, valid, GROUP, NEW_TOKENS, SINKS) - top)
        out = clamped(acc / total[None, :], LIMIT).to(out_ptr.dtype.element_ty)
        target = place_of(out_ptr, sequence, head, row, heads, GROUP, NEW_TOKENS, VALUE_DIM)
        tl.store(target[None, :] + tl.arange(0, VALUE_DIM)[:, None], out, mask=valid[None, :])
    else:
        place = cell * tl.num_programs(0) + block
        first = place.to(tl.int64) * parts
        write_part(stat_ptr, acc_ptr, first + index, top, total, acc, valid, BLOCK_ROWS, VALUE_DIM)
        if parts <= fused:
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived_ptr + place, 0)
                for r in tl.range(0, tl.minimum(ROWS - block * BLOCK_ROWS, BLOCK_ROWS)):
                    sink = sink_of(sinks_ptr, head, block * BLOCK_ROWS + r, r >= 0, GROUP, NEW_TOKENS, SINKS)
                    merged = merge_row(stat_ptr, acc_ptr, first, parts, r, sink, BLOCK_ROWS, VALUE_DIM, 16, SINKS)
                    target = place_of(
                        out_ptr, sequence, head, block * BLOCK_ROWS + r, heads, GROUP, NEW_TOKENS, VALUE_DIM
                    )
                    tl.store(target + tl.arange(0, VALUE_DIM), clamped(merged, LIMIT).to(out_ptr.dtype.element_ty))
