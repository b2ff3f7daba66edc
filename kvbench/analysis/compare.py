"""The attention of a model to what a cache holds, compared with its attention to the exact keys and values.

p is the probability that exact attention gives a token, q the one that attention over the cache gives it, for the same
query. Packed keys and values count as they are decoded when attention reads them; a token that the cache has dropped
has q = 0.

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
    """Errors of some queries of one layer, by bin of tokens.

    Args:
        mass: probability q in each bin, ``[Hq, q, K]``.
        l1: L1 error, ``[Hq, q, K]``.
        kl: terms of the KL divergence, ``[Hq, q, K]``; only their sum over bins is never negative.
        lost: probability p of dropped tokens, ``[Hq, q, K]``.
        coverage: probability p of tokens whose keys are in full precision, ``[Hq, q, K]``.
        full: number of these tokens, ``[Hq, q, K]``.
        output: relative error of the outputs, ``[Hq, q]``.
        parts: error of the part of the outputs from each bin, divided by the norm of the whole exact output,
            ``[Hq, q, K]``.
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
    """Return the attention outputs of a block by bin, ``[H, q, g, K, Dv]``.

    Args:
        weights: probabilities, ``[H, q, g, b]``.
        member: bins of the tokens, one-hot, ``[h, q, b, K]``.
        values: ``[H, b, Dv]``.
    """
    heads, count, group, tokens = weights.shape
    by_bin = weights[..., None, :] * member.transpose(-1, -2)[:, :, None]
    flat = by_bin.reshape(heads, -1, tokens) @ values
    return flat.view(heads, count, group, member.shape[-1], -1)


def exact_outputs(queries: Queries, exact: Exact, log_total: Tensor, bins: Bins, block: int = BLOCK) -> Tensor:
    """Return the outputs of exact attention by bin, ``[H, q, g, K, Dv]``.

    Args:
        queries: the queries.
        exact: exact keys and values.
        log_total: as in :class:`kvbench.analysis.exact.Profile`.
        bins: bins of tokens.
        block: tokens of a block.
    """
    total = torch.zeros((), device=log_total.device)
    for part in exact.blocks(block):
        weights = torch.exp(queries.scores(part.keys, part.columns) - log_total[..., None])
        total = total + outputs(weights, bins.one_hot(part.columns, queries.columns), part.values)
    return total


def compare(
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
    """Compare attention over what `layer` holds with exact attention.

    Args:
        queries: the newest tokens' queries; their own keys and values are in the layer.
        exact: exact keys and values.
        layer: a layer of the cache.
        bins: bins of tokens.
        log_total: denominators from :func:`kvbench.analysis.exact.profile` of the same queries.
        mass: exact probability in each bin, from there too.
        reference: from :func:`exact_outputs`.
        block: tokens of a block.
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
        gap = torch.where(q > 0, (scores - denominators[..., None]) - (exact_scores - log_total[..., None]), 0.0)
        for row, x in enumerate((p, q, (p - q).abs(), q * gap)):
            sums[row] += x @ member
        if part.full:
            sums[SUMS.index("coverage")] += p @ member
            full += (scores[:, :, :1] > float("-inf")).float() @ member
        output = output + outputs(q, member, part.values)
    exact_mass, mass_held, l1, kl, coverage = (heads_first(x) for x in sums)
    lost = mass - exact_mass
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
    """Return the exact scores and the cache's scores of a block's tokens, each ``[H, q, g, b]``."""
    return queries.scores(exact.at(part.columns), part.columns), queries.scores(part.keys, part.columns)
