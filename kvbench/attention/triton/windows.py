"""Scores of packed keys whose groups lie anywhere, inside a Triton kernel: LogQuant's windows of 42 tokens.

A field of a word holds tokens of two groups at most (:func:`kvbench.attention.phases.window_of` sees to it), a tile
those of several. A query of several rows is multiplied with each field twice, scaled by either group; one of a single
row has columns to spare, so it is scaled by every group of the tile at once, and each token takes its own column.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import channel_parameters, group, meaning, planes, window
from kvbench.cache.kernels.pack_windows import first_token, group_holding


@triton.jit
def group_at(FORM: tl.constexpr, token):
    """Group of a window's `token` (counted from the first of the segment), and the first token of the next group."""
    number = group_holding(token, window(FORM), group(FORM))
    return number, first_token(number + 1, window(FORM), group(FORM))


@triton.jit
def window_scores(
    PARTS,
    FORM: tl.constexpr,
    D: tl.constexpr,
    token,
    codes,
    lifted: tl.constexpr,
    query,
    alone,
    factor,
    N: tl.constexpr,
    ONE: tl.constexpr,
):
    """Scores ``[N, R]`` of `codes` ``[N, D]``, the tokens from `token` on: in a field no more than two groups meet."""
    g, following = group_at(FORM, token)
    scaled, bias = channel_parameters(PARTS, FORM, D, g, query, alone, ONE)
    next_scaled, next_bias = channel_parameters(PARTS, FORM, D, g + 1, query, alone, ONE)
    score = tl.dot(codes, scaled) * (factor * lifted)[None, :] + (bias * factor)[None, :]
    other = tl.dot(codes, next_scaled) * (factor * lifted)[None, :] + (next_bias * factor)[None, :]
    return tl.where((token + tl.arange(0, N) < following)[:, None], score, other)


@triton.jit
def columns_of_groups(PARTS, FORM: tl.constexpr, D: tl.constexpr, first, g, alone, R: tl.constexpr):
    """A query of one row `alone` ``[D]`` scaled by each group of the tile that begins with token `first`, from `g` on.

    Its columns are as many as a query of more rows would have, so one product serves all groups.

    Returns:
        ``[D, R]`` fp16, and the biases of the scores ``[R]``.
    """
    at = tl.arange(0, D)
    number = g + tl.arange(0, R)
    final, _ = group_at(FORM, first + 127)
    place = number[None, :] * D + at[:, None]
    there = (number <= final)[None, :] & (at >= 0)[:, None]
    stored = tl.load(PARTS[planes(FORM)] + place, mask=there, other=0.0)
    second = tl.load(PARTS[planes(FORM) + 1] + place, mask=there, other=0.0)
    _, least = meaning(FORM, stored, second)
    return alone.to(tl.float16)[:, None] * stored, tl.sum(alone[:, None] * least, 0)


@triton.jit
def own_column(FORM: tl.constexpr, scores, token, g):
    """Of `scores` ``[N, R]`` of the tokens from `token` on by group, from `g` on, each token's own, in every column."""
    N: tl.constexpr = scores.shape[0]
    mine, following = group_at(FORM, token)
    column = mine - g + tl.where(token + tl.arange(0, N) < following, 0, 1)
    own = tl.arange(0, scores.shape[1])[None, :] == column[:, None]
    return tl.broadcast_to(tl.sum(tl.where(own, scores, 0.0), 1)[:, None], scores.shape)
