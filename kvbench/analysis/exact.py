"""The attention of a model to exact keys: its mass and its spikes by distance, and its highest value at each position.

Everything is computed from blocks of queries and keys in two passes: the first finds the denominators of the softmax
(online softmax), the second the probabilities of one block after the other. No tensor grows with queries times keys.
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
    """Exact attention of some queries of one layer.

    LogQuant's Figure 1 shows spikes, "high attention scores", without a threshold; here a spike has more than
    :data:`SPIKE` times the mean probability, that is ``SPIKE / n`` where a query sees n tokens.

    Args:
        mass: probability in each bin, ``[Hq, q, K]``; the sum over bins is 1 (less with a model's own sink logits).
        spikes: number of spikes in each bin, ``[Hq, q, K]``.
        visible: number of tokens that the query sees in each bin, ``[q, K]``.
        highest: the highest probability of each position over all heads and queries, ``[n]``; empty unless requested.
        mean: the mean probability of each position over all heads and queries, ``[n]``; empty unless requested.
        log_total: logarithm of the denominators, ``[H, q, g]``.
    """

    mass: Tensor
    spikes: Tensor
    visible: Tensor
    highest: Tensor
    mean: Tensor
    log_total: Tensor


def heads_first(x: Tensor) -> Tensor:
    """Return ``[H, q, g, ...]`` as ``[Hq, q, ...]``."""
    return x.transpose(1, 2).flatten(0, 1)


def profile(
    queries: Queries, exact: Exact, bins: Bins, *, positions: int = 0, block: int = BLOCK, spike: float = SPIKE
) -> Profile:
    """Return the exact attention of `queries`.

    Args:
        queries: the queries.
        exact: exact keys and values, the queries' own included.
        bins: bins of tokens.
        positions: length of ``highest`` and ``mean``; 0 leaves them empty.
        block: tokens of a block.
        spike: see :data:`SPIKE`.
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
        visible += ((scores[0, :, :1] > float("-inf")).float() @ member[0])[:, 0]
        if positions:
            highest[part.columns[0]] = weights.amax((0, 1, 2))
            mean[part.columns[0]] = weights.mean((0, 1, 2))
    return Profile(heads_first(sums[0]), heads_first(sums[1]), visible, highest, mean, log_total)
