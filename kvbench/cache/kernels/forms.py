"""Compile-time parameters of the packing kernels, and the division of a tile among their programs.

A tile is 128 tokens of one row of the batch and one KV head. Its int16 words form word rows. A word row holds one token
per code that fits into a word: 4 tokens with 4-bit codes, 8 with 2-bit codes (:mod:`kvbench.cache.segments.layout`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kvbench.cache.kernels.reads import TILES, WINDOWS, format_refusal
from kvbench.cache.segments.layout import TILE
from kvbench.quantizers.packing import PLANES

#: number of elements that a program processes, at most
ELEMENTS = 8192


@dataclass(frozen=True)
class Form:
    """Compile-time parameters of a packing kernel: the storage format, and the share of a tile that a program handles.

    Args:
        kind: arithmetic of the quantizer: ``affine``, ``hierarchical`` or ``atom``, or the rule of an engine's format.
        by_channel: True if a group consists of tokens of one channel, False if of channels of one token.
        group: number of elements in a group, or if `window` is not 0, the largest such number.
        rows: number of word rows of a tile that a program processes.
        channels: number of channels that a program processes.
        parts: number of programs among which a tile is divided.
        warps: number of warps of a program. Each thread computes the parameters of its group for itself, so fewer warps
            do less work in total, while more warps hide latency better.
        window: if groups may cross tile boundaries (LogQuant), the number of tokens per block that is divided into
            groups; else 0.
        scale: the one scale of all tokens, in engine formats that have one (:mod:`kvbench.cache.kernels.engine`).
        table: for TurboQuant's keys, the midpoints between levels, then the levels, in ascending order.
        rank: index of the threshold of clipping among a token's sorted absolute values
            (:mod:`kvbench.cache.kernels.clipped`).
        balance: how KVarN's tiles are balanced (:mod:`kvbench.cache.kernels.kvarn`).
        iterations: number of rounds of that.
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
    scale: float = 1.0
    table: tuple[float, ...] = ()
    rank: int = 0
    balance: str = ""
    iterations: int = 0


@lru_cache(maxsize=256)
def packing_form(kind: str, bits: int, by_channel: bool, group: int, channels: int, half: bool) -> Form | str:
    """Choose the compile-time parameters of the kernel that packs tokens into a given storage format.

    If the kernel does not support the format, the result is the reason as text. The first arguments are those of
    :class:`Form`; `channels` are the channels of a head, and `half` is True for fp16 tokens, False for bf16.
    """
    reason = format_refusal(TILES, kind, bits, "channel" if by_channel else "token", group, channels)
    if reason:
        return reason
    all_rows = word_rows(bits)
    if by_channel:
        rows = all_rows
        wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    else:
        wide = max((w for w in (group, 32, 64, 128) if w >= group and channels % w == 0), default=0)
        # with 3 bits, a word of the plane of 1 bit holds tokens of two word rows of the plane of 2 bits
        rows = all_rows if bits == 3 else min(all_rows, max(ELEMENTS * all_rows // (TILE * wide), 1)) if wide else 0
    if not wide:
        return f"heads of {channels} channels"
    # the fewest warps that compile for sm_90 without register spills
    if kind == "hierarchical" or bits == 3 or (not half and (group <= 32 or not by_channel)):
        warps = 4
    else:
        warps = 1 if by_channel and group <= rows and half else 2
    return Form(kind, bits, by_channel, group, rows, wide, all_rows // rows * (channels // wide), warps)


@lru_cache(maxsize=256)
def windows(bits: int, window: int, group: int, channels: int, half: bool) -> Form | str:
    """Choose the compile-time parameters of the kernel for groups of tokens that may cross tile boundaries (LogQuant).

    A block of `window` tokens (LogQuant's W) is divided into as few groups as `group`, the largest size, allows. `half`
    is ignored: the parameters are the same for fp16 and bf16. Otherwise as :func:`packing_form`.
    """
    for size in (window // -(-window // group), group):  # the smallest group, and the largest
        reason = format_refusal(WINDOWS, "affine", bits, "channel", size, channels, window=window)
        if reason:
            return f"windows of {window} tokens in {reason}"
    wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    if not wide:
        return f"heads of {channels} channels"
    # on sm_90, two warps for 64 channels spill no registers for W = 42, and a few words for some other windows
    return Form("affine", bits, True, group, word_rows(bits), wide, channels // wide, 2, window)


def programs(how: Form, start: int, count: int) -> tuple[Form, int, int]:
    """Return which programs of a packing kernel to launch, per row and KV head, to write consecutive tokens.

    In general, these are all programs of every tile that contains one of the tokens. The exception is a single token
    that is quantized per token, such as the value that leaves the full-precision window at each step. It occupies one
    word row (but with 3 bits, words of two planes), and only programs for this word row are launched.

    Returns:
        The compile-time parameters to use, how many programs of the tile of token `start` to skip, and how many to
        launch.
    """
    if count == 1 and not how.by_channel and how.bits != 3:
        one = alone_in_its_row(how)
        across = one.parts * one.rows // word_rows(how.bits)
        return one, start % TILE % word_rows(how.bits) * across, across
    tiles = -(-(start + count) // TILE) - start // TILE
    return how, 0, max(tiles, 1) * how.parts


@lru_cache(maxsize=256)
def alone_in_its_row(how: Form) -> Form:
    """Return a copy of compile-time parameters, changed so that each program processes a single word row."""
    return replace(how, rows=1, parts=how.parts * how.rows, warps=1)


def word_rows(bits: int) -> int:
    """Return the number of word rows in a tile of 128 tokens, for codes of `bits` bits."""
    return TILE * max(PLANES[bits]) // 16
