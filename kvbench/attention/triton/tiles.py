"""One step of decode attention inside a Triton kernel: scores of a block of tokens, and their weighted values.

Tokens are the rows of the products and the query rows their columns, so that 8 columns are padded and not 16. Scales
never touch a code: those of keys go into the query (per channel) or the score (per token), those of values into the
weights; minima become a bias of the score and a sum over the weights. A block of tokens is accumulated into a fresh
fragment, which is then added in fp32: a long chain of matrix instructions into one accumulator truncates, always
downwards, since codes are never negative.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import (
    CHANNEL,
    FULL,
    axis,
    blocks,
    channel_parameters,
    field,
    field_at,
    fields,
    group,
    group_of,
    kind,
    lift,
    meeting,
    of_tokens,
    planes,
    ready,
    rows,
    run,
    window,
)
from kvbench.attention.triton.windows import columns_of_groups, group_at, own_column, window_scores

#: value of code 1 in the lowest field, as an fp16 number
TINY = tl.constexpr(2.0**-24)


@triton.jit
def exact_dot(a, b, ASM: tl.constexpr):
    """Matrix product of exact tokens; the interpreter (``ASM=False``) multiplies no bf16."""
    if ASM:
        c = tl.dot(a, b)
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32))
    return c


@triton.jit
def words_of(PARTS, FORM: tl.constexpr, base, at):
    """Words at offsets `at` from a scalar `base`, a tuple: a tile a plane."""
    words = (tl.load(PARTS[0] + base + at),)
    if planes(FORM) == 2:
        words = words + (tl.load(PARTS[1] + base + at),)
    return words


@triton.jit
def parameters_of(PARTS, FORM: tl.constexpr, CHANNELS: tl.constexpr, start, N: tl.constexpr, COUNT: tl.constexpr):
    """Parameters of `COUNT` runs of `N` tokens from `start` on where they belong to tokens, else nothing."""
    stored = ()
    if kind(FORM) != FULL and axis(FORM) != CHANNEL:
        params = PARTS[planes(FORM) :]
        for i in tl.static_range(COUNT):
            stored = stored + (of_tokens(params, blocks(FORM, CHANNELS), start + i * N, tl.arange(0, N)),)
    return stored


@triton.jit
def readied(stored, FORM: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr):
    """:func:`ready` for what :func:`parameters_of` loaded."""
    found = ()
    if kind(FORM) != FULL and axis(FORM) != CHANNEL:
        for i in tl.static_range(COUNT):
            found = found + (ready(stored[i], FORM, blocks(FORM, CHANNELS)),)
    return found


@triton.jit
def tile_scores(
    PARTS,
    FORM: tl.constexpr,
    D: tl.constexpr,
    tile,
    stored,
    query,
    sums,
    factor,
    ONE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scores of a whole tile of packed keys, in bits: for each field ``[rows, R]``."""
    NW: tl.constexpr = rows(FORM)
    NB: tl.constexpr = blocks(FORM, D)
    base = tile * (NW * D)
    at = tl.arange(0, NW)[:, None] * D + tl.arange(0, D // NB)[None, :]
    scores = ()
    if window(FORM):
        words = words_of(PARTS, FORM, base, at)
        first = PARTS[planes(FORM) + 2] + tile * 128
        ALONE: tl.constexpr = ONE and meeting(FORM) <= query[0].shape[1]
        if ALONE:
            g, _ = group_at(FORM, first)
            scaled, bias = columns_of_groups(PARTS, FORM, D, first, g, sums[0], query[0].shape[1])
            only = tl.sum(tl.where(tl.arange(0, query[0].shape[1]) == 0, factor, 0.0), 0)
        for i in tl.static_range(fields(FORM)):
            codes = field(words, FORM, i, ASM)
            if ALONE:
                product = tl.dot(codes, scaled) * lift(FORM, i) + bias[None, :]
                score = own_column(FORM, product, first + i * NW, g) * only
            else:
                score = window_scores(
                    PARTS, FORM, D, first + i * NW, codes, lift(FORM, i), query[0], sums[0], factor, NW, ONE
                )
            scores = scores + (score,)
    elif axis(FORM) == CHANNEL:
        words = words_of(PARTS, FORM, base, at)
        RUN: tl.constexpr = run(FORM)
        # all queries are scaled before the first product: they pass through shared memory behind one barrier
        scaled = ()
        biases = ()
        for g in tl.static_range(fields(FORM) // RUN):
            number = tile * (128 // group(FORM)) + g
            query_of_group, bias = channel_parameters(PARTS, FORM, D, number, query[0], sums[0], ONE)
            scaled = scaled + (query_of_group,)
            biases = biases + (bias * factor,)
        for i in tl.static_range(fields(FORM)):
            score = tl.dot(field(words, FORM, i, ASM), scaled[i // RUN])
            scores = scores + (score * (factor * lift(FORM, i))[None, :] + biases[i // RUN][None, :],)
    else:
        words = ()
        for c in tl.static_range(NB):
            words = words + (words_of(PARTS, FORM, base + c * (D // NB), at),)
        for i in tl.static_range(fields(FORM)):
            for c in tl.static_range(NB):
                step, least = group_of(stored[i], FORM, NB, c)
                product = tl.dot(field(words[c], FORM, i, ASM), query[c]) * (step * lift(FORM, i))[:, None]
                product += least[:, None] * sums[c][None, :]
                if c == 0:
                    score = product
                else:
                    score += product
            scores = scores + (score * factor[None, :],)
    return scores


@triton.jit
def within(start, NW: tl.constexpr, SUB: tl.constexpr):
    """First word row of `SUB` tokens inside one field."""
    if SUB == NW:
        at = 0
    else:
        at = tl.multiple_of(start % NW, SUB)
    return at


@triton.jit
def part_scores(
    PARTS,
    FORM: tl.constexpr,
    D: tl.constexpr,
    start,
    tokens,
    stored,
    query,
    sums,
    factor,
    SUB: tl.constexpr,
    ONE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scores ``[SUB, R]`` of `SUB` tokens: packed ones from `start` on, inside one field, or exact ones, `tokens`."""
    NB: tl.constexpr = blocks(FORM, D)
    if kind(FORM) == FULL:
        keys = tl.load(PARTS[0] + tokens[:, None] * D + tl.arange(0, D)[None, :])
        score = exact_dot(keys, query[0], ASM) * factor[None, :]
    else:
        NW: tl.constexpr = rows(FORM)
        base = start // 128 * (NW * D) + within(start, NW, SUB) * D
        at = tl.arange(0, SUB)[:, None] * D + tl.arange(0, D // NB)[None, :]
        i = start % 128 // NW
        if window(FORM):
            codes = field_at(words_of(PARTS, FORM, base, at), FORM, i, ASM)
            first = PARTS[planes(FORM) + 2] + start
            score = window_scores(PARTS, FORM, D, first, codes, lift(FORM, None), query[0], sums[0], factor, SUB, ONE)
        elif axis(FORM) == CHANNEL:
            scaled, bias = channel_parameters(PARTS, FORM, D, start // group(FORM), query[0], sums[0], ONE)
            product = tl.dot(field_at(words_of(PARTS, FORM, base, at), FORM, i, ASM), scaled)
            score = product * (factor * lift(FORM, None))[None, :] + (bias * factor)[None, :]
        else:
            for c in tl.static_range(NB):
                step, least = group_of(stored[0], FORM, NB, c)
                codes = field_at(words_of(PARTS, FORM, base + c * (D // NB), at), FORM, i, ASM)
                product = tl.dot(codes, query[c]) * (step * lift(FORM, None))[:, None]
                product += least[:, None] * sums[c][None, :]
                if c == 0:
                    score = product
                else:
                    score += product
            score *= factor[None, :]
    return (score,)


@triton.jit
def room(stored, FORM: tl.constexpr, NB: tl.constexpr, COUNT: tl.constexpr):
    """Power of two that brings weight * scale just under the largest fp16 (a weight is at most 1), and its inverse."""
    for i in tl.static_range(COUNT):
        for c in tl.static_range(NB):
            step, _ = group_of(stored[i], FORM, NB, c)
            if i == 0 and c == 0:
                top = step
            else:
                top = tl.maximum(top, step)
    # exponent of the largest scale; scales under 2**-14 are fp16 subnormals and are lifted no further
    exponent = tl.maximum(tl.max(top, 0).to(tl.int32, bitcast=True) >> 23, 113)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tile_values(PARTS, FORM: tl.constexpr, DV: tl.constexpr, tile, stored, weights, biases, ASM: tl.constexpr):
    """Weighted codes of a whole tile of packed values.

    Returns:
        for each group of channels ``[DV / groups, R]``; by what power of two these are too large, and its inverse; the
        biases ``[rows, R]`` of the groups with this tile's added.
    """
    NW: tl.constexpr = rows(FORM)
    NB: tl.constexpr = blocks(FORM, DV)
    lifted, unit = room(stored, FORM, NB, fields(FORM))
    base = tile * (NW * DV)
    at = tl.arange(0, DV // NB)[:, None] * NW + tl.arange(0, NW)[None, :]
    sums = ()
    totals = ()
    scaled = ()
    for c in tl.static_range(NB):
        bias = biases[c]
        for i in tl.static_range(fields(FORM)):
            step, least = group_of(stored[i], FORM, NB, c)
            bias += weights[i] * least[:, None]
            # lift() is 2**24 and less: what it lacks for fields that lie higher is taken off the weight here
            scaled = scaled + ((weights[i] * (step * (lifted * (lift(FORM, i) * TINY)))[:, None]).to(tl.float16),)
        sums = sums + (bias,)
    for c in tl.static_range(NB):
        words = words_of(PARTS, FORM, base + c * (DV // NB * NW), at)
        total = tl.dot(field(words, FORM, 0, ASM), scaled[c * fields(FORM)])
        for i in tl.static_range(1, fields(FORM)):
            total = tl.dot(field(words, FORM, i, ASM), scaled[c * fields(FORM) + i], total)
        totals = totals + (total,)
    return totals, lifted * TINY, unit / TINY, sums


@triton.jit
def part_values(
    PARTS,
    FORM: tl.constexpr,
    DV: tl.constexpr,
    start,
    tokens,
    stored,
    weights,
    biases,
    SUB: tl.constexpr,
    ASM: tl.constexpr,
):
    """:func:`tile_values` of `SUB` tokens: packed ones from `start` on, inside one field, or exact ones, `tokens`."""
    NB: tl.constexpr = blocks(FORM, DV)
    totals = ()
    sums = ()
    if kind(FORM) == FULL:
        values = tl.load(PARTS[0] + tokens[:, None] * DV + tl.arange(0, DV)[None, :])
        lifted = weights[0] * 32768.0
        high = lifted.to(values.dtype)
        total = exact_dot(tl.trans(values), high, ASM)
        if values.dtype == tl.bfloat16:  # 8 bits of a weight are too few: the rest of them in a second product
            total += exact_dot(tl.trans(values), (lifted - high.to(tl.float32)).to(values.dtype), ASM)
        totals = (total,)
        lifted = 32768.0
        unit = 1.0 / 32768.0
        sums = biases
    else:
        NW: tl.constexpr = rows(FORM)
        base = start // 128 * (NW * DV) + within(start, NW, SUB)
        at = tl.arange(0, DV // NB)[:, None] * NW + tl.arange(0, SUB)[None, :]
        lifted, unit = room(stored, FORM, NB, 1)
        for c in tl.static_range(NB):
            step, least = group_of(stored[0], FORM, NB, c)
            sums = sums + (biases[c] + weights[0] * least[:, None],)
            scaled = (weights[0] * (step * (lifted * (lift(FORM, None) * TINY)))[:, None]).to(tl.float16)
            words = words_of(PARTS, FORM, base + c * (DV // NB * NW), at)
            totals = totals + (tl.dot(field_at(words, FORM, start % 128 // NW, ASM), scaled),)
        lifted = lifted * TINY
        unit = unit / TINY
    return totals, lifted, unit, sums
