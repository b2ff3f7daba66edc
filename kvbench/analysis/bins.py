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
