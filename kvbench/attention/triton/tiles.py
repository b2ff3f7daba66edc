"""One iteration of decode attention inside a Triton kernel: the scores of a block of tokens, and their weighted values.

Tokens are the rows of the products and query rows the columns, so a few query rows are padded to 8 columns rather than
to 16 rows. Codes are never multiplied by scales: the scales of keys go into the query (per channel) or the score (per
token), those of values into the weights; minima become a bias of the score and a sum over the weights. Each block of
tokens is accumulated separately and then added in fp32, because a long chain of matrix instructions into one
accumulator truncates, and always downwards, as codes are never negative.

A *phase* is a run of consecutive tokens whose formats do not change. Its first tile is the one that contains its first
token. An index "counted from the phase's first tile" is 0 for the first token of that tile, even if the phase begins
later in the tile. The *normalised query* is the query with each row multiplied by a power of two that brings its
largest magnitude into [0.5, 1). A *part of a tile* is a few consecutive tokens of it.

Parameters of most functions:
    PARTS: pointers to the buffers of keys or of values (words, scales and minima; not parts of tiles), moved to the
        phase's first tile (:func:`kvbench.attention.triton.decode_kernel.located`).
    FORM: their format (:func:`kvbench.attention.triton.codes.format_number`).
    KEY_DIM, VALUE_DIM: channels of a key, D, and of a value, Dv. R query rows are the columns of all products.
    stored: parameters of the iteration's tokens, loaded one iteration ahead (:func:`readied`); empty if per channel.
    query, sums: normalised query, a tuple of ``[D / groups, R]`` for the groups of channels, and their sums ``[R]``.
    factor: factor that converts a score of the normalised query to bits (a base-2 logarithm), ``[R]``.
    ONE_ROW: the query has one row; `sums` then holds that row instead.
    ASM: True: inline PTX; False: plain operations (in the interpreter).
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
    channel_parameters,
    field,
    field_at,
    fields,
    group,
    group_of,
    group_run,
    kind,
    lift,
    meeting,
    of_tokens,
    planes,
    ready,
    window,
    word_row_count,
)
from kvbench.attention.triton.windows import columns_of_groups, group_at, own_column, window_scores

#: value of code 1 in the lowest field, as an fp16 number
TINY = tl.constexpr(2.0**-24)


@triton.jit
def exact_dot(a, b, ASM: tl.constexpr):
    """Return the product of two fp16 or bf16 blocks (not codes), ``[M, K]`` and ``[K, N]``, accumulated in fp32.

    Args:
        ASM: False in the interpreter, which cannot multiply bf16; the blocks are then converted to fp32.
    """
    if ASM:
        c = tl.dot(a, b)
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32))
    return c


@triton.jit
def words_of(PARTS, FORM: tl.constexpr, base, at):
    """Load a block of the int16 words that hold packed codes, from one plane or, for 8-bit codes, from both.

    Args:
        base: offset of the block from the start of each plane, in words; a scalar.
        at: offset of each word from the first one of its block; the same for all blocks of a tile.

    Returns:
        A tuple with one block of int16 words per plane, in the shape of `at`.
    """
    # with a scalar base and constant offsets, the loads of a tile share their address arithmetic
    words = (tl.load(PARTS[0] + base + at),)
    if planes(FORM) == 2:
        words = words + (tl.load(PARTS[1] + base + at),)
    return words


@triton.jit
def parameters_of(PARTS, FORM: tl.constexpr, CHANNELS: tl.constexpr, start, N: tl.constexpr, COUNT: tl.constexpr):
    """Load the scales and minima (or zero points) of `COUNT` adjacent blocks of `N` tokens, for a per-token format.

    Args:
        start: index of the first token of the first block, counted from the first token of the phase's first tile.

    Returns:
        A tuple with one entry per block, as :func:`kvbench.attention.triton.codes.of_tokens` returns it; empty if
        tokens have no parameters of their own (axis ``channel``, or full precision).
    """
    stored = ()
    if kind(FORM) != FULL and axis(FORM) != CHANNEL:
        params = PARTS[planes(FORM) :]  # behind the words
        for i in tl.static_range(COUNT):
            stored = stored + (of_tokens(params, channel_group_count(FORM, CHANNELS), start + i * N, tl.arange(0, N)),)
    return stored


@triton.jit
def readied(stored, FORM: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr):
    """Prepare scales and minima from :func:`parameters_of` for use in the next iteration of a loop.

    A kernel loads those of a tile one iteration before it uses them, and keeps them in registers until then.

    Returns:
        A tuple with one entry per block, as :func:`kvbench.attention.triton.codes.ready` returns it: fp32 where a token
        has one group, packed integers where it has several. Empty if tokens have no parameters of their own.
    """
    in_fp32 = ()
    if kind(FORM) != FULL and axis(FORM) != CHANNEL:
        for i in tl.static_range(COUNT):
            in_fp32 = in_fp32 + (ready(stored[i], FORM, channel_group_count(FORM, CHANNELS)),)
    return in_fp32


@triton.jit
def tile_scores(
    PARTS,
    FORM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    tile,
    stored,
    query,
    sums,
    factor,
    ONE_ROW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute the attention scores of all query rows with a whole tile of packed keys.

    Args:
        tile: index of the tile, counted from the one to which `PARTS` point.

    Returns:
        Scores in bits: a tuple of ``[tokens of a field, R]``, one per field of the words.
    """
    WORD_ROWS: tl.constexpr = word_row_count(FORM)
    CHANNEL_GROUPS: tl.constexpr = channel_group_count(FORM, KEY_DIM)
    base = tile * (WORD_ROWS * KEY_DIM)
    at = tl.arange(0, WORD_ROWS)[:, None] * KEY_DIM + tl.arange(0, KEY_DIM // CHANNEL_GROUPS)[None, :]
    scores = ()
    if window(FORM):
        words = words_of(PARTS, FORM, base, at)
        first = PARTS[planes(FORM) + 2] + tile * 128  # index in the segment of the tile's first token
        # one query row, and a column for each group of the tile: one product per field instead of two
        ALONE: tl.constexpr = ONE_ROW and meeting(FORM) <= query[0].shape[1]
        if ALONE:
            g, _ = group_at(FORM, first)
            scaled, bias = columns_of_groups(PARTS, FORM, KEY_DIM, first, g, sums[0], query[0].shape[1])
            # the factor of the only row, as a scalar: columns are groups now, not rows
            only = tl.sum(tl.where(tl.arange(0, query[0].shape[1]) == 0, factor, 0.0), 0)
        for i in tl.static_range(fields(FORM)):
            codes = field(words, FORM, i, ASM)
            if ALONE:
                product = tl.dot(codes, scaled) * lift(FORM, i) + bias[None, :]
                score = own_column(FORM, product, first + i * WORD_ROWS, g) * only
            else:
                score = window_scores(
                    PARTS,
                    FORM,
                    KEY_DIM,
                    first + i * WORD_ROWS,
                    codes,
                    lift(FORM, i),
                    query[0],
                    sums[0],
                    factor,
                    WORD_ROWS,
                    ONE_ROW,
                )
            scores = scores + (score,)
    elif axis(FORM) == CHANNEL:
        words = words_of(PARTS, FORM, base, at)
        RUN: tl.constexpr = group_run(FORM)  # how many fields a group has
        # all queries are scaled before the first product, so that one barrier suffices for their way via shared memory
        scaled = ()
        biases = ()
        for g in tl.static_range(fields(FORM) // RUN):
            number = tile * (128 // group(FORM)) + g
            query_of_group, bias = channel_parameters(PARTS, FORM, KEY_DIM, number, query[0], sums[0], ONE_ROW)
            scaled = scaled + (query_of_group,)
            biases = biases + (bias * factor,)
        # (q * s_g) . c + q . m_g: one product per field, plus its group's bias
        for i in tl.static_range(fields(FORM)):
            score = tl.dot(field(words, FORM, i, ASM), scaled[i // RUN])
            scores = scores + (score * (factor * lift(FORM, i))[None, :] + biases[i // RUN][None, :],)
    else:
        # s_tb (q_b . c_tb) + m_tb sum(q_b), added up over the groups b of channels
        words = ()
        for c in tl.static_range(CHANNEL_GROUPS):
            words = words + (words_of(PARTS, FORM, base + c * (KEY_DIM // CHANNEL_GROUPS), at),)
        for i in tl.static_range(fields(FORM)):
            for c in tl.static_range(CHANNEL_GROUPS):
                step, least = group_of(stored[i], FORM, CHANNEL_GROUPS, c)
                product = tl.dot(field(words[c], FORM, i, ASM), query[c]) * (step * lift(FORM, i))[:, None]
                product += least[:, None] * sums[c][None, :]
                if c == 0:
                    score = product
                else:
                    score += product
            scores = scores + (score * factor[None, :],)
    return scores


@triton.jit
def within(start, WORD_ROWS: tl.constexpr, PART_TOKENS: tl.constexpr):
    """Return the row of words, within a tile, in which the codes of a part of the tile begin.

    A tile is stored as rows of int16 words (word rows). Each word has several fields, and each field holds the code of
    a different token. All tokens of the part are in the same field.

    Args:
        start: index of the part's first token, counted from the first token of the phase's first tile.
        PART_TOKENS: number of tokens in a part; divides `WORD_ROWS`.
    """
    # a part is never longer than a field, and fields begin at multiples of it
    if PART_TOKENS == WORD_ROWS:
        at = 0
    else:
        # tells the compiler that rows of words stay aligned, so that loads stay wide
        at = tl.multiple_of(start % WORD_ROWS, PART_TOKENS)
    return at


@triton.jit
def part_scores(
    PARTS,
    FORM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    start,
    tokens,
    stored,
    query,
    sums,
    factor,
    PART_TOKENS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute the attention scores of all query rows with the keys of a part of a tile, packed or in full precision.

    Args:
        start: index of the part's first token, counted from the first token of the phase's first tile; used if packed.
            All tokens of the part are in the same field.
        tokens: indices of the tokens in the buffer, ``[PART_TOKENS]``; used if in full precision.

    Returns:
        Scores in bits: a tuple with one block, ``[PART_TOKENS, R]``.
    """
    CHANNEL_GROUPS: tl.constexpr = channel_group_count(FORM, KEY_DIM)
    if kind(FORM) == FULL:
        keys = tl.load(PARTS[0] + tokens[:, None] * KEY_DIM + tl.arange(0, KEY_DIM)[None, :])
        score = exact_dot(keys, query[0], ASM) * factor[None, :]
    else:
        WORD_ROWS: tl.constexpr = word_row_count(FORM)
        base = start // 128 * (WORD_ROWS * KEY_DIM) + within(start, WORD_ROWS, PART_TOKENS) * KEY_DIM
        at = tl.arange(0, PART_TOKENS)[:, None] * KEY_DIM + tl.arange(0, KEY_DIM // CHANNEL_GROUPS)[None, :]
        i = start % 128 // WORD_ROWS  # the field, known at run time only
        if window(FORM):
            codes = field_at(words_of(PARTS, FORM, base, at), FORM, i, ASM)
            first = PARTS[planes(FORM) + 2] + start
            score = window_scores(
                PARTS, FORM, KEY_DIM, first, codes, lift(FORM, None), query[0], sums[0], factor, PART_TOKENS, ONE_ROW
            )
        elif axis(FORM) == CHANNEL:
            scaled, bias = channel_parameters(PARTS, FORM, KEY_DIM, start // group(FORM), query[0], sums[0], ONE_ROW)
            product = tl.dot(field_at(words_of(PARTS, FORM, base, at), FORM, i, ASM), scaled)
            score = product * (factor * lift(FORM, None))[None, :] + (bias * factor)[None, :]
        else:
            for c in tl.static_range(CHANNEL_GROUPS):
                step, least = group_of(stored[0], FORM, CHANNEL_GROUPS, c)
                codes = field_at(words_of(PARTS, FORM, base + c * (KEY_DIM // CHANNEL_GROUPS), at), FORM, i, ASM)
                product = tl.dot(codes, query[c]) * (step * lift(FORM, None))[:, None]
                product += least[:, None] * sums[c][None, :]
                if c == 0:
                    score = product
                else:
                    score += product
            score *= factor[None, :]
    return (score,)


@triton.jit
def fp16_room(stored, FORM: tl.constexpr, CHANNEL_GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Return a power of two that brings the products weight * scale into the range of fp16, and its inverse.

    Weights are at most 1. Without the factor, the product of a small weight and a small scale would be an fp16
    subnormal and lose bits.

    Args:
        COUNT: number of entries of `stored`: the number of fields for a whole tile, 1 for a part of a tile.
    """
    # the largest scale of these tokens bounds every product weight * scale
    for i in tl.static_range(COUNT):
        for c in tl.static_range(CHANNEL_GROUPS):
            step, _ = group_of(stored[i], FORM, CHANNEL_GROUPS, c)
            if i == 0 and c == 0:
                top = step
            else:
                top = tl.maximum(top, step)
    # exponent of the largest scale; scales under 2**-14 are fp16 subnormals and are lifted no further
    exponent = tl.maximum(tl.max(top, 0).to(tl.int32, bitcast=True) >> 23, 113)
    # 2**(141 - E) and its inverse: the largest scale, of the biased exponent E, comes to lie in [2**14, 2**15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tile_values(PARTS, FORM: tl.constexpr, VALUE_DIM: tl.constexpr, tile, stored, weights, biases, ASM: tl.constexpr):
    """Compute the weighted sum of a whole tile of packed values, split into a sum of codes and a sum of minima.

    Args:
        tile: index of the tile, counted from the one to which `PARTS` point.
        weights: softmax weights before normalisation, at most 1: a tuple of ``[tokens of a field, R]``, one per field.
        biases: running sums of weight * minimum, kept per token and added up at the end of the loop: a tuple of
            ``[tokens of a field, R]``, one per group of channels.

    Returns:
        Four items: the weighted sums of the codes, multiplied by a factor f that is a power of two, as a tuple of
        ``[Dv / groups, R]``, one per group of channels; f; 1 / f; and the new `biases`.
    """
    WORD_ROWS: tl.constexpr = word_row_count(FORM)
    CHANNEL_GROUPS: tl.constexpr = channel_group_count(FORM, VALUE_DIM)
    lifted, unit = fp16_room(stored, FORM, CHANNEL_GROUPS, fields(FORM))
    # channels are rows here: [VALUE_DIM, WORD_ROWS], as the second product takes them
    base = tile * (WORD_ROWS * VALUE_DIM)
    at = tl.arange(0, VALUE_DIM // CHANNEL_GROUPS)[:, None] * WORD_ROWS + tl.arange(0, WORD_ROWS)[None, :]
    sums = ()
    totals = ()
    scaled = ()
    for c in tl.static_range(CHANNEL_GROUPS):
        bias = biases[c]
        for i in tl.static_range(fields(FORM)):
            step, least = group_of(stored[i], FORM, CHANNEL_GROUPS, c)
            bias += weights[i] * least[:, None]  # p_t m_tb: the same for all channels of the group
            # codes of a field in higher bits are 2**place times as large; lift() * TINY, which is 2**-place, makes the
            # products of all fields alike, so that one accumulator takes them
            scaled = scaled + ((weights[i] * (step * (lifted * (lift(FORM, i) * TINY)))[:, None]).to(tl.float16),)
        sums = sums + (bias,)
    for c in tl.static_range(CHANNEL_GROUPS):
        words = words_of(PARTS, FORM, base + c * (VALUE_DIM // CHANNEL_GROUPS * WORD_ROWS), at)
        # an accumulator for this tile only; the caller adds it to the rest in fp32
        total = tl.dot(field(words, FORM, 0, ASM), scaled[c * fields(FORM)])
        for i in tl.static_range(1, fields(FORM)):
            total = tl.dot(field(words, FORM, i, ASM), scaled[c * fields(FORM) + i], total)
        totals = totals + (total,)
    return totals, lifted * TINY, unit / TINY, sums


@triton.jit
def part_values(
    PARTS,
    FORM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    start,
    tokens,
    stored,
    weights,
    biases,
    PART_TOKENS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute the weighted sum of the values of a part of a tile, packed or in full precision.

    Args:
        start: index of the part's first token, counted from the first token of the phase's first tile; used if packed.
            All tokens of the part are in the same field.
        tokens: indices of the tokens in the buffer, ``[PART_TOKENS]``; used if in full precision.
        weights: softmax weights before normalisation, at most 1: a tuple with one block, ``[PART_TOKENS, R]``.
        biases: running sums of weight * minimum, kept per token and added up at the end of the loop: a tuple of
            ``[PART_TOKENS, R]``, one per group of channels.

    Returns:
        Four items: the weighted sums, multiplied by a factor f that is a power of two, as a tuple of
        ``[Dv / groups, R]``, one per group of channels; f; 1 / f; and the new `biases`.
    """
    CHANNEL_GROUPS: tl.constexpr = channel_group_count(FORM, VALUE_DIM)
    totals = ()
    sums = ()
    if kind(FORM) == FULL:
        values = tl.load(PARTS[0] + tokens[:, None] * VALUE_DIM + tl.arange(0, VALUE_DIM)[None, :])
        # 2**15: the largest power of two in fp16; weights below 2**-14 would lose bits as subnormals
        lifted = weights[0] * 32768.0
        high = lifted.to(values.dtype)
        total = exact_dot(tl.trans(values), high, ASM)
        if values.dtype == tl.bfloat16:  # 8 bits of a weight are too few: a second product adds the rest
            total += exact_dot(tl.trans(values), (lifted - high.to(tl.float32)).to(values.dtype), ASM)
        totals = (total,)
        lifted = 32768.0
        unit = 1.0 / 32768.0
        sums = biases
    else:
        WORD_ROWS: tl.constexpr = word_row_count(FORM)
        base = start // 128 * (WORD_ROWS * VALUE_DIM) + within(start, WORD_ROWS, PART_TOKENS)
        at = tl.arange(0, VALUE_DIM // CHANNEL_GROUPS)[:, None] * WORD_ROWS + tl.arange(0, PART_TOKENS)[None, :]
        lifted, unit = fp16_room(stored, FORM, CHANNEL_GROUPS, 1)
        for c in tl.static_range(CHANNEL_GROUPS):
            step, least = group_of(stored[0], FORM, CHANNEL_GROUPS, c)
            sums = sums + (biases[c] + weights[0] * least[:, None],)
            scaled = (weights[0] * (step * (lifted * (lift(FORM, None) * TINY)))[:, None]).to(tl.float16)
            words = words_of(PARTS, FORM, base + c * (VALUE_DIM // CHANNEL_GROUPS * WORD_ROWS), at)
            totals = totals + (tl.dot(field_at(words, FORM, start % 128 // WORD_ROWS, ASM), scaled),)
        lifted = lifted * TINY
        unit = unit / TINY
    return totals, lifted, unit, sums
