"""The loop over the tiles of one phase: online softmax over blocks of tokens, inside a Triton kernel.

Shapes and parameters as in :mod:`~kvbench.attention.triton.decode_kernel` and :mod:`~kvbench.attention.triton.tiles`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import channel_group_count, fields, word_row_count
from kvbench.attention.triton.merge_kernel import NOTHING
from kvbench.attention.triton.tiles import parameters_of, part_scores, part_values, readied, tile_scores, tile_values


@triton.jit
def load_query(
    q_ptr,
    row_at,
    valid,
    exponent,
    KEY_DIM: tl.constexpr,
    CHANNEL_GROUPS: tl.constexpr,
    dtype: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Load the query rows of a program, normalise them (multiply by `exponent`), and split them by groups of channels.

    Args:
        exponent: factor by which each row is multiplied, ``[R]``. It is a power of two, 2**e, not the exponent e.
        CHANNEL_GROUPS: number of groups into which the channels of a key are divided (axis ``token``); 1 if keys have
            parameters per channel or are in full precision.
        dtype: dtype of the products: fp16 for packed keys, else that of the keys.

    Returns:
        A tuple of blocks ``[D / groups, R]``, one per group of channels; and a tuple of their sums over channels,
        ``[R]``, from which biases are computed. If `ONE_ROW`, the second tuple contains the row itself instead,
        ``[D]``.
    """
    blocks_of = ()
    sums = ()
    for c in tl.static_range(CHANNEL_GROUPS):
        d = c * (KEY_DIM // CHANNEL_GROUPS) + tl.arange(0, KEY_DIM // CHANNEL_GROUPS)
        block = tl.load(q_ptr + row_at[None, :] + d[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
        # normalised before it is rounded: small queries keep their bits in fp16
        block = (block * exponent[None, :]).to(dtype)
        blocks_of = blocks_of + (block,)
        sums = sums + (tl.sum(block.to(tl.float32), 1 if ONE_ROW else 0),)
    return blocks_of, sums


@triton.jit
def cut_blocks(acc, N: tl.constexpr):
    """Split a tensor ``[N * n, R]`` into N blocks ``[n, R]``, N a power of two; :func:`paste` is the inverse."""
    # Triton cannot slice a tensor, so it is halved by a reshape and a split, recursively
    if N == 1:
        parts = (acc,)
    else:
        low, high = tl.split(tl.permute(tl.reshape(acc, (2, acc.shape[0] // 2, acc.shape[1])), (1, 2, 0)))
        parts = cut_blocks(low, N // 2) + cut_blocks(high, N // 2)
    return parts


@triton.jit
def paste(parts, N: tl.constexpr):
    """Join N blocks ``[n, R]`` into one tensor ``[N * n, R]``; the inverse of :func:`cut_blocks`."""
    if N == 1:
        acc = parts[0]
    else:
        low = paste(parts[: N // 2], N // 2)
        high = paste(parts[N // 2 :], N // 2)
        acc = tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), (2 * low.shape[0], low.shape[1]))
    return acc


@triton.jit
def capped(scores, cap, COUNT: tl.constexpr, CAPPED: tl.constexpr):
    """Apply the model's softcap to blocks of scores.

    A score x, which already includes a factor ``2 * log2(e) / softcap``, becomes ``cap * tanh(x / (2 * log2(e)))``. It
    is computed by the formula ``tanh(y) = 1 - 2 / (exp(2 y) + 1)``. Its error is about 1e-7 of the cap, also for very
    small and very large scores; the error of PTX's tanh is larger.
    """
    if CAPPED:
        bounded = ()
        for i in tl.static_range(COUNT):
            bounded = bounded + (cap - 2.0 * cap / (tl.exp2(scores[i]) + 1.0),)
    else:
        bounded = scores
    return bounded


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
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ASM: tl.constexpr,
    cap,
    CAPPED: tl.constexpr,
):
    """Process consecutive iterations of a phase, each over a whole tile or over a part; return the new running state.

    Args:
        first: index of the first iteration. Whole tiles are numbered from the phase's first tile.
        last: one past the index of the last iteration.
        head: if iterations are over parts of tiles: an iteration u < head starts at token ``u * PART_TOKENS``. These
            parts precede the whole tiles. 0 if iterations are over whole tiles.
        tail: if iterations are over parts of tiles: an iteration u >= head starts at token ``(u + tail) *
            PART_TOKENS``. These parts follow the whole tiles. 0 if iterations are over whole tiles.
        lead: number of tokens in the phase's first tile that precede the phase. Start tokens are counted from the
            beginning of that tile.
        key_first: index of the phase's first token in the key segment; used if keys are in full precision.
        value_first: index of the phase's first token in the value segment; used if values are in full precision.
        seen: number of tokens of the phase that each query row sees, ``[R]``; used only if `CAUSAL`.
        WHOLE: True if iterations are over whole tiles, False if they are over parts.
        PART_TOKENS: number of tokens in a part of a tile.
        CAUSAL: True if query rows see different numbers of tokens.
    """
    CHANNEL_GROUPS: tl.constexpr = channel_group_count(VALUE, VALUE_DIM)
    SIZE: tl.constexpr = word_row_count(VALUE) if WHOLE else PART_TOKENS
    COUNT: tl.constexpr = fields(VALUE) if WHOLE else 1
    STEP: tl.constexpr = 128 if WHOLE else PART_TOKENS
    accs = cut_blocks(acc, CHANNEL_GROUPS)
    row = tl.arange(0, SIZE)
    # the sum of weights, too, is kept per token; it starts with the sum of the earlier phases
    sum_tile = tl.where(row[:, None] == 0, total[None, :], 0.0)
    # sums of weight * minimum, kept per token and added up once at the end: reducing in each iteration costs shuffles
    biases = ()
    for _ in tl.static_range(CHANNEL_GROUPS):
        biases = biases + (tl.zeros((SIZE, BLOCK_ROWS), tl.float32),)
    unit = 1.0  # scale of the accumulator: weighted codes come with a power of two that differs between iterations
    start = (first + tl.where(first < head, 0, tail)) * STEP
    stored_k = readied(parameters_of(KEYS, KEY, KEY_DIM, start, SIZE, COUNT), KEY, KEY_DIM, COUNT)
    stored_v = readied(parameters_of(VALUES, VALUE, VALUE_DIM, start, SIZE, COUNT), VALUE, VALUE_DIM, COUNT)
    for u in tl.range(first, last, num_stages=STAGES):
        start = (u + tl.where(u < head, 0, tail)) * STEP
        # parameters of tokens are too small for asynchronous copies, so they are loaded one iteration ahead
        ahead = tl.minimum(u + 1, last - 1)
        ahead = (ahead + tl.where(ahead < head, 0, tail)) * STEP
        next_k = parameters_of(KEYS, KEY, KEY_DIM, ahead, SIZE, COUNT)
        next_v = parameters_of(VALUES, VALUE, VALUE_DIM, ahead, SIZE, COUNT)
        token = start - lead + row  # counted from the phase's first
        if WHOLE:
            scores = capped(
                tile_scores(KEYS, KEY, KEY_DIM, u, stored_k, query, sums, factor, ONE_ROW, ASM), cap, COUNT, CAPPED
            )
        else:
            # in place of tokens outside the phase its first or last one is read, and masked
            inside = tl.minimum(tl.maximum(token, 0), count - 1)
            scores = part_scores(
                KEYS, KEY, KEY_DIM, start, key_first + inside, stored_k, query, sums, factor, PART_TOKENS, ONE_ROW, ASM
            )
            visible = (token >= 0)[:, None] & (token[:, None] < seen[None, :] if CAUSAL else (token < count)[:, None])
            # finite, so that an iteration without any visible token produces no NaN
            scores = (tl.where(visible, capped(scores, cap, 1, CAPPED)[0], NOTHING),)
        # online softmax: rescale the sums so far to the new maximum
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
        # sums of the minima are rescaled to the new maximum too, but have no unit, as they are always in fp32
        shrunk = ()
        for c in tl.static_range(CHANNEL_GROUPS):
            shrunk = shrunk + (biases[c] * shrink[None, :],)
        if WHOLE:
            fresh, lifted, new_unit, biases = tile_values(VALUES, VALUE, VALUE_DIM, u, stored_v, weights, shrunk, ASM)
        else:
            fresh, lifted, new_unit, biases = part_values(
                VALUES, VALUE, VALUE_DIM, start, value_first + inside, stored_v, weights, shrunk, PART_TOKENS, ASM
            )
        # one factor converts the accumulator to both the new maximum and this iteration's unit
        shrink *= unit * lifted
        added = ()
        for c in tl.static_range(CHANNEL_GROUPS):
            added = added + (accs[c] * shrink[None, :] + fresh[c],)
        accs = added
        unit = new_unit  # factor that removes this iteration's power of two from the accumulator
        stored_k = readied(next_k, KEY, KEY_DIM, COUNT)
        stored_v = readied(next_v, VALUE, VALUE_DIM, COUNT)
    # the minima of a group of channels are the same for all its channels
    ends = ()
    for c in tl.static_range(CHANNEL_GROUPS):
        ends = ends + (accs[c] * unit + tl.sum(biases[c], 0)[None, :],)
    return top, tl.sum(sum_tile, 0), paste(ends, CHANNEL_GROUPS)
