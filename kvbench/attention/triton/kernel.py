"""Decode attention over all phases of a layer in one Triton launch.

The grid is fixed by the host: (blocks of query rows, parts of the work, sequences x KV heads). The table of the phases
lies in device memory. Each program adds up what every phase costs, takes the interval of that sum that is its own, and
walks the tiles whose beginning lies in it, whatever their phases: softmax does not mind the order, so one running
maximum, sum and accumulator serve all formats. Partial results are merged by the last program to finish, or by
:mod:`kvbench.attention.triton.merge`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import CHANNEL, FULL, axis, blocks, group, kind, planes, rows, width, window
from kvbench.attention.triton.merge import NOTHING, merge_row, place_of, rounded, sink_of, write_part
from kvbench.attention.triton.walk import load_query, walk


@triton.constexpr_function
def whole(key, value):
    """Whether tiles are walked whole: both sides packed, with fields of equally many tokens."""
    return kind(key) != 0 and kind(value) != 0 and width(key) == width(value)


@triton.constexpr_function
def part(key, value, full):
    """Tokens of a step where tiles are not walked whole: inside one field of every packed side."""
    sizes = [rows(form) for form in (key, value) if kind(form) != 0]
    return min(sizes) if sizes else full


@triton.jit
def located(PARTS, FORM: tl.constexpr, D: tl.constexpr, cell, extent, groups, tile):
    """Pointers of one (sequence, KV head), moved to its `tile` where packed.

    Groups of a window are found by a token's number, so their parameters stay where they are and the number of the
    tile's first token goes with them.

    Args:
        extent: tiles of a packed buffer, tokens of an exact one. groups: rows of per-channel parameters.
    """
    if kind(FORM) == FULL:
        moved = (PARTS[0] + cell * extent * D,)
    else:
        moved = ()
        for i in tl.static_range(planes(FORM)):
            moved = moved + (PARTS[i] + (cell * extent + tile) * (rows(FORM) * D),)
        for i in tl.static_range(planes(FORM), planes(FORM) + 2):
            if window(FORM):
                moved = moved + (PARTS[i] + cell * groups * D,)
            elif axis(FORM) == CHANNEL:
                moved = moved + (PARTS[i] + (cell * groups + tile * (128 // group(FORM))) * D,)
            else:
                moved = moved + (PARTS[i] + (cell * extent + tile) * (128 * blocks(FORM, D)),)
        if window(FORM):
            moved = moved + (tile * 128,)
    return moved


@triton.jit
def span(table_ptr, KEY: tl.constexpr, VALUE: tl.constexpr, SUB: tl.constexpr):
    """What a row of the table says: firsts, count, lead (:func:`walk`), whole tiles and parts of tiles.

    Returns:
        key first, value first, tokens, lead, first whole tile, whole tiles, first part, parts before the whole tiles,
        first part behind them, all parts.
    """
    key_first = tl.load(table_ptr)
    value_first = tl.load(table_ptr + 1)
    count = tl.load(table_ptr + 2)
    if kind(KEY) != FULL:
        lead = key_first % 128
    elif kind(VALUE) != FULL:
        lead = value_first % 128
    else:
        lead = key_first * 0
    end = lead + count
    if whole(KEY, VALUE):
        tile = (lead + 127) // 128
        tiles = tl.maximum(end // 128 - tile, 0)
    else:
        tile = (end + 127) // 128
        tiles = lead * 0
    begin = lead // SUB
    before = tl.maximum((tl.minimum(end, tile * 128) + SUB - 1) // SUB - begin, 0)
    behind = (tile + tiles) * (128 // SUB)
    parts = before + tl.maximum((end + SUB - 1) // SUB - behind, 0)
    return key_first, value_first, count, lead, tile, tiles, begin, before, behind, parts


@triton.jit
def share(low, high, at, steps, cost: tl.constexpr):
    """Steps of a run of `steps`, which begins at cost `at`, that begin in the interval [low, high)."""
    first = tl.minimum(tl.maximum((low - at + cost - 1) // cost, 0), steps)
    last = tl.minimum(tl.maximum((high - at + cost - 1) // cost, 0), steps)
    return first, last


@triton.jit
def phase(
    state,
    q_ptr,
    row_at,
    valid,
    normal,
    factor,
    seen,
    KEYS,
    VALUES,
    EXTENT,
    SPAN,
    cell,
    low,
    high,
    at,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WHOLE_COST: tl.constexpr,
    PART_COST: tl.constexpr,
    SUB: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PART_STAGES: tl.constexpr,
    ASM: tl.constexpr,
    cap,
    CAP: tl.constexpr,
):
    """One phase's tiles and parts of tiles that begin in the interval of costs [low, high)."""
    NB: tl.constexpr = blocks(KEY, D)
    ONE: tl.constexpr = ROWS == 1 and kind(KEY) != FULL and axis(KEY) == CHANNEL
    dtype: tl.constexpr = KEYS[0].dtype.element_ty if kind(KEY) == FULL else tl.float16
    top, total, acc = state
    key_first, value_first, count, lead, tile, tiles, begin, before, behind, pieces = SPAN
    keys = located(KEYS, KEY, D, cell, EXTENT[0], EXTENT[1], (key_first - lead) // 128)
    values = located(VALUES, VALUE, DV, cell, EXTENT[2], EXTENT[3], (value_first - lead) // 128)
    if whole(KEY, VALUE):
        first, last = share(low, high, at, tiles, WHOLE_COST)
        at += tiles * WHOLE_COST
        if first < last:
            query, sums = load_query(q_ptr, row_at, valid, normal, D, NB, dtype, ONE)
            top, total, acc = walk(
                top, total, acc, keys, values, KEY, VALUE, query, sums, factor, first + tile, last + tile,
                0, 0, lead, count, key_first, value_first, seen, D, DV, R, True, SUB, STAGES, False, ONE, ASM,
                cap, CAP,
            )  # fmt: skip
    first, last = share(low, high, at, pieces, PART_COST)
    if first < last:
        query, sums = load_query(q_ptr, row_at, valid, normal, D, NB, dtype, ONE)
        top, total, acc = walk(
            top, total, acc, keys, values, KEY, VALUE, query, sums, factor, first + begin, last + begin,
            begin + before, behind - begin - before, lead, count, key_first, value_first, seen,
            D, DV, R, False, SUB, PART_STAGES, CAUSAL, ONE, ASM, cap, CAP,
        )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["EXTENTS", "heads", "scaling", "cap", "fused"])
def decode(
    q_ptr,
    out_ptr,
    table_ptr,
    KEYS,
    VALUES,
    EXTENTS,
    stat_ptr,
    acc_ptr,
    arrived_ptr,
    sinks_ptr,
    q_batch,
    q_head,
    q_token,
    heads,
    scaling,
    cap,
    fused,
    KEY_FORMS: tl.constexpr,
    VALUE_FORMS: tl.constexpr,
    WHOLE_COSTS: tl.constexpr,
    PART_COSTS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    FULL_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PART_STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attention of `Q` query tokens of `GROUP` query heads a KV head to every token of the phases.

    Grid: (blocks of R query rows, parts of the work, sequences x KV heads).

    Args:
        KEYS, VALUES: for each phase the pointers of its parts: words and two parameters, or a buffer.
        EXTENTS: for each phase the extents that :func:`located` takes, of keys and of values.
        stat_ptr, acc_ptr: partial results (:func:`write_part`). arrived_ptr: a zeroed counter for each merge.
        sinks_ptr: one more logit for each query head (`SINKS`).
        scaling: factor on the scores times log2(e), or, where they are capped (`CAP`), on their doubles over the cap.
        cap: largest score, times log2(e).
        fused: up to so many partial results are merged by the last program to finish; more are left to `merge`.
        KEY_FORMS, VALUE_FORMS: :func:`kvbench.attention.triton.codes.number` for each phase.
        WHOLE_COSTS, PART_COSTS: for each phase the cost of a whole tile and of a part of one.
    """
    block = tl.program_id(0)  # fastest: programs that read the same tiles run side by side
    index = tl.program_id(1)
    parts = tl.num_programs(1)
    cell = tl.program_id(2)
    sequence = cell // heads
    head = cell % heads
    row = block * R + tl.arange(0, R)
    ROWS: tl.constexpr = GROUP * Q
    valid = row < ROWS
    row_at = sequence.to(tl.int64) * q_batch + (head * GROUP + row // Q) * q_head + row % Q * q_token

    PH: tl.constexpr = len(KEY_FORMS)
    spans = ()
    cost = sequence * 0
    for i in tl.static_range(PH):
        found = span(
            table_ptr + (sequence * PH + i) * 3,
            KEY_FORMS[i],
            VALUE_FORMS[i],
            part(KEY_FORMS[i], VALUE_FORMS[i], FULL_STEP),
        )
        cost += found[5] * WHOLE_COSTS[i] + found[9] * PART_COSTS[i]
        spans = spans + (found,)
    low = (cost.to(tl.int64) * index // parts).to(tl.int32)
    high = (cost.to(tl.int64) * (index + 1) // parts).to(tl.int32)

    # A query row is brought to a largest magnitude in [0.5, 1): times any fp16 scale it stays in fp16.
    d = tl.arange(0, D)
    largest = tl.load(q_ptr + row_at[None, :] + d[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(largest), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    normal = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent + 1) << 23).to(tl.float32, bitcast=True) * scaling

    state = (tl.full((R,), NOTHING, tl.float32), tl.zeros((R,), tl.float32), tl.zeros((DV, R), tl.float32))
    at = low * 0
    for i in tl.static_range(PH):
        state = phase(
            state, q_ptr, row_at, valid, normal, factor, spans[i][2] - Q + 1 + row % Q, KEYS[i], VALUES[i], EXTENTS[i],
            spans[i], cell.to(tl.int64), low, high, at, KEY_FORMS[i], VALUE_FORMS[i],
            WHOLE_COSTS[i], PART_COSTS[i], part(KEY_FORMS[i], VALUE_FORMS[i], FULL_STEP), i == PH - 1 and Q > 1,
            ROWS, D, DV, R, STAGES, PART_STAGES, ASM, cap, CAP,
        )  # fmt: skip
        at += spans[i][5] * WHOLE_COSTS[i] + spans[i][9] * PART_COSTS[i]
    top, total, acc = state

    if parts == 1:
        if SINKS:
            total += tl.exp2(sink_of(sinks_ptr, head, row, valid, GROUP, Q, SINKS) - top)
        out = rounded(acc / total[None, :], LIMIT).to(out_ptr.dtype.element_ty)
        target = place_of(out_ptr, sequence, head, row, heads, GROUP, Q, DV)
        tl.store(target[None, :] + tl.arange(0, DV)[:, None], out, mask=valid[None, :])
    else:
        place = cell * tl.num_programs(0) + block
        first = place.to(tl.int64) * parts
        write_part(stat_ptr, acc_ptr, first + index, top, total, acc, valid, R, DV)
        if parts <= fused:
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived_ptr + place, 0)
                for r in tl.range(0, tl.minimum(ROWS - block * R, R)):
                    sink = sink_of(sinks_ptr, head, block * R + r, r >= 0, GROUP, Q, SINKS)
                    merged = merge_row(stat_ptr, acc_ptr, first, parts, r, sink, R, DV, 16, SINKS)
                    target = place_of(out_ptr, sequence, head, block * R + r, heads, GROUP, Q, DV)
                    tl.store(target + tl.arange(0, DV), rounded(merged, LIMIT).to(out_ptr.dtype.element_ty))
