"""Exact attention of a model: its distribution and its spikes by distance, and each position's highest probability.

Exact attention is attention over the keys and values in full precision, as the model computed them.

All figures are computed from blocks of queries and keys in two passes. The first pass computes the denominators of the
softmax (online softmax), and the second pass the probabilities. No tensor is as large as queries times keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.analysis.bins import Bins
from kvbench.analysis.blocks import BLOCK, Exact, Queries

#: a token is a spike of a query and head if it gets this many times the mean probability of the visible tokens
SPIKE = 10.0


@dataclass(frozen=True)
class Profile:
    """Distribution of exact attention over tokens, for q queries of one layer.

    A *spike* is a token whose probability is more than :data:`SPIKE` times the mean, that is, above ``SPIKE / n`` for a
    query that sees n tokens. LogQuant's Figure 1 shows such "high attention scores" without giving a threshold.

    Args:
        mass: sum of the probabilities in each of K bins, ``[Hq, q, K]``. The bins add up to 1, or to less if the model
            has sink logits.
        spikes: number of spikes in each bin, ``[Hq, q, K]``.
        visible: number of tokens in each bin that the query sees, ``[q, K]``.
        highest: highest probability of each position over all heads and queries, ``[n]``; empty unless requested.
        mean: mean probability of each position over all heads and queries, ``[n]``; empty unless requested.
        log_total: logarithm of each query's softmax denominator, ``[H, q, g]``.
    """

    mass: Tensor
    spikes: Tensor
    visible: Tensor
    highest: Tensor
    mean: Tensor
    log_total: Tensor


def heads_first(x: Tensor) -> Tensor:
    """Reshape ``[H, q, g, ...]`` to ``[Hq, q, ...]``, where the ``Hq = H * g`` query heads are in the model's order."""
    return x.transpose(1, 2).flatten(0, 1)


def profile(
    queries: Queries, exact: Exact, bins: Bins, *, positions: int = 0, block: int = BLOCK, spike: float = SPIKE
) -> Profile:
    """Compute exact attention of one layer, and summarize how it is distributed over bins of tokens.

    Args:
        exact: the exact keys and values, including those of the queries' own tokens.
        positions: length n of the arrays ``highest`` and ``mean``: the number of tokens so far; 0 leaves them empty.
        block: number of keys that are processed at a time.
        spike: a token is a spike if its probability is more than this many times the mean.
    """
    log_total = queries.log_total(exact.blocks(block))
    heads, count, group = log_total.shape
    sums = log_total.new_zeros(2, heads, count, group, bins.count)
    visible = log_total.new_zeros(count, bins.count)
    highest, mean = log_total.new_zeros(positions), log_total.new_zeros(positions)
    seen = queries.columns + 1 if queries.window is None else (queries.columns + 1).clamp(max=queries.window)
    threshold = (spike / seen.float())[None, :, None, None]
    for part in exact.blocks(block):
        scores = queries.scores(part.keys, part.columns)
        member = bins.one_hot(part.columns, queries.columns)
        weights = torch.exp(scores - log_total[..., None])
        sums[0] += weights @ member
        sums[1] += (weights > threshold).float() @ member
        # what a query sees is the same for all heads, so one is counted
        visible += ((scores[0, :, :1] > float("-inf")).float() @ member[0])[:, 0]
        if positions:
            highest[part.columns[0]] = weights.amax((0, 1, 2))
            mean[part.columns[0]] = weights.mean((0, 1, 2))
    return Profile(heads_first(sums[0]), heads_first(sums[1]), visible, highest, mean, log_total)
