"""Comparison of attention over the keys and values in a cache with attention over the exact keys and values.

For the same query, p is the probability that exact attention gives to a token, and q the probability that attention
over the cache gives to it. Packed keys and values are dequantized as attention reads them. A token that the cache has
dropped has q = 0.

- **L1 error**: the sum of |p - q| over all tokens, 0 to 2. A dropped token contributes p. LogQuant's Table 4 reports an
  "L1 error with original attention" without saying what is summed or averaged. Its largest entry, 1,612.56, is below
  2,048, the largest possible sum over the 32 layers with 32 heads of Llama-3.1-8B, and above the largest sum over one
  layer (64). So the table's figure is taken to be this error, summed over all layers and heads, and averaged over
  decode steps and samples.
- **KL divergence** of q from p: the sum of q (log q - log p), in nats. It is finite where tokens were dropped (for pure
  eviction it is -log of the probability that is left), whereas the sum of p (log p - log q) is infinite there.
- **coverage**: the sum of p over tokens whose keys are held in full precision (LogQuant's Figure 4 divides it by their
  number, eq. 2).
- **output error**: the Euclidean distance between both outputs of a head, divided by the norm of the exact one; and the
  same for the parts of the outputs that come from one bin of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.analysis.bins import Bins
from kvbench.analysis.blocks import BLOCK, Block, Exact, Queries, held
from kvbench.analysis.exact import heads_first
from kvbench.cache.layer import KVLayer

#: a difference of two sums of probabilities up to this is rounding: nothing was dropped
ROUNDING = 1e-5
#: sums of a comparison over the tokens of each bin
SUMS = ("exact", "mass", "l1", "kl", "coverage")


@dataclass(frozen=True)
class Errors:
    """Errors of attention over a method's cache in one layer, by query head, query and bin of tokens.

    P and Q are the two probabilities of a token that the module's docstring calls p and q. Arrays other than `output`
    have one entry per bin: ``[Hq, q, K]`` for Hq query heads, q queries and K bins.

    Args:
        mass: sum of Q over the tokens of the bin.
        l1: L1 error, the sum of |P - Q| over the tokens of the bin.
        kl: the bin's contribution to the KL divergence of Q from P, in nats. A single contribution may be negative, but
            the sum over bins is not.
        lost: sum of P over the tokens of the bin that the cache has dropped.
        coverage: sum of P over the tokens of the bin whose keys the cache holds in full precision.
        full: number of these tokens.
        output: Euclidean distance between the head's output and the exact output, divided by the norm of the exact
            output, ``[Hq, q]``.
        parts: the same distance for only what the bin's tokens contribute to both outputs, divided by the norm of the
            complete exact output.
    """

    mass: Tensor
    l1: Tensor
    kl: Tensor
    lost: Tensor
    coverage: Tensor
    full: Tensor
    output: Tensor
    parts: Tensor


def outputs(weights: Tensor, member: Tensor, values: Tensor) -> Tensor:
    """Return what a block of b tokens contributes to the attention outputs, separately for each bin.

    Args:
        weights: attention probabilities of the tokens, ``[H, q, g, b]``.
        member: bin of each token, one-hot, ``[h, q, b, K]`` with h = H or 1 (:meth:`Bins.one_hot`).
        values: values of the tokens, ``[H, b, Dv]``.

    Returns:
        ``[H, q, g, K, Dv]`` for H KV heads with g query heads each, q queries and K bins. The sum over K is the block's
        contribution to the outputs.
    """
    heads, count, group, tokens = weights.shape
    by_bin = weights[..., None, :] * member.transpose(-1, -2)[:, :, None]
    flat = by_bin.reshape(heads, -1, tokens) @ values
    return flat.view(heads, count, group, member.shape[-1], -1)


def exact_outputs(queries: Queries, exact: Exact, log_total: Tensor, bins: Bins, block: int = BLOCK) -> Tensor:
    """Return the outputs of exact attention, split by the bin of the tokens from which they come.

    The shape is that of :func:`outputs`; the sum over K is the attention output. `log_total` ``[H, q, g]`` is the
    result of :meth:`Queries.log_total`; `block` tokens are processed at a time.
    """
    total = torch.zeros((), device=log_total.device)
    for part in exact.blocks(block):
        weights = torch.exp(queries.scores(part.keys, part.columns) - log_total[..., None])
        total = total + outputs(weights, bins.one_hot(part.columns, queries.columns), part.values)
    return total


def compare_attention(
    queries: Queries,
    exact: Exact,
    layer: KVLayer,
    bins: Bins,
    *,
    log_total: Tensor,
    mass: Tensor,
    reference: Tensor,
    block: int = BLOCK,
) -> Errors:
    """Measure how attention over one layer of a method's cache deviates from exact attention, for the same queries.

    The newest tokens in the cache must be those of the queries.

    Args:
        log_total: log-sum-exp of the exact scores, ``[H, q, g]`` (:attr:`kvbench.analysis.exact.Profile.log_total`).
        mass: probability that exact attention gives to each bin, ``[Hq, q, K]`` (:attr:`Profile.mass`).
        reference: outputs of exact attention by bin, from :func:`exact_outputs`.
        block: largest number of tokens that are processed at a time.
    """
    denominators = queries.log_total(held(layer, block))
    heads, count, group = denominators.shape
    sums = denominators.new_zeros(len(SUMS), heads, count, group, bins.count)
    full = denominators.new_zeros(heads, count, 1, bins.count)
    output = torch.zeros((), device=denominators.device)
    for part in held(layer, block):
        member = bins.one_hot(part.columns, queries.columns)
        exact_scores, scores = _both(queries, exact, part)
        p = torch.exp(exact_scores - log_total[..., None])
        q = torch.exp(scores - denominators[..., None])
        # log q - log p, from the scores: where q is 0, the product of 0 and -inf would be NaN
        gap = torch.where(q > 0, (scores - denominators[..., None]) - (exact_scores - log_total[..., None]), 0.0)
        for row, x in enumerate((p, q, (p - q).abs(), q * gap)):
            sums[row] += x @ member
        if part.full:
            sums[SUMS.index("coverage")] += p @ member
            # all heads of a group see the same tokens, so one of them is counted
            full += (scores[:, :, :1] > float("-inf")).float() @ member
        output = output + outputs(q, member, part.values)
    exact_mass, mass_held, l1, kl, coverage = (heads_first(x) for x in sums)
    lost = mass - exact_mass  # p of the tokens that the cache no longer holds
    lost = torch.where(lost > ROUNDING, lost, 0.0)
    norm = reference.sum(-2).norm(dim=-1)
    difference = output - reference
    return Errors(
        mass=mass_held,
        l1=l1 + lost,
        kl=kl,
        lost=lost,
        coverage=coverage,
        full=heads_first(full.expand(-1, -1, group, -1)),
        output=heads_first(difference.sum(-2).norm(dim=-1) / norm),
        parts=heads_first(difference.norm(dim=-1) / norm[..., None]),
    )


def _both(queries: Queries, exact: Exact, part: Block) -> tuple[Tensor, Tensor]:
    """Return the scores of the queries with a block's exact keys, and with its stored keys, each ``[H, q, g, b]``."""
    return queries.scores(exact.at(part.columns), part.columns), queries.scores(part.keys, part.columns)
