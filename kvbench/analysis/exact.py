"""Exact attention of a model: its distribution and spikes by distance, and the highest probability of each position.

Exact attention is attention over the keys and values in full precision, as the model computed them.

All figures are computed from blocks of queries and keys in two passes. The first pass computes the denominators of the
softmax (online softmax), and the second pass the probabilities. No tensor is as large as queries times keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.analysis.blocks import BLOCK, Exact, Queries
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")  # the rows and tables of an analysis are read without it


@dataclass(frozen=True)
class Bins:
    """Histogram bins for tokens, over which attention probabilities and errors are summed.

    Each of the first :attr:`sinks` tokens of a text has a bin of its own, because these tokens attract attention from
    any query (Xiao et al., StreamingLLM, sec. 3.1; LogQuant, sec. 3.1, excludes the first two). All other tokens are
    binned by their distance to the query, in positions: 0 (the query's own token), 1, 2-3, 4-7, 8-15 and so on. So the
    newest 1, 2, 4, 8, ... tokens fill complete bins.

    Args:
        sinks: number of tokens at the beginning of a text that have a bin of their own.
        doublings: number of bins for distances of 1 or more. Each is twice as wide as the one before; the last has no
            upper limit.
    """

    sinks: int = 2
    doublings: int = 17

    @property
    def count(self) -> int:
        """Total number of bins, which is the dimension K of arrays."""
        return self.sinks + 1 + self.doublings

    @property
    def edges(self) -> list[int]:
        """Lower limits of the distance bins: 0, 1, 2, 4, 8, ...; the bins of the sinks are not included."""
        return [0, *(1 << power for power in range(self.doublings))]

    def names(self) -> list[str]:
        """Return a name for each bin: ``token 0``, ``token 1``, ``0``, ``1``, ``2-3``, ..., ``65536-``."""
        edges = self.edges
        spans = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
        return [*(f"token {i}" for i in range(self.sinks)), *spans, f"{edges[-1]}-"]

    def newest(self, count: int) -> slice:
        """Return the slice of bins that contain the newest `count` tokens, including the query's own token.

        Raises:
            ValueError: `count` is not a power of two up to ``2**(doublings - 1)``, so it does not fill complete bins.
        """
        if count not in self.edges[1:]:
            raise ValueError(
                f"{count} tokens do not fill whole bins; allowed numbers of tokens: "
                f"{', '.join(map(str, self.edges[1:]))}"
            )
        return slice(self.sinks, self.sinks + self.edges.index(count))

    def one_hot(self, columns: Tensor, queries: Tensor) -> Tensor:
        """Assign each token to its bin, separately for each query, as a one-hot vector.

        Args:
            columns: positions of b tokens, ``[h, b]``. h is the number of KV heads if each head holds different tokens,
                or 1 if all hold the same.
            queries: positions of q queries, ``[q]``.

        Returns:
            fp32 ``[h, q, b, K]``, where K is the number of bins: 1 in the token's bin, else 0. Tokens later than a
            query are counted as distance 0, so the caller must mask them.
        """
        distance = (queries[:, None] - columns[:, None, :]).clamp(min=0)
        edges = torch.tensor(self.edges[1:], device=columns.device)
        index = torch.bucketize(distance, edges, right=True) + self.sinks
        index = torch.where(columns[:, None, :] < self.sinks, columns[:, None, :], index)
        return torch.nn.functional.one_hot(index, self.count).float()


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
