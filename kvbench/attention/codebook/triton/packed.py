"""The part of the Triton kernel that reads codes: one program's tiles of the packed phase."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.codebook.triton.parts import (
    angles,
    code_words,
    largest,
    product,
    run,
    softened,
    turned_back,
)
from kvbench.attention.codebook.triton.unpack import dequantized, fields, rotated, table, unpack
from kvbench.attention.triton.merge import NOTHING
from kvbench.attention.triton.walk import cut, paste


@triton.jit
def packed_tiles(
    KEYS, VALUES, score_ptr, fine_ptr, coarse_ptr, q_at, normal, factor, cap, far, near, begin, slot, count, first,
    last, sequence, cell, slots, key_tiles, value_tiles, top, total, acc,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, ROTATE: tl.constexpr, OUTLIERS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    VALUE_CHUNK: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the running softmax after some tiles of the packed phase, as `top`, `total` and `acc`.

    Arguments are those of :func:`kvbench.attention.codebook.triton.kernel.decode`, and:

    * ``KEYS``: pointers to the words of each plane of the keys, their levels, ranges and offsets.
    * ``VALUES``: the same for the values.
    * ``q_at``: pointers to the query, ``[CHUNK, R]`` for the first channels.
    * ``normal``: power of two by which each column of the query is multiplied, ``[R]``.
    * ``factor``: what turns a product into a score in bits, ``[R]``.
    * ``far``: pointers to cosines of the beginnings of fields, ``[CHUNK, R]``; read only if a row has all columns.
    * ``near``: pointers to cosines of the tokens of a field, ``[N, CHUNK]``; read only if `ROTATE`.
    * ``begin``: RoPE position of the row's first slot.
    * ``slot``: slot of the phase's first token.
    * ``count``: number of tokens of the phase.
    * ``first``: first tile of the program.
    * ``last``: one past its last tile.
    * ``sequence``: row of the batch.
    * ``cell``: row of the batch and KV head.
    * ``top``: largest score so far, ``[R]``.
    * ``total``: sum of weights so far, ``[R]``.
    * ``acc``: weighted values so far, ``[Dv, R]``.
    """
    HALF: tl.constexpr = KEY_DIM // 2
    N: tl.constexpr = run(KEY_BITS)
    COUNT: tl.constexpr = fields(KEY_BITS)
    ALONE: tl.constexpr = ROWS == 1 and ROTATE
    col = tl.arange(0, BLOCK_ROWS)
    valid = col < ROWS
    row = tl.arange(0, N)
    K: tl.constexpr = 2 if KEY_BITS == 3 else 1
    V: tl.constexpr = 2 if VALUE_BITS == 3 else 1
    wide = cell.to(tl.int64)
    key_planes = (KEYS[0] + wide * key_tiles * (N * KEY_DIM),)
    value_planes = (VALUES[0] + wide * value_tiles * (N * VALUE_DIM),)
    if KEY_BITS == 3:
        key_planes = key_planes + (KEYS[1] + wide * key_tiles * (8 * KEY_DIM),)
        value_planes = value_planes + (VALUES[1] + wide * value_tiles * (8 * VALUE_DIM),)
    key_levels = KEYS[K] + sequence * (1 << KEY_BITS)
    value_levels = VALUES[V] + sequence * (1 << VALUE_BITS)
    key_table = table(key_levels, KEY_BITS)
    value_table = table(value_levels, VALUE_BITS)
    # ranges and offsets of keys belong to channels, those of values to tokens
    param = cell * KEY_DIM + tl.arange(0, CHUNK)
    scales_at = KEYS[K + 1] + param[None, :]
    offsets_at = KEYS[K + 2] + param[None, :]
    value_scale = VALUES[V + 1] + sequence.to(tl.int64) * value_tiles * 128
    value_offset = VALUES[V + 2] + sequence.to(tl.int64) * value_tiles * 128
    scores_at = score_ptr + wide * ROWS * slots + slot
    sums = tl.zeros((N, BLOCK_ROWS), tl.float32)
    biases = tl.zeros((N, BLOCK_ROWS), tl.float32)
    unit = 1.0
    accs = cut(acc, VALUE_DIM // VALUE_CHUNK)
    for u in tl.range(first, last, num_stages=STAGES):
        products = ()
        for _ in tl.static_range(COUNT):
            products = products + (tl.zeros((N, BLOCK_ROWS), tl.float32),)
        # in chunks of channels, as all codes of a tile do not fit into registers once they are looked up
        for k in tl.range(0, HALF, CHUNK, num_stages=1):
            words, shift = code_words(key_planes, u, True, KEY_DIM, k, CHUNK, KEY_BITS)
            more_words, _same = code_words(key_planes, u, True, KEY_DIM, HALF + k, CHUNK, KEY_BITS)
            scales = (tl.load(scales_at + k), tl.load(scales_at + HALF + k))
            offsets = (tl.load(offsets_at + k), tl.load(offsets_at + HALF + k))
            q_first = tl.load(q_at + k).to(tl.float32) * normal[None, :]
            q_second = tl.load(q_at + HALF + k).to(tl.float32) * normal[None, :]
            if ROTATE:
                cos = tl.load(near + k)
                sin = tl.load(near + HALF + k)
                tile_cos, tile_sin = angles(fine_ptr, coarse_ptr, begin + slot + u * 128, KEY_DIM, k, CHUNK)
                if ALONE:
                    far_cos = tl.load(far + k)
                    far_sin = tl.load(far + HALF + k)
                    query_first, query_second = turned_back(
                        q_first,
                        q_second,
                        tile_cos[:, None] * far_cos - tile_sin[:, None] * far_sin,
                        tile_sin[:, None] * far_cos + tile_cos[:, None] * far_sin,
                    )
            else:
                query_first = q_first.to(tl.float16)
                query_second = q_second.to(tl.float16)
            firsts = unpack(words, shift, key_table, key_levels, KEY_BITS, ASM)
            seconds = unpack(more_words, shift, key_table, key_levels, KEY_BITS, ASM)
            added = ()
            for f in tl.static_range(COUNT):
                if ROTATE:
                    if not ALONE:
                        at = fine_ptr + (f * N) * KEY_DIM + k + tl.arange(0, CHUNK)
                        c = tl.load(at)
                        s = tl.load(at + HALF)
                        query_first, query_second = turned_back(
                            q_first,
                            q_second,
                            (tile_cos * c - tile_sin * s)[:, None],
                            (tile_sin * c + tile_cos * s)[:, None],
                        )
                    k_first, k_second = rotated(firsts[f], seconds[f], scales, offsets, cos, sin, ASM)
                else:
                    k_first = dequantized(firsts[f], scales[0], offsets[0], ASM)
                    k_second = dequantized(seconds[f], scales[1], offsets[1], ASM)
                score = products[f]
                if ASM:
                    score = tl.dot(k_first, query_first, score)
                    score = tl.dot(k_second, query_second, score)
                else:
                    score += product(k_first, query_first, ASM) + product(k_second, query_second, ASM)
                added = added + (score,)
            products = added
        steps = ()
        shifts = ()
        for f in tl.static_range(COUNT):
            steps = steps + (tl.load(value_scale + u * 128 + f * N + row).to(tl.float32),)
            shifts = shifts + (tl.load(value_offset + u * 128 + f * N + row).to(tl.float32),)
        scores = ()
        for f in tl.static_range(COUNT):
            score = products[f] * factor[None, :]
            token = u * 128 + f * N + row
            visible = (token < count)[:, None]
            if ALONE:
                visible = visible & (col == f)[None, :]
                here = scores_at + token[:, None] + 0 * col[None, :]
                real = visible
            else:
                visible = visible & (col >= 0)[None, :]
                here = scores_at + col[None, :] * slots + token[:, None]
                real = visible & valid[None, :]
            if OUTLIERS:
                score += tl.load(here, mask=real, other=0.0)
            score = softened(score, cap, CAPPED)
            score = tl.where(visible, score, NOTHING)
            if OUTLIERS:
                tl.store(here, score, mask=real)
            scores = scores + (score,)
        highest = scores[0]
        for f in tl.static_range(1, COUNT):
            highest = tl.maximum(highest, scores[f])
        new_top = tl.maximum(top, tl.max(highest, 0))
        shrink = tl.exp2(top - new_top)
        top = new_top
        total *= shrink
        sums *= shrink[None, :]
        biases *= shrink[None, :]
        lifted, lowered = largest(steps, COUNT)
        weighted = ()
        for f in tl.static_range(COUNT):
            weight = tl.where(scores[f] > NOTHING, tl.exp2(scores[f] - top[None, :]), 0.0)
            sums += weight
            biases += weight * shifts[f][:, None]
            # 2**14: weights below 2**-14 would lose bits as subnormals
            weighted = weighted + ((weight * (steps[f] * (lifted * 16384.0))[:, None]).to(tl.float16),)
        shrink *= unit * (lifted * 16384.0)
        unit = lowered * (1.0 / 16384.0)
        summed = ()
        for k in tl.static_range(VALUE_DIM // VALUE_CHUNK):
            words, shift = code_words(value_planes, u, False, VALUE_DIM, k * VALUE_CHUNK, VALUE_CHUNK, VALUE_BITS)
            values = unpack(words, shift, value_table, value_levels, VALUE_BITS, ASM)
            fresh = tl.zeros((VALUE_CHUNK, BLOCK_ROWS), tl.float32)
            for f in tl.static_range(COUNT):
                if ASM:
                    fresh = tl.dot(values[f], weighted[f], fresh)
                else:
                    fresh += product(values[f], weighted[f], ASM)
            summed = summed + (accs[k] * shrink[None, :] + fresh,)
        accs = summed
    total += tl.sum(sums, 0)
    acc = paste(accs, VALUE_DIM // VALUE_CHUNK) * unit + tl.sum(biases, 0)[None, :]
    if ALONE:
        # the columns were parts of one query row; from here on, the first stands for all of them
        best = tl.max(top, 0)
        share = tl.exp2(top - best)
        whole = tl.sum(total * share, 0)
        total = tl.where(col == 0, whole, 0.0)
        merged = tl.sum(acc * share[None, :], 1)
        acc = tl.where((col == 0)[None, :], merged[:, None], 0.0)
        top = tl.zeros((BLOCK_ROWS,), tl.float32) + best
    return top, total, acc
