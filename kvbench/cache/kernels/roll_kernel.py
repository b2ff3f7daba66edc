"""Kernels of :mod:`~kvbench.cache.kernels.roll_together` (Triton): windows of all layers, over a table of addresses.

A program serves one KV head of one row in one segment. Tokens move within a buffer, and old and new places overlap: a
program's threads have all read a part before any of them writes it, and parts are taken in the order in which none is
overwritten before it was read.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "room", "sinks"])
def write_sinks(
    table, turned, places, heads, room, sinks,
    TURNED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Sinks to their new places; the grid is (B x H, segments).

    Args:
        table: int64 ``[segments]``: addresses of buffers ``[B, H, room, D]``.
        turned: the sinks ``[B, segments, H, sinks, D]``, or, unless `TURNED`, any tensor of their dtype: they are
            taken from their old places, which are not behind the new ones.
        places: int32 ``[B, 4]`` (:func:`kvbench.cache.kernels.roll_together.places`).
    """
    line, number = tl.program_id(0), tl.program_id(1)
    row, head = line // heads, line % heads
    old, new = tl.load(places + row * 4).to(tl.int64), tl.load(places + row * 4 + 1).to(tl.int64)
    if new >= 0:
        buffer = tl.multiple_of(tl.load(table + number).to(tl.pointer_type(turned.dtype.element_ty)), 16)
        buffer += line.to(tl.int64) * room * D
        source = buffer + old * D
        if TURNED:
            source = turned + ((row * tl.num_programs(1) + number).to(tl.int64) * heads + head) * sinks * D
        channel = tl.arange(0, BLOCK)[None, :]
        parts = tl.cdiv(sinks, TOKENS)
        for part in range(parts):
            token = (parts - 1 - part) * TOKENS + tl.arange(0, TOKENS)[:, None]  # they move up: the last ones first
            mask = (token < sinks) & (channel < D)
            x = tl.load(source + token * D + channel, mask=mask)
            tl.debug_barrier()
            tl.store(buffer + (new + token) * D + channel, x, mask=mask)


@triton.jit(do_not_specialize=["heads", "room"])
def move_to_front(
    table, like, places, heads, room, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Live tokens to the front of their buffers; the grid is (B x H, segments).

    Args:
        table, places: as of :func:`write_sinks`.
        like: any tensor of the tokens' dtype.
    """
    line, number = tl.program_id(0), tl.program_id(1)
    row = line // heads
    start, count = tl.load(places + row * 4 + 2).to(tl.int64), tl.load(places + row * 4 + 3)
    buffer = tl.multiple_of(tl.load(table + number).to(tl.pointer_type(like.dtype.element_ty)), 16)
    buffer += line.to(tl.int64) * room * D
    channel = tl.arange(0, BLOCK)[None, :]
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None]
        mask = (token < count) & (channel < D)
        x = tl.load(buffer + (start + token) * D + channel, mask=mask)
        tl.debug_barrier()
        tl.store(buffer + token * D + channel, x, mask=mask)
