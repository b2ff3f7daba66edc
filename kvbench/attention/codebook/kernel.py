"""The Triton kernel of decode attention over a codebook's codes; keys before RoPE are rotated on the way.

A layer holds up to three *phases*: tokens in full precision (sinks), packed ones, and again tokens in full precision.
Tokens are divided among the programs of a head by iterations, which have the same number of tokens in one phase.

**Rotation.** A key at position p is to be rotated by p times the frequency of each pair of channels. A position is
``128 a + b``, so two small tables of cosines and sines serve all: one for multiples of 128 and one for 0 to 127.
The query is turned back by the position at which a run of N tokens begins (N = 16, or 32 for 4 bits: the tokens of one
field of a tile). Then the key is turned by 0 to N - 1 only, by cosines and sines that stay in registers. The product
needs 8 query rows at least, so a single row takes the eight columns for the eight fields of a tile: each column is the
query turned back to the beginning of another field, and its scores with other fields' tokens are masked.

Shapes: D channels of a key, Dv of a value, R columns of query rows, N tokens of a field.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.codebook.unpack import dequantized, fields, rotated, table, unpack
from kvbench.attention.triton.merge import NOTHING, write_part
from kvbench.attention.triton.walk import cut, paste


@triton.constexpr_function
def run(bits):
    """Return the number of tokens of a field: 32 with codes of 4 bits, else 16."""
    return 128 // fields(bits)


@triton.jit
def portion(count, index, parts):
    """Return the first of a program's iterations and one past its last, out of `count` that are divided evenly.

    Args:
        count: number of iterations of all programs.
        index: number of this program.
        parts: number of programs.
    """
    low = (count.to(tl.int64) * index // parts).to(tl.int32)
    high = (count.to(tl.int64) * (index + 1) // parts).to(tl.int32)
    return low, high


@triton.jit
def within(low, high, before, count):
    """Return the range of a phase's iterations that lie in a program's range.

    Args:
        low: first iteration of the program, counted over all phases.
        high: one past its last.
        before: number of iterations of the phases before.
        count: number of iterations of the phase.
    """
    return tl.minimum(tl.maximum(low - before, 0), count), tl.minimum(tl.maximum(high - before, 0), count)


@triton.jit
def angles(fine_ptr, coarse_ptr, position, KEY_DIM: tl.constexpr, FIRST, COUNT: tl.constexpr):
    """Return cosines and sines of some frequencies at one position, two fp32 vectors ``[COUNT]``.

    Args:
        fine_ptr: pointer to the table of positions 0 to 127: cosines, then sines, fp32 ``[128, D]``.
        coarse_ptr: pointer to the table of the multiples of 128.
        position: the position, a scalar.
        KEY_DIM: channels of a key, D.
        FIRST: index of the first frequency.
        COUNT: number of frequencies.
    """
    HALF: tl.constexpr = KEY_DIM // 2
    j = FIRST + tl.arange(0, COUNT)
    fine = fine_ptr + position % 128 * KEY_DIM + j
    coarse = coarse_ptr + position // 128 * KEY_DIM + j
    c, s, cc, cs = tl.load(fine), tl.load(fine + HALF), tl.load(coarse), tl.load(coarse + HALF)
    return cc * c - cs * s, cs * c + cc * s


@triton.jit
def turned_back(first, second, cos, sin):
    """Turn both halves of a query back by angles, and return them in fp16 ``[D / 2, R]``.

    Args:
        first: first half of the channels, fp32 ``[D / 2, R]``.
        second: second half.
        cos: cosines, which broadcast over the query.
        sin: sines.
    """
    return (first * cos + second * sin).to(tl.float16), (second * cos - first * sin).to(tl.float16)


@triton.jit
def softened(score, cap, CAPPED: tl.constexpr):
    """Apply the model's softcap to scores that include a factor ``2 * log2(e) / softcap``, if it has one."""
    if CAPPED:
        score = cap - 2.0 * cap / (tl.exp2(score) + 1.0)
    return score


@triton.jit
def product(a, b, ASM: tl.constexpr):
    """Return the matrix product of two fp16 blocks, accumulated in fp32."""
    if ASM:
        c = tl.dot(a, b)
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32))
    return c


