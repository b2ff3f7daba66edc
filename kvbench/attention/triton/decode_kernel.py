"""Decode attention over all phases of a layer in one Triton launch.

The host fixes the grid: (blocks of query rows, parts of the work, sequences x KV heads). The table of phases is in
device memory. The costs of all tiles of all phases are laid end to end on a line, which is divided equally among the
programs. A program processes the tiles that begin in its interval. Softmax does not depend on the order of tokens, so
one running maximum, sum and accumulator serve all formats. Partial results are merged by the last program to finish, or
by a second kernel, :func:`kvbench.attention.triton.merge_kernel.merge`.

Shapes, here and in the modules that this one calls: D channels of a key (``KEY_DIM``), Dv of a value (``VALUE_DIM``), R
query rows of a program (``BLOCK_ROWS``). A KV head has one query row for each of its query heads and new tokens.
docs/kernels.md explains tiles, phases and the algebra of scales.

Parameters that mean the same in all of these modules (more in :mod:`kvbench.attention.triton.tiles`):
    heads, GROUP, NEW_TOKENS: number of KV heads, of query heads per KV head, and of new tokens of the step, q.
    cell: index of the pair of sequence and KV head: ``sequence * KV heads + KV head``, int64.
    row_at: offset of each query row from the pointer to the queries, in elements, ``[R]``.
    valid: which of the R query rows exist, bool ``[R]``; the others are padding and read as zeros.
    KEY, VALUE: encoded formats (:func:`kvbench.attention.triton.codes.format_number`).
    KEYS, VALUES: pointers to buffers in these formats (:func:`located`).
    top, total, acc: the running state of the softmax: maximum of the scores in bits (base-2 logarithms), ``[R]``; sum
        of the weights, ``[R]``; weighted sum of the values, not yet divided by `total`, ``[Dv, R]``.
    stat_ptr, acc_ptr: buffers of partial results (:func:`kvbench.attention.triton.merge_kernel.write_part`).
    cap, CAPPED: ``softcap * log2(e)``; True if scores have a softcap.
    sinks_ptr, SINKS: the sinks, one logit per query head; True if the model has any.
    LIMIT: largest number of the output's dtype.
    STAGES: pipeline stages of the loop.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import (
    CHANNEL,
    FULL,
    axis,
    channel_group_count,
    group,
    kind,
    planes,
    width,
    window,
    word_row_count,
)
from kvbench.attention.triton.merge_kernel import NOTHING, clamped, merge_row, place_of, sink_of, write_part
from kvbench.attention.triton.walk import load_query, walk


@triton.constexpr_function
def whole_tile(key, value):
    """Return True if the kernel can process a whole tile of a phase in one iteration.

    It can if keys and values are both packed, in fields of equal width.
    """
    return kind(key) != 0 and kind(value) != 0 and width(key) == width(value)


@triton.constexpr_function
def part_of_tile(key, value, full):
    """Return how many tokens of a tile one iteration processes if it does not process the whole tile.

    Such a part lies inside a single field of the packed keys and inside a single field of the packed values.

    Args:
        full: the number to return if keys and values are both in full precision.
    """
    sizes = [word_row_count(form) for form in (key, value) if kind(form) != 0]
    return min(sizes) if sizes else full


@triton.jit
def located(PARTS, FORM: tl.constexpr, CHANNELS: tl.constexpr, cell, extent, groups, tile):
    """Move the buffer pointers of a phase's keys or values to one sequence and KV head and, if packed, to one tile.

    If groups may cross tile boundaries, the pointers to scales and minima are not moved to the tile, because the number
    of a group follows from a token's index in the segment. The index of the tile's first token is then appended to the
    result.

    Args:
        PARTS: pointers to the words (one or two planes), the scales and the minima; in full precision, the pointer to
            the only buffer.
        extent: room of a head's buffer, in tiles if packed and in tokens if in full precision.
        groups: number of rows of a head's scales and of its minima, one per group of tokens; used only for per-channel
            formats.
        tile: index of the tile in which the phase begins.

    Returns:
        The moved pointers, in the order of `PARTS`.
    """
    # `cell` is 64 bits wide: a batch of long sequences passes 2**31 elements
    if kind(FORM) == FULL:
        moved = (PARTS[0] + cell * extent * CHANNELS,)
    else:
        moved = ()
        for i in tl.static_range(planes(FORM)):
            moved = moved + (PARTS[i] + (cell * extent + tile) * (word_row_count(FORM) * CHANNELS),)
        for i in tl.static_range(planes(FORM), planes(FORM) + 2):
            # scales, then minima: by group of tokens, or by token
            if window(FORM):
                moved = moved + (PARTS[i] + cell * groups * CHANNELS,)
            elif axis(FORM) == CHANNEL:
                moved = moved + (PARTS[i] + (cell * groups + tile * (128 // group(FORM))) * CHANNELS,)
            else:
                moved = moved + (PARTS[i] + (cell * extent + tile) * (128 * channel_group_count(FORM, CHANNELS)),)
        if window(FORM):
            moved = moved + (tile * 128,)
    return moved


@triton.jit
def span(table_ptr, KEY: tl.constexpr, VALUE: tl.constexpr, PART_TOKENS: tl.constexpr):
    """Read where a phase lies from the table of phases, and divide its tokens into whole tiles and parts of tiles.

    A phase may begin and end within a tile. So whole tiles are in the middle, and parts of tiles precede and follow
    them. If tiles of the phase cannot be processed whole (:func:`whole_tile`), all tokens are in parts.

    Args:
        table_ptr: pointer to the line: first key token, first value token, number of tokens.

    Returns:
        A tuple of ten scalars. Tiles and parts are numbered from the beginning of the phase's first tile.

        key_first, value_first, count: the line of the table.
        lead: number of tokens in the phase's first tile that precede the phase.
        tile, tiles: index of the first whole tile, and how many whole tiles there are.
        begin, before: index of the first part, and how many parts precede the whole tiles.
        behind, pieces: index of the first part after the whole tiles, and how many parts there are before and after
        them.
    """
    key_first = tl.load(table_ptr)
    value_first = tl.load(table_ptr + 1)
    count = tl.load(table_ptr + 2)
    # a phase may begin inside a tile; if keys and values are both packed, at the same place in it (Work.table)
    if kind(KEY) != FULL:
        lead = key_first % 128
    elif kind(VALUE) != FULL:
        lead = value_first % 128
    else:
        lead = key_first * 0  # a zero that is a tensor on either branch
    end = lead + count
    # whole tiles in the middle, parts at both ends; parts only if whole tiles cannot be processed at once
    if whole_tile(KEY, VALUE):
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
    """Return the estimated cost of a phase: the sum of the costs of its whole tiles and parts of tiles."""
    _, _, _, _, _, tiles, _, _, _, pieces = SPAN
    return tiles * WHOLE_COST + pieces * PART_COST


@triton.jit
def share(low, high, at, steps, cost: tl.constexpr):
    """Return the range of iterations that a program has to do, out of a series of iterations of equal cost.

    To balance the load, the costs of all iterations over a head's tokens are laid end to end on a line, and each
    program gets an interval of the line. It does the iterations that begin in its interval.

    Args:
        low: start of the program's interval.
        high: end of the program's interval, exclusive.
        at: place of the series on the line: total cost of everything before its first iteration.
        steps: number of iterations in the series.
        cost: cost of one iteration.

    Returns:
        The first iteration, and one past the last; equal if the program has none of them to do.
    """
    # an iteration belongs to the program in whose interval it begins, so none is done twice and none is left out
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
    """Add a program's share of one phase to its running softmax and weighted sum of values.

    The share is the tiles and parts of tiles that begin in the program's interval of costs (:func:`share`).

    Args:
        state: `top`, `total` and `acc`.
        normal: factor that brings the largest magnitude of each query row into [0.5, 1), a power of two, ``[R]``.
        seen: number of tokens of the phase that each query row sees, ``[R]``; used only if `CAUSAL`.
        EXTENT: four sizes: `extent` and `groups` of :func:`located` for the keys, then for the values.
        low: start of the program's interval of costs.
        high: end of the program's interval, exclusive.
        at: total cost of the phases before this one.
        CAUSAL: True if query rows see different numbers of tokens, as in the last phase of a step with several new
            tokens.
    """
    CHANNEL_GROUPS: tl.constexpr = channel_group_count(KEY, KEY_DIM)
    # with one query row, biases are sums over a vector: the seven padding columns of the product need none
    ONE_ROW: tl.constexpr = ROWS == 1 and kind(KEY) != FULL and axis(KEY) == CHANNEL
    # codes are fp16 in any model; exact keys are multiplied in their own dtype
    dtype: tl.constexpr = KEYS[0].dtype.element_ty if kind(KEY) == FULL else tl.float16
    top, total, acc = state
    key_first, value_first, count, lead, tile, tiles, begin, before, behind, pieces = SPAN
    key_room, key_groups, value_room, value_groups = EXTENT
    keys = located(KEYS, KEY, KEY_DIM, cell, key_room, key_groups, (key_first - lead) // 128)
    values = located(VALUES, VALUE, VALUE_DIM, cell, value_room, value_groups, (value_first - lead) // 128)
    # in the order of costs, whole tiles come before parts; a program may have some of both, of either, or none
    if whole_tile(KEY, VALUE):
        first, last = share(low, high, at, tiles, WHOLE_COST)
        at += tiles * WHOLE_COST
        if first < last:
            query, sums = load_query(q_ptr, row_at, valid, normal, KEY_DIM, CHANNEL_GROUPS, dtype, ONE_ROW)
            top, total, acc = walk(
                top, total, acc, keys, values, KEY, VALUE, query, sums, factor, first + tile, last + tile,
                0, 0, lead, count, key_first, value_first, seen,
                KEY_DIM, VALUE_DIM, BLOCK_ROWS, True, PART_TOKENS, STAGES, False, ONE_ROW, ASM, cap, CAPPED,
            )  # fmt: skip
    # the parts before and after the whole tiles; only these need a mask
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
def decode_attention(
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
    """Compute the attention of a step's new tokens over all cached tokens, in whatever formats they are stored.

    Grid: (blocks of R query rows, parts into which the tokens are split, sequences x KV heads). Tokens are split such
    that the programs have equal estimated costs (:func:`share`).

    Args:
        table_ptr: pointer to the table of phases, int32 ``[B, phases, 3]`` (:class:`kvbench.attention.phases.Work`).
        KEYS: for each phase, pointers to the words, the scales and the minima of its keys; in full precision, the
            pointer to the only buffer.
        VALUES: the same for the values of each phase.
        EXTENTS: for each phase, four sizes: `extent` and `groups` of :func:`located` for the keys, then for the values.
        arrived_ptr: pointer to counters of finished programs, one per sequence, KV head and block of query rows; zero
            before and after the launch.
        q_batch, q_head, q_token: strides of the queries over sequences, heads and new tokens, in elements.
        scaling: the model's factor s on scores, converted for base-2 exponentials: ``s * log2(e)``; with a softcap,
            ``2 * s * log2(e) / softcap``.
        cap: ``softcap * log2(e)``; 0 without a softcap.
        fused: largest number of partial results that the last program to finish merges. More are left to a second
            launch, :func:`kvbench.attention.triton.merge_kernel.merge`.
        WHOLE_COSTS: for each phase, the cost of a whole tile.
        PART_COSTS: for each phase, the cost of a part of a tile.
        BLOCK_ROWS: number of query rows of a program, R: a power of two, at least 8.
        FULL_STEP: number of tokens per iteration if keys and values are in full precision.
        STAGES: pipeline stages of the loop over whole tiles.
        PART_STAGES: pipeline stages of the loop over parts of tiles.
    """
    block = tl.program_id(0)  # fastest: programs that read the same tiles run side by side
    index = tl.program_id(1)
    parts = tl.num_programs(1)
    cell = tl.program_id(2)
    sequence = cell // heads
    head = cell % heads
    # the rows of one query head are its new tokens in order
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ROWS: tl.constexpr = GROUP * NEW_TOKENS
    valid = row < ROWS
    row_at = sequence.to(tl.int64) * q_batch + (head * GROUP + row // NEW_TOKENS) * q_head + row % NEW_TOKENS * q_token

    # Divide all phases into shares of equal cost: every program computes the sum itself, from the table.
    PHASES: tl.constexpr = len(KEY_FORMS)
    spans = ()
    cost = sequence * 0
    for i in tl.static_range(PHASES):
        phase_span = span(
            table_ptr + (sequence * PHASES + i) * 3,
            KEY_FORMS[i],
            VALUE_FORMS[i],
            part_of_tile(KEY_FORMS[i], VALUE_FORMS[i], FULL_STEP),
        )
        cost += price(phase_span, WHOLE_COSTS[i], PART_COSTS[i])
        spans = spans + (phase_span,)
    # in 64 bits, as cost times the number of parts may pass 2**31
    low = (cost.to(tl.int64) * index // parts).to(tl.int32)
    high = (cost.to(tl.int64) * (index + 1) // parts).to(tl.int32)

    # Each query row is scaled to a largest magnitude in [0.5, 1), so that times any fp16 scale it stays within fp16.
    d = tl.arange(0, KEY_DIM)
    rows_of_queries = tl.load(q_ptr + row_at[None, :] + d[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(rows_of_queries), 0).to(tl.int32, bitcast=True) >> 23  # biased by 127
    # bounds that keep both powers of two below representable in fp32, for rows of zeros too
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    # 2**(126 - E), and its inverse times the scaling, for the biased exponent E of the largest magnitude
    normal = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent + 1) << 23).to(tl.float32, bitcast=True) * scaling

    # running maximum, sum of weights, weighted values; with an empty share they stay like this and merge as nothing
    state = (
        tl.full((BLOCK_ROWS,), NOTHING, tl.float32),
        tl.zeros((BLOCK_ROWS,), tl.float32),
        tl.zeros((VALUE_DIM, BLOCK_ROWS), tl.float32),
    )
    at = low * 0  # a zero that is a tensor from the first phase on
    for i in tl.static_range(PHASES):
        _, _, count, _, _, _, _, _, _, _ = spans[i]
        seen = count - NEW_TOKENS + 1 + row % NEW_TOKENS  # in the last phase, each new token sees one token more
        state = phase(
            state, q_ptr, row_at, valid, normal, factor, seen, KEYS[i], VALUES[i], EXTENTS[i], spans[i],
            cell.to(tl.int64), low, high, at, KEY_FORMS[i], VALUE_FORMS[i], WHOLE_COSTS[i], PART_COSTS[i],
            part_of_tile(KEY_FORMS[i], VALUE_FORMS[i], FULL_STEP), i == PHASES - 1 and NEW_TOKENS > 1,
            ROWS, KEY_DIM, VALUE_DIM, BLOCK_ROWS, STAGES, PART_STAGES, ASM, cap, CAPPED,
        )  # fmt: skip
        at += price(spans[i], WHOLE_COSTS[i], PART_COSTS[i])
    top, total, acc = state

    if parts == 1:
        # nothing to merge: the sink only adds a term to the sum of weights, as it has no value
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
            # all threads must have written before one of them counts the program as arrived
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived_ptr + place, 0)  # reset for the next step, as a captured graph does not zero it
                for r in tl.range(0, tl.minimum(ROWS - block * BLOCK_ROWS, BLOCK_ROWS)):
                    sink = sink_of(sinks_ptr, head, block * BLOCK_ROWS + r, r >= 0, GROUP, NEW_TOKENS, SINKS)
                    merged = merge_row(stat_ptr, acc_ptr, first, parts, r, sink, BLOCK_ROWS, VALUE_DIM, 16, SINKS)
                    target = place_of(
                        out_ptr, sequence, head, block * BLOCK_ROWS + r, heads, GROUP, NEW_TOKENS, VALUE_DIM
                    )
                    tl.store(target + tl.arange(0, VALUE_DIM), clamped(merged, LIMIT).to(out_ptr.dtype.element_ty))
