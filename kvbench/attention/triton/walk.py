"""The loop over the tiles of one phase: online softmax over blocks of tokens, inside a Triton kernel."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import blocks, fields, rows
from kvbench.attention.triton.merge import NOTHING
from kvbench.attention.triton.tiles import parameters_of, part_scores, part_values, readied, tile_scores, tile_values


@triton.jit
def load_query(
    q_ptr, row_at, valid, exponent, D: tl.constexpr, NB: tl.constexpr, dtype: tl.constexpr, ONE: tl.constexpr
):
    """Normalised query, a tuple of ``[D / NB, R]`` for the groups of channels, and sums over their channels, ``[R]``.

    Of a query of one row (`ONE`) against keys without groups of channels, that row, ``[D]``, is instead of the sum.
    """
    blocks_of = ()
    sums = ()
    for c in tl.static_range(NB):
        d = c * (D // NB) + tl.arange(0, D // NB)
        block = tl.load(q_ptr + row_at[None, :] + d[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
        block = (block * exponent[None, :]).to(dtype)
        blocks_of = blocks_of + (block,)
        sums = sums + (tl.sum(block.to(tl.float32), 1 if ONE else 0),)
    return blocks_of, sums


@triton.jit
def cut(acc, N: tl.constexpr):
    """Rows of ``[N * n, R]`` as a tuple of N blocks."""
    if N == 1:
        parts = (acc,)
    else:
        low, high = tl.split(tl.permute(tl.reshape(acc, (2, acc.shape[0] // 2, acc.shape[1])), (1, 2, 0)))
        parts = cut(low, N // 2) + cut(high, N // 2)
    return parts


@triton.jit
def paste(parts, N: tl.constexpr):
    """Inverse of :func:`cut`."""
    if N == 1:
        acc = parts[0]
    else:
        low = paste(parts[: N // 2], N // 2)
        high = paste(parts[N // 2 :], N // 2)
        acc = tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), (2 * low.shape[0], low.shape[1]))
    return acc


@triton.jit
def capped(scores, cap, COUNT: tl.constexpr, CAP: tl.constexpr):
    """A tuple of `COUNT` blocks of scores after the softcap: ``cap * tanh(x / 2)`` of x in bits, where there is one.

    ``tanh(y) = 1 - 2 / (exp(2 y) + 1)`` is right to some 1e-7 of the cap, and at both ends; PTX's own tanh is not.
    """
    if CAP:
        found = ()
        for i in tl.static_range(COUNT):
            found = found + (cap - 2.0 * cap / (tl.exp2(scores[i]) + 1.0),)
    else:
        found = scores
    return found


@triton.jit
def walk(
    top,
    total,
    acc,
    KEYS,
    VALUES,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    query,
    sums,
    factor,
    first,
    last,
    head,
    tail,
    lead,
    count,
    key_first,
    value_first,
    seen,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    WHOLE: tl.constexpr,
    SUB: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    ONE: tl.constexpr,
    ASM: tl.constexpr,
    cap,
    CAP: tl.constexpr,
):
    """Steps ``[first, last)`` of a phase: whole tiles, or `SUB` tokens each.

    Args:
        top, total, acc: running maximum ``[R]``, sum of weights ``[R]`` and weighted values ``[DV, R]``.
        head, tail: step u covers tokens from ``u * SUB`` on where u < head, else from ``(u + tail) * SUB`` on (parts
            of tiles before and behind the whole ones).
        lead: tokens of the first tile that are not of the phase; token 0 of all steps is the first of that tile.
        seen: ``[R]``, tokens of the phase that a query row sees.
        cap: largest score, where they are capped (`CAP`).
    """
    NB: tl.constexpr = blocks(VALUE, DV)
    SIZE: tl.constexpr = rows(VALUE) if WHOLE else SUB
    COUNT: tl.constexpr = fields(VALUE) if WHOLE else 1
    STEP: tl.constexpr = 128 if WHOLE else SUB
    accs = cut(acc, NB)
    row = tl.arange(0, SIZE)
    sum_tile = tl.where(row[:, None] == 0, total[None, :], 0.0)
    biases = ()
    for _ in tl.static_range(NB):
        biases = biases + (tl.zeros((SIZE, R), tl.float32),)
    unit = 1.0
    start = (first + tl.where(first < head, 0, tail)) * STEP
    stored_k = readied(parameters_of(KEYS, KEY, D, start, SIZE, COUNT), KEY, D, COUNT)
    stored_v = readied(parameters_of(VALUES, VALUE, DV, start, SIZE, COUNT), VALUE, DV, COUNT)
    for u in tl.range(first, last, num_stages=STAGES):
        start = (u + tl.where(u < head, 0, tail)) * STEP
        # parameters of tokens come in pieces too small for asynchronous copies: they are loaded a step ahead
        ahead = tl.minimum(u + 1, last - 1)
        ahead = (ahead + tl.where(ahead < head, 0, tail)) * STEP
        next_k = parameters_of(KEYS, KEY, D, ahead, SIZE, COUNT)
        next_v = parameters_of(VALUES, VALUE, DV, ahead, SIZE, COUNT)
        token = start - lead + row
        if WHOLE:
            scores = capped(tile_scores(KEYS, KEY, D, u, stored_k, query, sums, factor, ONE, ASM), cap, COUNT, CAP)
        else:
            inside = tl.minimum(tl.maximum(token, 0), count - 1)
            scores = part_scores(KEYS, KEY, D, start, key_first + inside, stored_k, query, sums, factor, SUB, ONE, ASM)
            visible = (token >= 0)[:, None] & (token[:, None] < seen[None, :] if CAUSAL else (token < count)[:, None])
            scores = (tl.where(visible, capped(scores, cap, 1, CAP)[0], NOTHING),)
        highest = scores[0]
        for i in tl.static_range(1, COUNT):
            highest = tl.maximum(highest, scores[i])
        new_top = tl.maximum(top, tl.max(highest, 0))
        shrink = tl.exp2(top - new_top)
        top = new_top
        sum_tile *= shrink[None, :]
        weights = ()
        for i in tl.static_range(COUNT):
            weight = tl.exp2(scores[i] - top[None, :])
            sum_tile += weight
            weights = weights + (weight,)
        shrunk = ()
        for c in tl.static_range(NB):
            shrunk = shrunk + (biases[c] * shrink[None, :],)
        if WHOLE:
            fresh, lifted, new_unit, biases = tile_values(VALUES, VALUE, DV, u, stored_v, weights, shrunk, ASM)
        else:
            fresh, lifted, new_unit, biases = part_values(
                VALUES, VALUE, DV, start, value_first + inside, stored_v, weights, shrunk, SUB, ASM
            )
        shrink *= unit * lifted
        added = ()
        for c in tl.static_range(NB):
            added = added + (accs[c] * shrink[None, :] + fresh[c],)
        accs = added
        unit = new_unit
        stored_k = readied(next_k, KEY, D, COUNT)
        stored_v = readied(next_v, VALUE, DV, COUNT)
    ends = ()
    for c in tl.static_range(NB):
        ends = ends + (accs[c] * unit + tl.sum(biases[c], 0)[None, :],)
    return top, tl.sum(sum_tile, 0), paste(ends, NB)
