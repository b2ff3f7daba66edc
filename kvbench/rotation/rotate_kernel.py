"""Triton kernels that rotate the heads of a decode step: queries, keys and values in one launch, the output in another.

Each program rotates some tokens of one head, in fp32. Signs and Hadamard matrices are computed in registers (the
butterfly of the fast Walsh-Hadamard transform); any other matrix is read once per program.

A *line* is a token of a row, numbered ``row * count + token`` for `count` tokens per row; a program takes TOKENS lines.
Strides are in elements, and channels are contiguous. WIDTH is the smallest power of two that is at least DIM, the
channels of a head.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def butterfly_products(x, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Return the products of consecutive blocks of 2**LEVELS elements of x, ``[WIDTH]``, with a Hadamard matrix."""
    for level in tl.static_range(LEVELS):
        pairs = tl.permute(tl.reshape(x, (WIDTH // (2 << level), 2, 1 << level)), (0, 2, 1))
        left, right = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), (WIDTH,))
    return x


@triton.jit
def rotate_head(
    source, source_row, source_token, target, target_row, target_token, places, matrix, signs, scale,
    first, lines, count,
    DIM: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr, SIGNS: tl.constexpr, AFTER: tl.constexpr,
    TOKENS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Rotate up to TOKENS tokens of one head.

    Args:
        source: pointer to the head's first token.
        target: pointer to where to write the head's first token.
        places: pointer to an int32 per row, the index in `target` of its first new token; the next row's is two int32
            further. Used if PLACED.
        matrix: pointer to the matrix ``[DIM, DIM]`` by which rows are multiplied; used if LEVELS is 0.
        signs: pointer to fp32 ``[DIM]``; used if SIGNS.
        scale: factor of the result; used unless LEVELS is 0.
        first: first line of this program.
        LEVELS: base-2 logarithm of the Hadamard blocks; 0 to multiply by `matrix`.
        AFTER: True to multiply by the signs after the Hadamard matrix, not before.
        PLACED: True to read from `places` where the tokens of a row go.
    """
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    sign = tl.full((WIDTH,), 1.0, tl.float32)
    if SIGNS:
        sign = tl.load(signs + channel, mask=inside, other=0.0)
    if LEVELS == 0:
        grid = channel[:, None] * DIM + channel[None, :]
        square = tl.load(matrix + grid, mask=inside[:, None] & inside[None, :], other=0.0)
    for step in range(TOKENS):
        line = first + step
        if line < lines:
            row, token = (line // count).to(tl.int64), line % count
            x = tl.load(source + row * source_row + token * source_token + channel, mask=inside, other=0.0)
            y = x.to(tl.float32)
            if LEVELS == 0:
                y = tl.sum(y[:, None] * square, 0)
            else:
                if SIGNS and not AFTER:
                    y = y * sign
                y = butterfly_products(y, WIDTH, LEVELS) * scale
                if SIGNS and AFTER:
                    y = y * sign
            place = token.to(tl.int64)
            if PLACED:
                place += tl.load(places + 2 * row)
            into = target + row * target_row + place * target_token + channel
            tl.store(into, y.to(target.dtype.element_ty), mask=inside)


@triton.jit
def rotate_one(
    source, target, matrix, matrix_head, signs, scale, lines, count, group,
    source_row, source_head, source_token, target_row, target_head, target_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr, SIGNS: tl.constexpr, AFTER: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one tensor. Grid: (heads, lines / TOKENS).

    Other arguments are those of :func:`rotate_head`.

    Args:
        source: pointer to ``[B, heads, q, D]``.
        target: pointer to the result, of the same shape.
        matrix_head: stride of `matrix` over KV heads; 0 if they share one.
        group: number of heads that share a matrix.
    """
    head = tl.program_id(0)
    rotate_head(
        source + head * source_head, source_row, source_token, target + head * target_head, target_row, target_token,
        source, matrix + (head // group) * matrix_head, signs, scale, tl.program_id(1) * TOKENS, lines, count,
        DIM, WIDTH, LEVELS, SIGNS, AFTER, TOKENS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key_room", "value_room"])  # else room for one token would be a number of Python's
def rotate_step(
    query, query_target, key, key_target, value, value_target, places,
    key_matrix, key_dual, key_signs, key_scale, key_dual_scale, key_matrix_head,
    value_matrix, value_signs, value_scale, value_matrix_head,
    lines, count, query_heads, heads,
    query_row, query_head, query_token, key_row, key_head, key_token, value_row, value_head, value_token,
    key_room, value_room,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, KEY_LEVELS: tl.constexpr, KEY_SIGNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_LEVELS: tl.constexpr, VALUE_SIGNS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TOKENS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Rotate the queries, keys and values of a step. Grid: (query heads + 2 x KV heads, lines / TOKENS).

    Without KEYS, the grid has no programs for query heads.

    Matrices, signs, factors and LEVELS are as for :func:`rotate_head`: those of keys and values, and `key_dual` and
    `key_dual_scale` for queries, which share the signs of keys.

    Args:
        query: pointer to the queries, ``[B, Hq, q, D]``.
        query_target: pointer to the rotated queries, contiguous.
        key: pointer to the keys, ``[B, H, q, D]``.
        key_target: pointer to where keys are written, ``[B, H, key_room, D]``, contiguous.
        value: pointer to the values, ``[B, H, q, Dv]``.
        value_target: pointer to where values are written, ``[B, H, value_room, Dv]``, contiguous.
        places: pointer to int32 ``[B, 2]``, the indices along the rooms of each row's first key and value; if PLACED.
        key_matrix_head, value_matrix_head: strides of the matrices over KV heads; 0 if they share one.
        KEYS: True to rotate queries and keys; else keys are only copied, and queries are not touched.
        VALUES: True to rotate values; else they are only copied.
    """
    line = tl.program_id(1) * TOKENS
    head = tl.program_id(0)
    if KEYS:
        if head < query_heads:
            rotate_head(
                query + head * query_head, query_row, query_token,
                query_target + head * count * KEY_DIM, query_heads * count * KEY_DIM, KEY_DIM, places,
                key_dual + head // (query_heads // heads) * key_matrix_head, key_signs, key_dual_scale,
                line, lines, count, KEY_DIM, KEY_WIDTH, KEY_LEVELS, KEY_SIGNS, False, TOKENS, False,
            )  # fmt: skip
        head -= query_heads
    room_key, room_value = key_room.to(tl.int64) * KEY_DIM, value_room.to(tl.int64) * VALUE_DIM
    if (head >= 0) & (head < heads):
        if KEYS:
            rotate_head(
                key + head * key_head, key_row, key_token, key_target + head * room_key, heads * room_key, KEY_DIM,
                places, key_matrix + head * key_matrix_head, key_signs, key_scale,
                line, lines, count, KEY_DIM, KEY_WIDTH, KEY_LEVELS, KEY_SIGNS, False, TOKENS, PLACED,
            )  # fmt: skip
        else:
            copy_head(
                key + head * key_head, key_row, key_token, key_target + head * room_key, heads * room_key, KEY_DIM,
                places, line, lines, count, KEY_DIM, KEY_WIDTH, TOKENS, PLACED,
            )  # fmt: skip
    if head >= heads:
        head -= heads
        if VALUES:
            rotate_head(
                value + head * value_head, value_row, value_token,
                value_target + head * room_value, heads * room_value, VALUE_DIM,
                places + 1, value_matrix + head * value_matrix_head, value_signs, value_scale,
                line, lines, count, VALUE_DIM, VALUE_WIDTH, VALUE_LEVELS, VALUE_SIGNS, False, TOKENS, PLACED,
            )  # fmt: skip
        else:
            copy_head(
                value + head * value_head, value_row, value_token,
                value_target + head * room_value, heads * room_value, VALUE_DIM,
                places + 1, line, lines, count, VALUE_DIM, VALUE_WIDTH, TOKENS, PLACED,
            )  # fmt: skip


@triton.jit
def copy_head(
    source, source_row, source_token, target, target_row, target_token, places, first, lines, count,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Copy up to TOKENS tokens of one head; the arguments are those of :func:`rotate_head`."""
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    for step in range(TOKENS):
        line = first + step
        if line < lines:
            row, token = (line // count).to(tl.int64), line % count
            place = token.to(tl.int64)
            if PLACED:
                place += tl.load(places + 2 * row)
            x = tl.load(source + row * source_row + token * source_token + channel, mask=inside)
            tl.store(target + row * target_row + place * target_token + channel, x, mask=inside)
