"""Decode attention over all phases of a layer in one Triton launch.

The grid is fixed by the host: (blocks of query rows, parts of the work, sequences x KV heads). The table of the phases
lies in device memory. Each program adds up what every phase costs, takes the interval of that sum that is its own, and
walks the tiles whose beginning lies in it, whatever their phases: softmax does not mind the order, so one running
maximum, sum and accumulator serve all formats. Partial results are merged by the last program to finish, or by
:mod:`kvbench.attention.triton.merge`.

Shapes, here and in the modules that this one calls: D channels of a key (``KEY_DIM``), Dv of a value (``VALUE_DIM``), R
query rows of a program (``BLOCK_ROWS``). Query rows of a KV head are its query heads times the new tokens of the step.
docs/kernels.md explains tiles, phases and the algebra of scales.
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
    """Return True if tiles are walked whole: both sides packed, with equally many tokens in a field.

    Args:
        key, value: formats of the phase (:func:`kvbench.attention.triton.codes.number`).
    """
    return kind(key) != 0 and kind(value) != 0 and width(key) == width(value)


@triton.constexpr_function
def part(key, value, full):
    """Return the tokens of a step where tiles are not walked whole: inside one field of every packed side.

    Args:
        key, value: formats of the phase.
        full: tokens of a step where both are exact.
    """
    sizes = [rows(form) for form in (key, value) if kind(form) != 0]
    return min(sizes) if sizes else full


@triton.jit
def located(PARTS, FORM: tl.constexpr, CHANNELS: tl.constexpr, cell, extent, groups, tile):
    """Return the pointers of one (sequence, KV head), moved to its `tile` where packed.

    Groups of a window are found by a token's number, so their parameters stay where they are, and the number of the
    tile's first token goes with them, as the last of the tuple.

    Args:
        PARTS: pointers of one side of a phase: words (one or two planes), scales and minima; or one buffer.
        FORM: its format.
        CHANNELS: of a head, on this side.
        cell: number of the (sequence, KV head), int64.
        extent: tiles of a packed buffer, tokens of an exact one.
        groups: rows of per-channel parameters.
        tile: the tile that the phase begins in.
    """
    # `cell` is 64 bits wide: a batch of long sequences passes 2**31 elements
    if kind(FORM) == FULL:
        moved = (PARTS[0] + cell * extent * CHANNELS,)
    else:
        moved = ()
        for i in tl.static_range(planes(FORM)):
            moved = moved + (PARTS[i] + (cell * extent + tile) * (rows(FORM) * CHANNELS),)
        for i in tl.static_range(planes(FORM), planes(FORM) + 2):
            # scales, then minima: by group of tokens, or by token
            if window(FORM):
                moved = moved + (PARTS[i] + cell * groups * CHANNELS,)
            elif axis(FORM) == CHANNEL:
                moved = moved + (PARTS[i] + (cell * groups + tile * (128 // group(FORM))) * CHANNELS,)
            else:
                moved = moved + (PARTS[i] + (cell * extent + tile) * (128 * blocks(FORM, CHANNELS)),)
        if window(FORM):
            moved = moved + (tile * 128,)
    return moved


@triton.jit
def span(table_ptr, KEY: tl.constexpr, VALUE: tl.constexpr, PART_TOKENS: tl.constexpr):
    """Return what a row of the table says of a phase, and how it is cut into whole tiles and parts of tiles.

    Args:
        table_ptr: at the phase's line: first key token, first value token, tokens.
        KEY, VALUE: formats of the phase.
        PART_TOKENS: tokens of a part of a tile (:func:`part`).

    Returns:
        key_first, value_first, count: the line itself.
        lead: tokens of the phase's first tile that are not of the phase.
        tile, tiles: first whole tile, counted from that tile, and how many are walked whole.
        begin, before: first part of a tile, and how many lie before the whole tiles.
        behind, pieces: first part behind the whole tiles, and parts in all.
    """
    key_first = tl.load(table_ptr)
    value_first = tl.load(table_ptr + 1)
    count = tl.load(table_ptr + 2)
    # a phase may begin inside a tile; where both sides are packed they agree on the place (phases.lines)
    if kind(KEY) != FULL:
        lead = key_first % 128
    elif kind(VALUE) != FULL:
        lead = value_first % 128
    else:
        lead = key_first * 0  # a zero that is a tensor on either branch
    end = lead + count
    # whole tiles in the middle; what is ragged at either end is walked in parts, as is everything next to exact tokens
    if whole(KEY, VALUE):
        tile = (lead + 127) // 128
        tiles = tl.maximum(end // 128 - tile, 0)
    else:
        tile = (end + 127) // 128
        tiles = lead * 0
    begin = lead // PART_TOKENS
    before = tl.maximum((tl.minimum(end, tile * 128) + PART_TOKENS - 1) // PART_TOKENS - begin, 0)
    behind = (tile + tiles) * (128 // PART_TOKENS)
    pieces = before + tl.maximum((end + PART_TOKENS - 1) // PART_TOKENS - behind, 0)
    return key_first, value_first, count, lead, tile, tiles, begin, before, behind, pieces


@triton.jit
def price(SPAN, WHOLE_COST: tl.constexpr, PART_COST: tl.constexpr):
    """Return the cost of a phase: its whole tiles and its parts of tiles."""
    _, _, _, _, _, tiles, _, _, _, pieces = SPAN
    return tiles * WHOLE_COST + pieces * PART_COST


@triton.jit
def share(low, high, at, steps, cost: tl.constexpr):
    """Return the steps of a run that begin in the interval ``[low, high)`` of costs: first, and one past the last.

    Args:
        low, high: the program's interval.
        at: cost at which the run begins.
        steps: steps of the run.
        cost: of one step.
    """
    # a step belongs to the program in whose interval it begins, so none is walked twice and none left out
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
    PART_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PART_STAGES: tl.constexpr,
    ASM: tl.constexpr,
    cap,
    CAPPED: tl.constexpr,
):
    """Walk the tiles and parts of tiles of a phase that begin in the interval ``[low, high)`` of costs.

    The new state is returned.

    Args:
        state: running maximum ``[R]``, sum of weights ``[R]`` and weighted values ``[Dv, R]``.
        q_ptr: the query. row_at: offset of each query row ``[R]``.
        valid: query rows that exist ``[R]``.
        normal: power of two that normalises each query row. factor: what takes a score of it back to bits.
        seen: tokens of the phase that each query row sees ``[R]``.
        KEYS, VALUES: pointers of the phase's two sides (:func:`located`).
        EXTENT: room of the keys in tiles or tokens, their rows of parameters; the same of the values.
        SPAN: what :func:`span` returned.
        cell: number of the (sequence, KV head), int64.
        low, high: the program's interval of costs. at: cost at which the phase begins.
        KEY, VALUE: formats of the phase.
        WHOLE_COST, PART_COST: cost of a whole tile, and of a part of one.
        PART_TOKENS: tokens of a part of a tile.
        CAUSAL: query rows see different numbers of tokens (the last phase of a step of several tokens).
        ROWS: query rows of the KV head.
        KEY_DIM, VALUE_DIM, BLOCK_ROWS: D, Dv and R.
        STAGES, PART_STAGES: stages of the loop over whole tiles, and over parts.
        ASM: inline PTX, or plain operations (the interpreter).
        cap: largest score in bits, where scores are capped. CAPPED: they are.
    """
    CHANNEL_GROUPS: tl.constexpr = blocks(KEY, KEY_DIM)
    # with one query row, biases are sums over a vector: the product's seven other columns need none
    ONE_ROW: tl.constexpr = ROWS == 1 and kind(KEY) != FULL and axis(KEY) == CHANNEL
    # codes are fp16 whatever the model's dtype; exact keys are multiplied in their own
    dtype: tl.constexpr = KEYS[0].dtype.element_ty if kind(KEY) == FULL else tl.float16
    top, total, acc = state
    key_first, value_first, count, lead, tile, tiles, begin, before, behind, pieces = SPAN
    key_room, key_groups, value_room, value_groups = EXTENT
    keys = located(KEYS, KEY, KEY_DIM, cell, key_room, key_groups, (key_first - lead) // 128)
    values = located(VALUES, VALUE, VALUE_DIM, cell, value_room, value_groups, (value_first - lead) // 128)
    # the whole tiles come first in the order of costs, then the parts; a program may have some of either, or none
    if whole(KEY, VALUE):
        first, last = share(low, high, at, tiles, WHOLE_COST)
        at += tiles * WHOLE_COST
        if first < last:
            query, sums = load_query(q_ptr, row_at, valid, normal, KEY_DIM, CHANNEL_GROUPS, dtype, ONE_ROW)
            top, total, acc = walk(
                top, total, acc, keys, values, KEY, VALUE, query, sums, factor, first + tile, last + tile,
                0, 0, lead, count, key_first, value_first, seen,
                KEY_DIM, VALUE_DIM, BLOCK_ROWS, True, PART_TOKENS, STAGES, False, ONE_ROW, ASM, cap, CAPPED,
            )  # fmt: skip
    # before and behind the whole tiles; only these need a mask
    first, last = share(low, high, at, pieces, PART_COST)
    if first < last:
        query, sums = load_query(q_ptr, row_at, valid, normal, KEY_DIM, CHANNEL_GROUPS, dtype, ONE_ROW)
        top, total, acc = walk(
            top, total, acc, keys, values, KEY, VALUE, query, sums, factor, first + begin, last + begin,
            begin + before, behind - begin - before, lead, count, key_first, value_first, seen,
            KEY_DIM, VALUE_DIM, BLOCK_ROWS, False, PART_TOKENS, PART_STAGES, CAUSAL, ONE_ROW, ASM, cap, CAPPED,
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
    """Attention of `NEW_TOKENS` query tokens of `GROUP` query heads a KV head to every token of the phases.

    Grid: (blocks of R query rows, parts of the work, sequences x KV heads).

    Args:
        q_ptr: queries ``[B, Hq, q, D]``. out_ptr: the output ``[B, q, Hq, Dv]``.
        table_ptr: int32 ``[B, phases, 3]`` (:class:`kvbench.attention.phases.Work`).
        KEYS, VALUES: for each phase the pointers of its parts: words and two parameters, or a buffer.
        EXTENTS: for each phase the extents that :func:`located` takes, of keys and of values.
        stat_ptr, acc_ptr: partial results (:func:`write_part`). arrived_ptr: a zeroed counter for each merge.
        sinks_ptr: one more logit for each query head (`SINKS`).
        q_batch, q_head, q_token: strides of the query, in elements.
        heads: KV heads.
        scaling: factor on the scores times log2(e), or, where they are capped, on their doubles over the cap.
        cap: largest score, times log2(e).
        fused: up to so many partial results are merged by the last program to finish; more are left to `merge`.
        KEY_FORMS, VALUE_FORMS: :func:`kvbench.attention.triton.codes.number` for each phase.
        WHOLE_COSTS, PART_COSTS: for each phase the cost of a whole tile and of a part of one.
        KEY_DIM, VALUE_DIM: channels of a key and of a value, D and Dv.
        GROUP: query heads of a KV head.
        NEW_TOKENS: new tokens of the step, q.
        BLOCK_ROWS: query rows of a program, R: a power of two, 8 at least.
        FULL_STEP: tokens of a step where keys and values are exact.
        STAGES, PART_STAGES: stages of the loop over whole tiles, and over parts of tiles.
        LIMIT: largest number of the output's dtype.
        CAPPED: scores have a softcap. SINKS: the model has sinks.
        ASM: inline PTX, or plain operations (the interpreter).
    """
    block = tl.program_id(0)  # fastest: programs that read the same tiles run side by side
    index = tl.program_id(1)
    parts = tl.num_programs(1)
    cell = tl.program_id(2)
    sequence = cell // heads
    head = cell % heads
    # rows of one query head are its new tokens, one after another
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ROWS: tl.constexpr = GROUP * NEW_TOKENS
    valid = row < ROWS
    row_at = sequence.to(tl.int64) * q_batch + (head * GROUP + row // NEW_TOKENS) * q_head + row % NEW_TOKENS * q_token

    # Cut all phases into equal shares of cost: every program does this sum by itself, from the table.
    PHASES: tl.constexpr = len(KEY_FORMS)
    spans = ()
    cost = sequence * 0
    for i in tl.static_range(PHASES):
        phase_span = span(
            table_ptr + (sequence * PHASES + i) * 3,
            KEY_FORMS[i],
            VALUE_FORMS[i],
            part(KEY_FORMS[i], VALUE_FORMS[i], FULL_STEP),
        )
        cost += price(phase_span, WHOLE_COSTS[i], PART_COSTS[i])
        spans = spans + (phase_span,)
    # in 64 bits, as cost times the number of parts may pass 2**31
    low = (cost.to(tl.int64) * index // parts).to(tl.int32)
    high = (cost.to(tl.int64) * (index + 1) // parts).to(tl.int32)

    # A query row is brought to a largest magnitude in [0.5, 1): times any fp16 scale it stays in fp16.
    d = tl.arange(0, KEY_DIM)
    largest = tl.load(q_ptr + row_at[None, :] + d[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(largest), 0).to(tl.int32, bitcast=True) >> 23
    # bounds that keep both powers of two below representable in fp32, for rows of zeros too
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    normal = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent + 1) << 23).to(tl.float32, bitcast=True) * scaling

    # running maximum, sum of weights, weighted values; a program whose share is empty leaves them so, which merges well
    state = (
        tl.full((BLOCK_ROWS,), NOTHING, tl.float32),
        tl.zeros((BLOCK_ROWS,), tl.float32),
        tl.zeros((VALUE_DIM, BLOCK_ROWS), tl.float32),
    )
    at = low * 0
    for i in tl.static_range(PHASES):
        _, _, count, _, _, _, _, _, _, _ = spans[i]
        seen = count - NEW_TOKENS + 1 + row % NEW_TOKENS  # of the last phase the newest tokens, each one more
        state = phase(
            state, q_ptr, row_at, valid, normal, factor, seen, KEYS[i], VALUES[i], EXTENTS[i], spans[i],
            cell.to(tl.int64), low, high, at, KEY_FORMS[i], VALUE_FORMS[i], WHOLE_COSTS[i], PART_COSTS[i],
            part(KEY_FORMS[i], VALUE_FORMS[i], FULL_STEP), i == PHASES - 1 and NEW_TOKENS > 1,
            ROWS, KEY_DIM, VALUE_DIM, BLOCK_ROWS, STAGES, PART_STAGES, ASM, cap, CAPPED,
        )  # fmt: skip
        at += price(spans[i], WHOLE_COSTS[i], PART_COSTS[i])
    top, total, acc = state

    if parts == 1:
        # nothing to merge: the sink is one more term of the sum, without a value
        if SINKS:
            total += tl.exp2(sink_of(sinks_ptr, head, row, valid, GROUP, NEW_TOKENS, SINKS) - top)
        out = rounded(acc / total[None, :], LIMIT).to(out_ptr.dtype.element_ty)
        target = place_of(out_ptr, sequence, head, row, heads, GROUP, NEW_TOKENS, VALUE_DIM)
        tl.store(target[None, :] + tl.arange(0, VALUE_DIM)[:, None], out, mask=valid[None, :])
    else:
        place = cell * tl.num_programs(0) + block
        first = place.to(tl.int64) * parts
        write_part(stat_ptr, acc_ptr, first + index, top, total, acc, valid, BLOCK_ROWS, VALUE_DIM)
        if parts <= fused:
            # all threads must have written before one of them counts the program as arrived
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived_ptr + place, 0)  # ready for the next step: a captured graph zeroes nothing
                for r in tl.range(0, tl.minimum(ROWS - block * BLOCK_ROWS, BLOCK_ROWS)):
                    sink = sink_of(sinks_ptr, head, block * BLOCK_ROWS + r, r >= 0, GROUP, NEW_TOKENS, SINKS)
                    merged = merge_row(stat_ptr, acc_ptr, first, parts, r, sink, BLOCK_ROWS, VALUE_DIM, 16, SINKS)
                    target = place_of(
                        out_ptr, sequence, head, block * BLOCK_ROWS + r, heads, GROUP, NEW_TOKENS, VALUE_DIM
                    )
                    tl.store(target + tl.arange(0, VALUE_DIM), rounded(merged, LIMIT).to(out_ptr.dtype.element_ty))
