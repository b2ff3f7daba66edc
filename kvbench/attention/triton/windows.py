"""Scores of packed keys whose groups lie anywhere, inside a Triton kernel: LogQuant's windows of 42 tokens.

A field of a word holds tokens of two groups at most (:func:`kvbench.attention.phases.window_of` sees to it), a tile
those of several. A query of several rows is multiplied with each field twice, scaled by either group; one of a single
row has columns to spare, so it is scaled by every group of the tile at once, and each token takes its own column.

Parameters, here as in :mod:`~kvbench.attention.triton.tiles`: ``PARTS`` the pointers of the keys, ``FORM`` their
format, ``KEY_DIM`` (D) channels, R query rows (columns of the products), ``ONE_ROW`` a query of one row.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.triton.codes import channel_parameters, group, meaning, planes, window
from kvbench.cache.kernels.pack_windows import first_token, group_holding


@triton.jit
def group_at(FORM: tl.constexpr, token):
    """Return the group of a window's `token` (counted from the segment's first), and the next group's first token."""
    number = group_holding(token, window(FORM), group(FORM))
    return number, first_token(number + 1, window(FORM), group(FORM))


@triton.jit
def window_scores(
    PARTS,
    FORM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    token,
    codes,
    lifted: tl.constexpr,
    query,
    alone,
    factor,
    N: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Return the scores ``[N, R]`` of N tokens of one field, in which no more than two groups meet.

    Args:
        PARTS, FORM, KEY_DIM: pointers, format and channels of the keys.
        token: the first of the tokens, counted from the segment's first.
        codes: their codes ``[N, D]`` (:func:`kvbench.attention.triton.codes.field`).
        lifted: what these are to be multiplied by (:func:`kvbench.attention.triton.codes.lift`).
        query: normalised query ``[D, R]``.
        alone: its only row ``[D]``, where `ONE_ROW`.
        factor: what takes a score back to bits, ``[R]``.
        N: tokens.
        ONE_ROW: the query has one row.
    """
    # both groups that may meet in the field; where there is one, the other's columns are not taken
    g, following = group_at(FORM, token)
    scaled, bias = channel_parameters(PARTS, FORM, KEY_DIM, g, query, alone, ONE_ROW)
    next_scaled, next_bias = channel_parameters(PARTS, FORM, KEY_DIM, g + 1, query, alone, ONE_ROW)
    score = tl.dot(codes, scaled) * (factor * lifted)[None, :] + (bias * factor)[None, :]
    other = tl.dot(codes, next_scaled) * (factor * lifted)[None, :] + (next_bias * factor)[None, :]
    return tl.where((token + tl.arange(0, N) < following)[:, None], score, other)


@triton.jit
def columns_of_groups(PARTS, FORM: tl.constexpr, KEY_DIM: tl.constexpr, first, g, alone, COLUMNS: tl.constexpr):
    """Return a query of one row scaled by each group of a tile, a column a group.

    The columns are as many as a query of more rows would have, so one product serves all groups.

    Args:
        PARTS, FORM, KEY_DIM: pointers, format and channels of the keys.
        first: the tile's first token, counted from the segment's first.
        g: the first token's group, which gets column 0.
        alone: the query's only row ``[D]``.
        COLUMNS: columns of the products, R.

    Returns:
        ``[D, R]`` fp16, and the biases of the scores ``[R]``.
    """
    at = tl.arange(0, KEY_DIM)
    number = g + tl.arange(0, COLUMNS)
    # columns beyond the tile's last group hold zeros: no token takes them, but the product must stay finite
    final, _ = group_at(FORM, first + 127)
    place = number[None, :] * KEY_DIM + at[:, None]
    there = (number <= final)[None, :] & (at >= 0)[:, None]
    stored = tl.load(PARTS[planes(FORM)] + place, mask=there, other=0.0)
    second = tl.load(PARTS[planes(FORM) + 1] + place, mask=there, other=0.0)
    _, least = meaning(FORM, stored, second)
    return alone.to(tl.float16)[:, None] * stored, tl.sum(alone[:, None] * least, 0)


@triton.jit
def own_column(FORM: tl.constexpr, scores, token, g):
    """Return each token's own score out of a product with a column for each group, repeated in every column ``[N, R]``.

    Args:
        FORM: the format of the keys.
        scores: ``[N, R]``: column c is the product with group g + c.
        token: the first of the N tokens, counted from the segment's first.
        g: the group of column 0.
    """
    N: tl.constexpr = scores.shape[0]
    mine, following = group_at(FORM, token)
    column = mine - g + tl.where(token + tl.arange(0, N) < following, 0, 1)
    # a sum over a row with one entry that is not zero: Triton gathers no column by a vector
    own = tl.arange(0, scores.shape[1])[None, :] == column[:, None]
    # repeated, since the caller's blocks have a column for each query row, of which one is used
    return tl.broadcast_to(tl.sum(tl.where(own, scores, 0.0), 1)[:, None], scores.shape)
