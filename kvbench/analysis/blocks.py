"""Iteration over keys and values in blocks of tokens: exact keys and values, or the content of a layer of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvbench.attention.logits import PLAIN, Logits
from kvbench.cache.layer import KVLayer
from kvbench.cache.rope import rotated_slots
from kvbench.cache.segments.base import FullSegment

#: the only row of a batch that is analysed
ROW = slice(0, 1)
#: default number of tokens of a block
BLOCK = 1024


@dataclass(frozen=True)
class Block:
    """Keys and values of b tokens of one layer, dequantized to fp32, for H KV heads.

    Args:
        keys: keys after RoPE, ``[H, b, D]`` in fp32.
        values: ``[H, b, Dv]`` in fp32.
        columns: position of each token, ``[H, b]``, or ``[1, b]`` if all heads hold the same tokens.
        full: True if the cache holds these keys in full precision, not packed.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor
    full: bool


@dataclass(frozen=True)
class Exact:
    """Keys and values of n consecutive tokens of one layer as the model computed them, before any method packs them.

    Args:
        keys: keys after RoPE, ``[H, n, D]`` in the model's dtype, for H KV heads.
        values: ``[H, n, Dv]`` in the model's dtype.
        first: position of the first of these tokens; above 0 if a sliding window has dropped earlier ones.
    """

    keys: Tensor
    values: Tensor
    first: int = 0

    def blocks(self, size: int = BLOCK) -> Iterator[Block]:
        """Yield the keys and values in order of position, in blocks of `size` tokens; the last may be smaller."""
        count = self.keys.shape[1]
        for start in range(0, count, size):
            stop = min(start + size, count)
            columns = torch.arange(self.first + start, self.first + stop, device=self.keys.device)[None]
            yield Block(self.keys[:, start:stop].float(), self.values[:, start:stop].float(), columns, True)

    def at(self, columns: Tensor) -> Tensor:
        """Return the exact keys, ``[H, b, D]`` in fp32, at the positions `columns` (:class:`Block`).

        A position before :attr:`first`, which the model's sliding window no longer covers, gets the key of another
        token; the caller must mask it.
        """
        index = (columns - self.first).clamp(min=0)
        if len(index) == 1:
            return self.keys.index_select(1, index[0]).float()
        return self.keys.gather(1, index[..., None].expand(-1, -1, self.keys.shape[-1])).float()

    @classmethod
    def of(cls, layer: KVLayer) -> Exact:
        """Return the keys and values in a layer of an ``fp16`` cache with one sequence."""
        keys, values = (store.only_full(ROW) for store in layer.stores())
        assert keys is not None and values is not None
        return cls(keys[0], values[0], layer.first(0))


def columns_held(layer: KVLayer) -> Tensor:
    """Return the sequence position of the token in each of the n slots of a layer with one sequence.

    The shape is ``[H, n]`` for H KV heads, or ``[1, n]`` if all heads hold the same tokens.
    """
    columns = layer.method.columns(layer, 0)
    if columns is None:
        columns = torch.arange(layer.first(0), layer.seen)
    return (columns if columns.ndim > 1 else columns[None]).to(layer.device)


def held(layer: KVLayer, size: int = BLOCK) -> Iterator[Block]:
    """Yield the keys and values that a layer with one sequence holds, dequantized as attention reads them.

    The blocks, of at most `size` tokens, are in the order of the slots. All keys of a block have the same format, and
    all values too.
    """
    keys, values = layer.stores()
    columns, slots, upper = columns_held(layer), keys.length(ROW), layer.progress.upper
    borders = sorted({*keys.cuts(ROW, 0, slots), *values.cuts(ROW, 0, slots)})
    full = _full(layer)
    for begin, end in pairwise(borders):
        exact = next(exact for last, exact in full if begin < last)
        for start in range(begin, end, size):
            stop = min(start + size, end)
            k = rotated_slots(layer, ROW, start, stop, keys.read(ROW, start, stop, torch.float32, upper))
            v = values.read(ROW, start, stop, torch.float32, upper)
            k, v = layer.unrotated(k, v)
            yield Block(k[0], v[0], columns[:, start:stop], exact)


def _full(layer: KVLayer) -> list[tuple[int, bool]]:
    """Return a pair for each segment of the keys: one past its last slot; True if it is in full precision."""
    ends, last = [], 0
    for segment in layer.stores()[0].segments:
        last += segment.length(ROW)
        ends.append((last, isinstance(segment, FullSegment)))
    return ends


@dataclass(frozen=True)
class Queries:
    """Queries of q tokens in one layer.

    Args:
        vectors: queries ``[H, q, g, D]`` in fp32, already multiplied by the scaling factor. There are H KV heads with g
            query heads each; query head ``h * g + i`` belongs to KV head h.
        columns: positions of the q tokens, ``[q]``.
        window: number of tokens that a query sees, including its own, if the layer has a sliding window; else None.
        logits: the model's softcap and sink logits.
    """

    vectors: Tensor
    columns: Tensor
    window: int | None = None
    logits: Logits = PLAIN

    @classmethod
    def of(
        cls, query: Tensor, heads: int, scaling: float, first: int, window: int | None, logits: Logits = PLAIN
    ) -> Queries:
        """Return the queries ``[1, Hq, q, D]`` (after RoPE) of a layer's attention call, scaled and grouped by KV head.

        The first query is at the position `first`, and the others follow without a gap. `window` and `logits` are
        those of :class:`Queries`.
        """
        vectors = (query[0].float() * scaling).unflatten(0, (heads, -1)).transpose(1, 2)
        columns = torch.arange(first, first + query.shape[2], device=query.device)
        return cls(vectors, columns, window, logits)

    def __getitem__(self, part: slice) -> Queries:
        """Return the queries of the tokens that the slice `part` selects."""
        return Queries(self.vectors[:, part], self.columns[part], self.window, self.logits)

    def scores(self, keys: Tensor, columns: Tensor) -> Tensor:
        """Return the attention scores with the keys of b tokens (:class:`Block`), before the softmax: ``[H, q, g, b]``.

        The softcap is applied; the score is -inf where a query must not see a token.
        """
        heads, count, group, channels = self.vectors.shape
        flat = self.vectors.reshape(heads, count * group, channels)
        scores = self.logits.capped(flat @ keys.transpose(-1, -2)).view(heads, count, group, -1)
        distance = self.columns[:, None] - columns[:, None, :]  # [h, q, b]
        hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
        return scores.masked_fill_(hidden[:, :, None], float("-inf"))

    def log_total(self, blocks: Iterator[Block]) -> Tensor:
        """Return the log-sum-exp of each query's scores, the logarithm of its softmax denominator: ``[H, q, g]``.

        `blocks` must yield all tokens over which the softmax runs; it is consumed once. The model's sink logits, if it
        has any, are included.
        """
        heads, count, group, _ = self.vectors.shape
        top = self.vectors.new_full((heads, count, group), -1e30)  # finite, so that a block of hidden tokens adds 0
        total = torch.zeros_like(top)
        if self.logits.sinks is not None:
            top = self.logits.sinks.float().view(heads, 1, group).expand(-1, count, -1)
            total = torch.ones_like(top)
        for block in blocks:
            scores = self.scores(block.keys, block.columns)
            higher = torch.maximum(top, scores.amax(-1))
            total = total * torch.exp(top - higher) + torch.exp(scores - higher[..., None]).sum(-1)
            top = higher
        return top + total.log()
