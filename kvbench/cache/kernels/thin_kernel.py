"""Triton kernel that drops every second token of the oldest ones in windows of many layers at once (LogQuant)."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


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