@triton.jit
def code_words(PLANES, base, KEYS: tl.constexpr, CHANNELS: tl.constexpr, FIRST, COUNT: tl.constexpr, BITS: tl.constexpr):  # fmt: skip  # noqa: E501
    """Load the words of some channels of a tile, and how far to shift those of a second plane.

    Args:
        PLANES: pointers to the planes' words of one row and head.
        base: number of the tile.
        KEYS: True for keys, whose blocks are ``[N, channels]``, False for values, ``[channels, N]``.
        CHANNELS: channels of a head.
        FIRST: first channel to load.
        COUNT: number of channels to load.
        BITS: bits of a code.

    Returns:
        The blocks of words, a tuple; and the shift, int16 in their shape.
    """
    N: tl.constexpr = run(BITS)
    row = tl.arange(0, N)
    d = FIRST + tl.arange(0, COUNT)
    if KEYS:
        at = row[:, None] * CHANNELS + d[None, :]
    else:
        at = d[:, None] * N + row[None, :]
    words = (tl.load(PLANES[0] + base * (N * CHANNELS) + at),)
    shift = 0
    if BITS == 3:  # the plane of single bits has 8 rows: 16 tokens of 8 fields there are two halves of a row here
        if KEYS:
            low = (row % 8)[:, None] * CHANNELS + d[None, :]
            shift = (row // 8)[:, None] + 0 * d[None, :]
        else:
            low = d[:, None] * 8 + (row % 8)[None, :]
            shift = (row // 8)[None, :] + 0 * d[:, None]
        words = words + (tl.load(PLANES[1] + base * (8 * CHANNELS) + low),)
        shift = shift.to(tl.int16)
    return words, shift


@triton.jit
def largest(stored, COUNT: tl.constexpr):
    """Return a power of two that brings the largest of some ranges of values to at most 1, and its inverse."""
    top = tl.abs(stored[0])
    for i in tl.static_range(1, COUNT):
        top = tl.maximum(top, tl.abs(stored[i]))
    exponent = (tl.max(top, 0).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    return ((253 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent + 1) << 23).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["heads", "scaling", "cap", "slots", "key_tiles", "value_tiles", "first_room", "last_room"]
)
def decode(
    q_ptr,
    table_ptr,
    starts_ptr,
    fine_ptr,
    near_ptr,
    coarse_ptr,
    KEYS,
    VALUES,
    score_ptr,
    stat_ptr,
    acc_ptr,
    q_batch,
    q_head,
    heads,
    scaling,
    cap,
    slots,
    key_tiles,
    value_tiles,
    first_room,
    last_room,
    PHASES: tl.constexpr,
    PACKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROTATE: tl.constexpr,
    OUTLIERS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUE_CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute partial results of the attention of one new token over all cached tokens, without outliers of values.

    Grid: (parts into which the tokens are split, sequences x KV heads).

    Args:
        q_ptr: pointer to the queries, ``[B, Hq, 1, D]``, after RoPE.
        table_ptr: pointer to the table of phases, int32 ``[B, phases, 3]`` (:class:`kvbench.attention.phases.Work`).
        starts_ptr: pointer to the RoPE position of each row's first slot, int32 ``[B]``; read only if `ROTATE`.
        fine_ptr: pointer to cosines and sines of positions 0 to 127 (:func:`angles`); read only if `ROTATE`.
        near_ptr: pointer to the first rows of the same table in fp16; read only if `ROTATE`.
        coarse_ptr: pointer to cosines and sines of the multiples of 128; read only if `ROTATE`.
        KEYS: for each phase, pointers to its keys: in full precision the buffer; packed the words of each plane, the
            levels, ranges and offsets.
        VALUES: the same for its values.
        score_ptr: pointer to a buffer fp32 ``[B, H, ROWS, slots]``; used only if `OUTLIERS`. It contains what the
            outliers of keys add to the scores (:func:`kvbench.attention.codebook.sparse.key_outliers`) and receives the
            scores, both in bits, of the packed tokens.
        stat_ptr: pointer to the buffer of maxima and sums of partial results.
        acc_ptr: pointer to the buffer of weighted values of partial results.
        q_batch: stride of the queries over sequences, in elements.
        q_head: stride of the queries over heads, in elements.
        heads: number of KV heads.
        scaling: the model's factor on scores times log2(e); with a softcap, ``2 * s * log2(e) / softcap``.
        cap: ``softcap * log2(e)``; 0 without a softcap.
        slots: number of slots per head in `score_ptr`.
        key_tiles: number of tiles of a head in the buffers of packed keys.
        value_tiles: number of tiles of a head in the buffers of packed values.
        first_room: tokens of a head in the buffers of the first phase, if that is in full precision.
        last_room: tokens of a head in the buffers of the last phase, if that is in full precision; keys, then values
            have the same.
        PHASES: number of phases.
        PACKED: number of the packed phase.
        KEY_BITS: bits of a key's code.
        VALUE_BITS: bits of a value's code.
        ROTATE: True if keys are stored before RoPE.
        OUTLIERS: True if there are outliers.
        KEY_DIM: channels of a key, D.
        VALUE_DIM: channels of a value, Dv.
        ROWS: number of query rows of a KV head.
        BLOCK_ROWS: number of columns, R: a power of two, at least 8 and at least `ROWS`.
        CHUNK: number of pairs of channels of keys to process at a time.
        VALUE_CHUNK: number of channels of values to process at a time.
        STAGES: pipeline stages of the loop over tiles.
        CAPPED: True if scores have a softcap.
        ASM: True to use inline PTX (on a GPU), False to use plain Triton operations (in the interpreter).
    """
    HALF: tl.constexpr = KEY_DIM // 2
    N: tl.constexpr = run(KEY_BITS)
    COUNT: tl.constexpr = fields(KEY_BITS)
    ALONE: tl.constexpr = ROWS == 1 and ROTATE
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    cell = tl.program_id(1)
    sequence = cell // heads
    head = cell % heads
    col = tl.arange(0, BLOCK_ROWS)
    if ALONE:
        query_row = 0 * col
    else:
        query_row = tl.minimum(col, ROWS - 1)
    valid = col < ROWS
    row = tl.arange(0, N)
    d = tl.arange(0, VALUE_DIM)

    # the query, normalised to a largest magnitude in [0.5, 1)
    q_at = q_ptr + sequence.to(tl.int64) * q_batch + (head * ROWS + query_row)[None, :] * q_head
    q = tl.max(tl.abs(tl.load(q_at + tl.arange(0, KEY_DIM)[:, None]).to(tl.float32)), 0)
    exponent = q.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    normal = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent + 1) << 23).to(tl.float32, bitcast=True) * scaling
    q_at += tl.arange(0, CHUNK)[:, None]

    # how many iterations there are in all phases, and which of them are this program's
    units = index * 0
    for i in tl.static_range(PHASES):
        count = tl.load(table_ptr + (sequence * PHASES + i) * 3 + 2)
        units += tl.cdiv(count, 128 if i == PACKED else N)
    low, high = portion(units, index, parts)

    if ROTATE:
        begin = tl.load(starts_ptr + sequence)
        # columns are fields if the query has one row: their beginnings lie 0, N, 2 N, ... tokens after that of the tile
        far = fine_ptr + (col % COUNT * N)[None, :] * KEY_DIM + tl.arange(0, CHUNK)[:, None]
        near = near_ptr + row[:, None] * KEY_DIM + tl.arange(0, CHUNK)[None, :]

    top = tl.full((BLOCK_ROWS,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((VALUE_DIM, BLOCK_ROWS), tl.float32)
    slot = index * 0
    before = index * 0
    for i in tl.static_range(PHASES):
        count = tl.load(table_ptr + (sequence * PHASES + i) * 3 + 2)
        if i == PACKED:
            first, last = within(low, high, before, tl.cdiv(count, 128))
            before += tl.cdiv(count, 128)
            K: tl.constexpr = 2 if KEY_BITS == 3 else 1
            V: tl.constexpr = 2 if VALUE_BITS == 3 else 1
            wide = cell.to(tl.int64)
            key_planes = (KEYS[i][0] + wide * key_tiles * (N * KEY_DIM),)
            value_planes = (VALUES[i][0] + wide * value_tiles * (N * VALUE_DIM),)
            if KEY_BITS == 3:
                key_planes = key_planes + (KEYS[i][1] + wide * key_tiles * (8 * KEY_DIM),)
                value_planes = value_planes + (VALUES[i][1] + wide * value_tiles * (8 * VALUE_DIM),)
            key_levels = KEYS[i][K] + sequence * (1 << KEY_BITS)
            value_levels = VALUES[i][V] + sequence * (1 << VALUE_BITS)
            key_table = table(key_levels, KEY_BITS)
            value_table = table(value_levels, VALUE_BITS)
            # ranges and offsets of keys belong to channels, those of values to tokens
            param = cell * KEY_DIM + tl.arange(0, CHUNK)
            scales_at = KEYS[i][K + 1] + param[None, :]
            offsets_at = KEYS[i][K + 2] + param[None, :]
            value_scale = VALUES[i][V + 1] + sequence.to(tl.int64) * value_tiles * 128
            value_offset = VALUES[i][V + 2] + sequence.to(tl.int64) * value_tiles * 128
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
                    words, shift = code_words(
                        value_planes, u, False, VALUE_DIM, k * VALUE_CHUNK, VALUE_CHUNK, VALUE_BITS
                    )
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
        else:
            first, last = within(low, high, before, tl.cdiv(count, N))
            before += tl.cdiv(count, N)
            room = first_room
            if i > PACKED:
                room = last_room
            key_at = tl.load(table_ptr + (sequence * PHASES + i) * 3)
            value_at = tl.load(table_ptr + (sequence * PHASES + i) * 3 + 1)
            keys = KEYS[i][0] + cell.to(tl.int64) * room * KEY_DIM
            values_ptr = VALUES[i][0] + cell.to(tl.int64) * room * VALUE_DIM
            for u in tl.range(first, last, num_stages=1):
                number = u * N + row
                inside = tl.minimum(number, count - 1)
                result = tl.zeros((N, BLOCK_ROWS), tl.float32)
                for k in tl.range(0, HALF, CHUNK, num_stages=1):
                    source = keys + (key_at + inside)[:, None] * KEY_DIM + (k + tl.arange(0, CHUNK))[None, :]
                    a = tl.load(source).to(tl.float32)
                    b = tl.load(source + HALF).to(tl.float32)
                    one = tl.load(q_at + k).to(tl.float32) * normal[None, :]
                    other = tl.load(q_at + HALF + k).to(tl.float32) * normal[None, :]
                    if ROTATE:
                        turn_cos, turn_sin = angles(fine_ptr, coarse_ptr, begin + slot + u * N, KEY_DIM, k, CHUNK)
                        key_query, other_query = turned_back(one, other, turn_cos[:, None], turn_sin[:, None])
                        near_cos = tl.load(near + k).to(tl.float32)
                        near_sin = tl.load(near + HALF + k).to(tl.float32)
                        key_first = clamped(a * near_cos - b * near_sin)
                        key_second = clamped(b * near_cos + a * near_sin)
                    else:
                        key_query = one.to(tl.float16)
                        other_query = other.to(tl.float16)
                        key_first = clamped(a)
                        key_second = clamped(b)
                    result += product(key_first, key_query, ASM) + product(key_second, other_query, ASM)
                result = softened(result * factor[None, :], cap, CAPPED)
                seen = (number < count)[:, None] & (valid | (ROWS > 1))[None, :]
                result = tl.where(seen, result, NOTHING)
                higher = tl.maximum(top, tl.max(result, 0))
                lowering = tl.exp2(top - higher)
                top = higher
                amount = tl.where(result > NOTHING, tl.exp2(result - top[None, :]), 0.0)
                total = total * lowering + tl.sum(amount, 0)
                x = tl.load(values_ptr + (value_at + inside)[None, :] * VALUE_DIM + d[:, None])
                sum_here = product(clamped(x.to(tl.float32)), (amount * 16384.0).to(tl.float16), ASM)
                acc = acc * lowering[None, :] + sum_here * (1.0 / 16384.0)
        slot += count
    first_part = cell.to(tl.int64) * parts
    write_part(stat_ptr, acc_ptr, first_part + index, top, total, acc, valid, BLOCK_ROWS, VALUE_DIM)


@triton.jit
def clamped(x):
    """Convert fp32 numbers to fp16, those beyond its range to its largest."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
