"""Compile-time parameters of the packing kernels, and the division of a tile among their programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kvbench.cache.segments.layout import TILE
from kvbench.quantizers.packing import PLANES

#: elements of a program
ELEMENTS = 8192


@dataclass(frozen=True)
class Form:
    """Compile-time choices of the kernel, apart from the dtype.

    Args:
        kind, bits, by_channel, group: of the quantizer.
        rows, channels: word rows and channels of a program.
        parts: programs of a tile.
        warps: of a program. Threads along the tokens of a group each work out its parameters, so fewer warps do less
            work in all, and more hide latency better.
        window: tokens of a block whose groups, of at most `group` tokens, do not fit tiles; 0: they do.
    """

    kind: str
    bits: int
    by_channel: bool
    group: int
    rows: int
    channels: int
    parts: int
    warps: int = 2
    window: int = 0


@lru_cache(maxsize=256)
def form(kind: str, bits: int, by_channel: bool, group: int, channels: int, half: bool) -> Form | str:
    """Return how the kernel serves a format for heads of `channels`, or why it does not; `half`: fp16, else bf16."""
    if bits not in (2, 4, 8):
        return f"{bits}-bit codes"
    if group & (group - 1) or not 8 <= group <= TILE:
        return f"groups of {group}"
    all_rows = word_rows(bits)
    if by_channel:
        rows = all_rows
        wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    else:
        wide = max((w for w in (group, 32, 64, 128) if w >= group and channels % w == 0), default=0)
        rows = min(all_rows, max(ELEMENTS * all_rows // (TILE * wide), 1)) if wide else 0
    if not wide:
        return f"heads of {channels} channels"
    # as many as compile for sm_90 without spilling registers
    if kind == "hierarchical" or (not half and (group <= 32 or not by_channel)):
        warps = 4
    else:
        warps = 1 if by_channel and group <= rows and half else 2
    return Form(kind, bits, by_channel, group, rows, wide, all_rows // rows * (channels // wide), warps)


@lru_cache(maxsize=256)
def windows(bits: int, window: int, group: int, channels: int, half: bool) -> Form | str:
    """Return :func:`form` for blocks of `window` tokens, cut into groups of at most `group`, wherever they lie."""
    if bits not in (2, 4, 8):
        return f"{bits}-bit codes"
    least = window // -(-window // group)
    if not 8 <= least <= group <= 64:
        return f"windows of {window} tokens in groups of {least} to {group}"
    wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    if not wide:
        return f"heads of {channels} channels"
    # compiled for sm_90, two warps of 64 channels spill no register for W = 42 (a few words for some other windows)
    return Form("affine", bits, True, group, word_rows(bits), wide, channels // wide, 2, window)


def programs(how: Form, start: int, count: int) -> tuple[Form, int, int]:
    """Return the programs of a (row, KV head) that write tokens ``[start, start + count)``.

    A token alone with groups of its own (the value that leaves a window at every step) touches one word row, so one
    program of a small kind writes it, instead of all that a tile has.

    Returns:
        How a tile is cut, the first of its programs that is needed, and how many are.
    """
    if count == 1 and not how.by_channel:
        one = alone_in_its_row(how)
        across = one.parts * one.rows // word_rows(how.bits)
        return one, start % TILE % word_rows(how.bits) * across, across
    tiles = -(-(start + count) // TILE) - start // TILE
    return how, 0, max(tiles, 1) * how.parts


@lru_cache(maxsize=256)
def alone_in_its_row(how: Form) -> Form:
    """Return the form whose programs have a single word row."""
    return replace(how, rows=1, parts=how.parts * how.rows, warps=1)


def word_rows(bits: int) -> int:
    """Return the word rows of a tile."""
    return TILE * max(PLANES[bits]) // 16
