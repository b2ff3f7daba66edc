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
    """Return the group to which a token belongs, in a format whose groups may cross tile boundaries.

    Returns:
        The index of the group, and the index of the first token of the next group, both counted from the beginning of
        the segment.
    """
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
    """Compute scores in bits, ``[N, R]``, of N tokens of one field, for keys whose groups may cross tile boundaries.

    The tokens belong to at most two groups. The scores are computed for both, and each token keeps the one of its own
    group.

    Args:
        token: index of the first of the N tokens in their segment.
        codes: unpacked codes of the tokens, ``[N, D]`` (:func:`kvbench.attention.triton.codes.field`).
        lifted: factor on the unpacked codes (:func:`kvbench.attention.triton.codes.lift`).
        alone: the only row of the query, ``[D]``; used only if `ONE_ROW`.
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
    """Scale a query of one row for every group of a tile, with one column per group.

    A query with one row is padded to several columns. The columns for groups replace this padding, so one product
    computes the scores for all groups.

    Args:
        first: index of the tile's first token in its segment.
        g: index of the group to which that token belongs; this group gets column 0.
        COLUMNS: number of columns, R, at least the number of groups in a tile.

    Returns:
        The scaled query, fp16 ``[D, R]``, and the bias of each group's scores, ``[R]``. Columns without a group are
        zero.
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
    """Select the score of each token from the column of its group.

    Args:
        scores: ``[N, R]``; column c contains the scores of the tokens as if they belonged to group g + c.
        token: index of the first of the N tokens in their segment.
        g: index of the group of column 0.

    Returns:
        ``[N, R]``: the selected score of each token, repeated in every column.
    """
    N: tl.constexpr = scores.shape[0]
    mine, following = group_at(FORM, token)
    column = mine - g + tl.where(token + tl.arange(0, N) < following, 0, 1)
    # a sum over a row with one nonzero entry, as Triton cannot index columns by a vector
    own = tl.arange(0, scores.shape[1])[None, :] == column[:, None]
    # repeated, as the caller's blocks have a column for each query row; only one of them is used
    return tl.broadcast_to(tl.sum(tl.where(own, scores, 0.0), 1)[:, None], scores.shape)
