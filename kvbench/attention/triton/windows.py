"""Scores of packed keys whose groups cross tile boundaries, in a Triton kernel: LogQuant's windows of 42 tokens.

The tokens of one field of a word belong to at most two groups (:func:`kvbench.attention.phases.window_of` ensures it),
those of a tile to several. A query with several rows is multiplied by each field twice, once scaled for each group. A
query with one row has spare columns: it is scaled for every group of the tile at once, and each token's score is taken
from its group's column.

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
    """Return the number of a token's group, and the first token of the next group, counted from the segment's first."""
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
    """Return the scores ``[N, R]``, in bits, of N tokens of one field, which belong to at most two groups.

    Args:
        PARTS: pointers of the keys.
        FORM: format of the keys.
        KEY_DIM: channels of a key, D.
        token: the first of the tokens, counted from the segment's first.
        codes: their codes ``[N, D]`` (:func:`kvbench.attention.triton.codes.field`).
        lifted: factor on the codes (:func:`kvbench.attention.triton.codes.lift`).
        query: normalised query ``[D, R]``.
        alone: its only row ``[D]``; used if `ONE_ROW`.
        factor: factor that converts a score of the normalised query to bits, ``[R]``.
        N: number of tokens.
        ONE_ROW: the query has one row.
    """
    # scores for both groups that the field may contain; if it has only one, the second is not used
    g, following = group_at(FORM, token)
    scaled, bias = channel_parameters(PARTS, FORM, KEY_DIM, g, query, alone, ONE_ROW)
    next_scaled, next_bias = channel_parameters(PARTS, FORM, KEY_DIM, g + 1, query, alone, ONE_ROW)
    score = tl.dot(codes, scaled) * (factor * lifted)[None, :] + (bias * factor)[None, :]
    other = tl.dot(codes, next_scaled) * (factor * lifted)[None, :] + (next_bias * factor)[None, :]
    return tl.where((token + tl.arange(0, N) < following)[:, None], score, other)


@triton.jit
def columns_of_groups(PARTS, FORM: tl.constexpr, KEY_DIM: tl.constexpr, first, g, alone, COLUMNS: tl.constexpr):
    """Return a query of one row, scaled for each group of a tile: one column per group.

    The columns replace the padding that a query with one row would have, so one product serves all groups.

    Args:
        PARTS: pointers of the keys.
        FORM: format of the keys.
        KEY_DIM: channels of a key, D.
        first: the tile's first token, counted from the segment's first.
        g: number of that token's group, which gets column 0.
        alone: the query's only row ``[D]``.
        COLUMNS: columns of the products, R.

    Returns:
        The scaled query, fp16 ``[D, R]``, and the bias of each group's scores ``[R]``.
    """
    at = tl.arange(0, KEY_DIM)
    number = g + tl.arange(0, COLUMNS)
    # columns after the tile's last group are zero: no token uses them, but the product must stay finite
    final, _ = group_at(FORM, first + 127)
    place = number[None, :] * KEY_DIM + at[:, None]
    there = (number <= final)[None, :] & (at >= 0)[:, None]
    stored = tl.load(PARTS[planes(FORM)] + place, mask=there, other=0.0)
    second = tl.load(PARTS[planes(FORM) + 1] + place, mask=there, other=0.0)
    _, least = meaning(FORM, stored, second)
    return alone.to(tl.float16)[:, None] * stored, tl.sum(alone[:, None] * least, 0)


@triton.jit
def own_column(FORM: tl.constexpr, scores, token, g):
    """Return the score of each token, selected from the column of its group and repeated in every column: ``[N, R]``.

    Args:
        FORM: the format of the keys.
        scores: ``[N, R]``: column c is scaled for group g + c.
        token: the first of the N tokens, counted from the segment's first.
        g: number of the group of column 0.
    """
    N: tl.constexpr = scores.shape[0]
    mine, following = group_at(FORM, token)
    column = mine - g + tl.where(token + tl.arange(0, N) < following, 0, 1)
    # a sum over a row with one nonzero entry, as Triton cannot index columns by a vector
    own = tl.arange(0, scores.shape[1])[None, :] == column[:, None]
    # repeated, as the caller's blocks have a column for each query row; only one of them is used
    return tl.broadcast_to(tl.sum(tl.where(own, scores, 0.0), 1)[:, None], scores.shape)
