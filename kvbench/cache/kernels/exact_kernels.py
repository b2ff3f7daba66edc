"""Triton kernels that move exact tokens in the windows of layers: appended, rolled, or thinned out.

Appending is for :mod:`kvbench.cache.kernels.at_once`: each program copies one token's key or value of one head. Rolling
is for :mod:`kvbench.cache.kernels.roll_together`, and thinning, which drops every second token of the oldest ones
(LogQuant), for :mod:`kvbench.cache.kernels.pack_together`; both serve the windows of many layers in one launch.

A program serves one KV head of one row in one segment; the grid is (B x H, segments). Tokens move within a buffer,
where their old and new places may overlap. So all threads of a program read a block of tokens before any of them writes
it, and blocks are processed in an order in which none is overwritten before it has been read.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_token(source, target, CHANNELS: tl.constexpr):
    """Copy all channels of one token of one head. CHANNELS need not be a power of two."""
    # ranges are powers of two in Triton; heads need not be
    BLOCK: tl.constexpr = triton.next_power_of_2(CHANNELS)
    channel = tl.arange(0, BLOCK)
    tl.store(target + channel, tl.load(source + channel, mask=channel < CHANNELS), mask=channel < CHANNELS)


@triton.jit
def write_new_tokens(
    keys, values, key_buffer, value_buffer, places,
    key_row, key_head, key_token, value_row, value_head, value_token,
    heads, key_room, value_room, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of new tokens into a layer's buffers (:func:`kvbench.cache.kernels.at_once.append`).

    Grid: (B x H, new tokens, 2). Programs with 0 in the last dimension write keys, those with 1 write values. Channels
    are contiguous; the strides of `keys` and `values` over rows, heads and tokens are in elements. `key_room` and
    `value_room` are the numbers of tokens per head for which the buffers have room.
    """
    line, token, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = line // heads, line % heads
    # read from device memory, as a captured step is replayed with the arguments of its capture
    place = (tl.load(places + 2 * row + side) + token).to(tl.int64)
    if side == 0:
        source = keys + row.to(tl.int64) * key_row + head * key_head + token * key_token
        copy_token(source, key_buffer + (line.to(tl.int64) * key_room + place) * KEY_DIM, KEY_DIM)
    else:
        source = values + row.to(tl.int64) * value_row + head * value_head + token * value_token
        copy_token(source, value_buffer + (line.to(tl.int64) * value_room + place) * VALUE_DIM, VALUE_DIM)


@triton.jit(do_not_specialize=["heads", "room", "sinks"])
def write_sinks(
    table, turned, places, heads, room, sinks,
    TURNED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the sinks of rolling windows (the first tokens, which are never dropped) to new places in their buffers.

    Args:
        table: pointer to the addresses of the buffers ``[B, H, room, D]``, int64 ``[segments]``.
        turned: if `TURNED`, pointer to what to write: the keys of the sinks after rotation to their new positions,
            ``[B, segments, H, sinks, D]``. Otherwise any tensor with the dtype of the tokens; the sinks are then copied
            from their old places, whose indices are never above the new ones.
        places: pointer to int32 ``[B, 4]`` (:func:`kvbench.cache.kernels.roll_together.places`). Only the first two
            columns are read: the buffer index of the first sink before and after the move, or -1 in a row that does not
            move.
        BLOCK: the smallest power of two that is at least CHANNELS, the channels of a head.
        TOKENS: number of tokens to copy at a time.
    """
    line, number = tl.program_id(0), tl.program_id(1)
    row, head = line // heads, line % heads
    old, new = tl.load(places + row * 4).to(tl.int64), tl.load(places + row * 4 + 1).to(tl.int64)
    if new >= 0:  # else this row does not move
        buffer = tl.multiple_of(tl.load(table + number).to(tl.pointer_type(turned.dtype.element_ty)), 16)
        # one launch serves several segments, whose addresses are in the table
        buffer += line.to(tl.int64) * room * CHANNELS
        source = buffer + old * CHANNELS
        if TURNED:
            source = turned + ((row * tl.num_programs(1) + number).to(tl.int64) * heads + head) * sinks * CHANNELS
        channel = tl.arange(0, BLOCK)[None, :]
        parts = tl.cdiv(sinks, TOKENS)
        for part in range(parts):
            token = (parts - 1 - part) * TOKENS + tl.arange(0, TOKENS)[:, None]  # towards the end: last ones first
            mask = (token < sinks) & (channel < CHANNELS)
            x = tl.load(source + token * CHANNELS + channel, mask=mask)
            tl.debug_barrier()
            tl.store(buffer + (new + token) * CHANNELS + channel, x, mask=mask)


@triton.jit(do_not_specialize=["heads", "room"])
def move_to_front(
    table, like, places, heads, room, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Move the tokens of rolling windows from the end of their buffers to the front.

    Of `places`, only the last two columns are read: the start of the tokens to move, and their number, 0 for none.
    `like` is any tensor with the dtype of the tokens. The other arguments are those of :func:`write_sinks`.
    """
    line, number = tl.program_id(0), tl.program_id(1)
    row = line // heads
    start, count = tl.load(places + row * 4 + 2).to(tl.int64), tl.load(places + row * 4 + 3)
    buffer = tl.multiple_of(tl.load(table + number).to(tl.pointer_type(like.dtype.element_ty)), 16)
    buffer += line.to(tl.int64) * room * CHANNELS
    channel = tl.arange(0, BLOCK)[None, :]
    # towards the front, so the first ones first
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None]
        mask = (token < count) & (channel < CHANNELS)
        x = tl.load(buffer + (start + token) * CHANNELS + channel, mask=mask)
        tl.debug_barrier()
        tl.store(buffer + token * CHANNELS + channel, x, mask=mask)


# Not specialized: arguments that change from call to call must not cause a recompilation.
@triton.jit(do_not_specialize=["first_row", "heads", "room", "start", "length", "count"])
def thin_windows_kernel(
    table, like, first_row, heads, room, start, length, count,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Drop the second, the fourth, ... of the first ``2 * count`` tokens, and move the others to the front.

    Grid: (rows x H, segments).

    Args:
        table: pointer to the addresses of the buffers ``[B, H, room, CHANNELS]``, int64 ``[segments]``.
        like: any tensor with the dtype of the tokens.
        first_row: first row of the batch to change.
        start: index of the first token in the buffers.
        length: number of tokens before the call.
        BLOCK: the smallest power of two that is at least CHANNELS.
        TOKENS: number of tokens to copy at a time.
    """
    line = first_row * heads + tl.program_id(0)
    buffer = tl.multiple_of(tl.load(table + tl.program_id(1)).to(tl.pointer_type(like.dtype.element_ty)), 16)
    buffer += (line.to(tl.int64) * room + start) * CHANNELS
    channel = tl.arange(0, BLOCK)[None, :]
    # no token moves back, so blocks in ascending order overwrite only tokens that have been read
    for first in range(0, length - count, TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None]
        source = tl.where(token < count, 2 * token, token + count)
        mask = (token < length - count) & (channel < CHANNELS)
        x = tl.load(buffer + source * CHANNELS + channel, mask=mask)
        tl.debug_barrier()  # all threads have read the block before one of them writes
        tl.store(buffer + token * CHANNELS + channel, x, mask=mask)
        tl.debug_barrier()
