"""The online softmax of attention in plain torch: blocks of slots, merged by log-sum-exp in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvbench.attention.logits import Logits
from kvbench.cache.layer import KVLayer
from kvbench.quantizers.engine.arithmetic import Arithmetic

#: a block has at least BLOCK tokens; in small models more, up to ELEMENTS elements. Larger blocks mean fewer
#: operations, which dominate the cost of a step on a CPU until a block no longer fits the processor's caches
BLOCK, ELEMENTS = 1024, 1 << 20
#: score of a masked slot: far below any real score, but finite, so that a block with no visible slot yields no NaN
MASKED = -1e30


def grouped(layer: KVLayer, query: Tensor, scaling: float) -> Tensor:
    """Return scaled queries with all query heads and tokens of a KV head as rows, fp32 ``[rows, H, group * q, D]``.

    One matrix product with these rows then reads the keys of a KV head once for all its queries.
    """
    batch, query_heads, count, channels = query.shape
    return (query.float() * scaling).reshape(batch, layer.heads, query_heads // layer.heads * count, channels)


def largest_block(rows: int, heads: int, channels: int, block: int = BLOCK, elements: int = ELEMENTS) -> int:
    """Return the largest number of tokens in a block.

    Args:
        block: smallest result.
        elements: number of elements up to which a block may grow in small models.
    """
    return max(block, elements // (rows * heads * channels))


class Merge:
    """An online softmax, to which blocks of slots are added one after the other.

    Args:
        query: scaled queries (:func:`grouped`).
        rounding: rounds the probabilities before they multiply values; None: they are not rounded.
    """

    def __init__(
        self, layer: KVLayer, query: Tensor, heads: int, logits: Logits, rounding: Arithmetic | None = None
    ) -> None:
        self.layer, self.heads, self.rounding = layer, heads, rounding
        self.shape, self.device = query.shape[:3], query.device
        self.top: Tensor | None = None
        self.total: Tensor | None = None
        self.sum: Tensor | None = None
        if logits.sinks is not None:
            group = heads // layer.heads
            sinks = logits.sinks.float().view(1, layer.heads, group, 1)
            self.top = sinks.expand(self.shape[0], -1, -1, self.shape[2] // group).reshape(*self.shape, 1)
            # A sink is a logit without a value: it adds exp(0) to the total, relative to itself as the top.
            self.total = torch.ones_like(self.top)

    def add(self, scores: Tensor, values: Iterable[tuple[int, Callable[[], Tensor]]]) -> None:
        """Add a block of slots.

        Args:
            scores: scores of the slots, fp32 ``[rows, H, group * q, n]``.
            values: the parts of the block that are read together: the number of slots, and a function that returns
                their values, fp32 ``[rows, H, slots, Dv]``.
        """
        block_top = scores.amax(-1, keepdim=True)
        new_top = block_top if self.top is None else torch.maximum(self.top, block_top)
        weights = torch.exp(scores - new_top)
        block_total = weights.sum(-1, keepdim=True)
        if self.rounding is not None:
            weights = self.rounding.weighed(weights)
        block_sum, first = torch.zeros((), device=self.device), 0
        for count, read in values:
            block_sum = block_sum + weights[..., first : first + count] @ read()
            first += count
        if self.top is None or self.total is None:
            self.total, self.sum = block_total, block_sum
        else:
            # Total and sum are relative to exp(top): a higher top shrinks what earlier blocks have added.
            shrink = torch.exp(self.top - new_top)
            self.total = self.total * shrink + block_total
            self.sum = block_sum if self.sum is None else self.sum * shrink + block_sum
        self.top = new_top

    def output(self) -> Tensor | None:
        """Return the output, fp32 ``[rows, Hq, q, Dv]``; None if no block was added."""
        if self.total is None or self.sum is None:
            return None
        count = self.shape[1] * self.shape[2] // self.heads
        return (self.sum / self.total).view(self.shape[0], self.heads, count, self.layer.value_dim)

    def probabilities(self, scores: list[Tensor]) -> Tensor:
        """Return the probabilities ``[rows, Hq, q, slots]`` of all blocks, given their scores in the same order."""
        assert self.top is not None and self.total is not None
        count = self.shape[1] * self.shape[2] // self.heads
        return (torch.exp(torch.cat(scores, -1) - self.top) / self.total).view(self.shape[0], self.heads, count, -1)
