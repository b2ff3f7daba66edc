"""Bins of tokens: each of the first tokens (sinks) by itself, all others by their distance to the query."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")  # the rows and tables of an analysis are read without it


@dataclass(frozen=True)
class Bins:
    """Division of tokens into bins, over which attention and errors are summed.

    The first :attr:`sinks` tokens of a text have a bin each, because they attract attention from any query (Xiao et
    al., StreamingLLM, sec. 3.1; LogQuant, sec. 3.1, excludes the first two). All other tokens are divided by their
    distance to the query: 0 (the query's own token), 1, 2-3, 4-7, 8-15 and so on. The newest 128 tokens, for example,
    fill complete bins.

    Args:
        sinks: number of tokens at the beginning of a text that have a bin each.
        doublings: number of bins for distances above 0; the last one has no upper limit.
    """

    sinks: int = 2
    doublings: int = 17

    @property
    def count(self) -> int:
        """Number of bins, K."""
        return self.sinks + 1 + self.doublings

    @property
    def edges(self) -> list[int]:
        """The smallest distance of each bin after those of the sinks: 0, 1, 2, 4, 8, ..."""
        return [0, *(1 << power for power in range(self.doublings))]

    def names(self) -> list[str]:
        """Return a name for each bin: ``token 0``, ``token 1``, ``0``, ``1``, ``2-3``, ..., ``65536-``."""
        edges = self.edges
        spans = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
        return [*(f"token {i}" for i in range(self.sinks)), *spans, f"{edges[-1]}-"]

    def newest(self, count: int) -> slice:
        """Return the indices of the bins that hold the newest `count` tokens, including the query's own token.

        Raises:
            ValueError: `count` tokens do not fill complete bins.
        """
        if count not in self.edges[1:]:
            raise ValueError(
                f"{count} tokens do not fill whole bins; allowed numbers of tokens: "
                f"{', '.join(map(str, self.edges[1:]))}"
            )
        return slice(self.sinks, self.sinks + self.edges.index(count))

    def one_hot(self, columns: Tensor, queries: Tensor) -> Tensor:
        """Return the one-hot encoding of the bin into which each token falls for each query.

        A sink has its own bin. The bin of any other token follows from its distance: the query's position minus the
        token's position.

        Args:
            columns: positions of b tokens, ``[h, b]``; h is the number of KV heads, or 1 if all heads hold the same
                tokens.
            queries: positions of q queries, ``[q]``.

        Returns:
            fp32 ``[h, q, b, K]``, where K is the number of bins: 1 in the token's bin, else 0. Tokens later than a
            query count as distance 0, so the caller must mask them.
        """
        distance = (queries[:, None] - columns[:, None, :]).clamp(min=0)
        edges = torch.tensor(self.edges[1:], device=columns.device)
        index = torch.bucketize(distance, edges, right=True) + self.sinks
        index = torch.where(columns[:, None, :] < self.sinks, columns[:, None, :], index)
        return torch.nn.functional.one_hot(index, self.count).float()
