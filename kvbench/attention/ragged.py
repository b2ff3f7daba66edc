"""Attention of a decode step over rows that hold different numbers of tokens, in plain torch.

The reference path handles adjacent rows of equal length in one call. In a batch of different prompts, that is almost
one call per row, which costs more in launches than in arithmetic on a GPU. So all rows are read together here, and the
slots behind a row's last one are masked. On a CPU, where separate calls would cost little, this makes a row's result
independent of other rows' lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvbench.attention.logits import PLAIN, Logits
from kvbench.attention.merge import MASKED, Merge, grouped, largest_block
from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.packed import PackedSegment

#: largest number of elements of a block of dequantized keys or values, over all rows and heads
MOST = 1 << 24


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one segment, for some rows.

    Args:
        start: index of the first token within the segments.
        stop: one past the index of the last token.
    """

    keys: Segment
    values: Segment
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def beyond(self, rows: slice) -> Tensor:
        """Return a mask of the last m tokens, bool ``[rows, 1, m]``, True if a row does not have the token.

        All rows have the tokens before the last m. m is 0 if all rows have all tokens.
        """
        lengths, device = self.keys.lengths[rows], self.keys.device
        numbers = torch.arange(max(self.start, min(*lengths, self.stop)), self.stop, device=device)
        return (numbers >= torch.tensor(lengths, device=device)[:, None])[:, None]


def attend_ragged(
    layer: KVLayer, query: Tensor, mask: Tensor | None, scaling: float, logits: Logits = PLAIN
) -> Tensor | None:
    """Compute the attention of one new token per row over all cached tokens; arguments as for ``attend_reference``.

    Returns:
        The output ``[B, 1, Hq, Dv]``; None if this is not supported (:func:`served`), or there are several new tokens.
    """
    if query.shape[2] != 1 or not served(layer) or not visible(layer, mask):
        return None
    keys, _ = layer.stores()
    width = layer.heads * max(layer.key_dim, layer.value_dim)
    most = largest_block(1, layer.heads, max(layer.key_dim, layer.value_dim))
    longest = min(max(map(sum, zip(*(segment.lengths for segment in keys.segments), strict=True))), most)
    count = max(MOST // (max(longest, 1) * width), 1)
    layer.paths.update(("reference", "packed"))
    outs = []
    for first in range(0, layer.batch, count):
        rows = slice(first, min(first + count, layer.batch))
        outs.append(attend_ragged_rows(layer, rows, query[rows], most, scaling, logits))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def served(layer: KVLayer) -> bool:
    """Return True if :func:`attend_ragged` can serve a layer.

    Every row needs equally long segments of keys and values, some packed tokens, and slots in text order. Sliding
    windows, keys before RoPE and methods that observe attention are not served.
    """
    keys, values = layer.stores()
    method = layer.method
    if layer.rope or layer.window or method.observe_steps or len(keys.segments) != len(values.segments):
        return False
    for pair in zip(keys.segments, values.segments, strict=True):
        if pair[0].lengths != pair[1].lengths or not all(type(part) in (FullSegment, PackedSegment) for part in pair):
            return False
    packed = [segment.lengths for segment in keys.segments if segment.packed]
    if not packed or not all(map(any, zip(*packed, strict=True))):
        return False
    in_order = all(method.positions(layer, row) is None for row in range(layer.batch))
    return in_order and method.reading_order(layer, slice(0, 1)) is None


def visible(layer: KVLayer, mask: Tensor | None) -> bool:
    """Return True if a mask hides only tokens that are not stored, such as padding, so that all slots are visible."""
    if mask is None:
        return True
    if mask.dtype != torch.bool:
        return False
    first = torch.tensor([layer.first(row) for row in range(layer.batch)], device=mask.device)
    padding = torch.arange(mask.shape[-1], device=mask.device) < first[:, None]
    return bool((mask | padding[:, None, None]).all())


def attend_ragged_rows(layer: KVLayer, rows: slice, query: Tensor, most: int, scaling: float, logits: Logits) -> Tensor:
    """Compute the attention of some rows in blocks of `most` tokens; other arguments as for :func:`attend_ragged`."""
    q, upper = grouped(layer, query, scaling), layer.progress.upper
    merge = Merge(layer, q, query.shape[1], logits)
    for block in span_blocks(layer, rows, most):
        masks = [span.beyond(rows) for span in block]
        parts = []
        for span, beyond in zip(block, masks, strict=True):
            part = logits.capped(q @ read_span(span.keys, rows, span, upper).transpose(-1, -2))
            if beyond.shape[-1]:
                part[..., -beyond.shape[-1] :].masked_fill_(beyond[:, None], MASKED)
            parts.append(part)
        read_values = [
            (span.count, partial(read_span, span.values, rows, span, upper, beyond))
            for span, beyond in zip(block, masks, strict=True)
        ]
        merge.add(parts[0] if len(parts) == 1 else torch.cat(parts, -1), read_values)
    out = merge.output()
    assert out is not None, "every row has packed tokens"
    return out.transpose(1, 2).to(query.dtype)


def span_blocks(layer: KVLayer, rows: slice, most: int) -> Iterator[list[Span]]:
    """Divide the slots of some rows into blocks of at most `most` tokens: lists of spans, each within one segment."""
    keys, values = layer.stores()
    block: list[Span] = []
    left = most
    for key, value in zip(keys.segments, values.segments, strict=True):
        start, stop = 0, max(key.lengths[rows])
        while start < stop:
            count = min(stop - start, left)
            block.append(Span(key, value, start, start + count))
            start, left = start + count, left - count
            if not left:
                yield block
                block, left = [], most
    if block:
        yield block


def read_span(segment: Segment, rows: slice, span: Span, upper: bool, beyond: Tensor | None = None) -> Tensor:
    """Return the tokens of a span, fp32 ``[rows, H, n, D]``.

    Args:
        upper: True to decode hierarchical codes from their upper 4 bits only.
        beyond: mask of the last tokens (:meth:`Span.beyond`); those that a row does not have become 0. Values need it:
            the weights of such tokens are 0, but what is stored in their place need not be finite.
    """
    if isinstance(segment, FullSegment):
        starts = torch.tensor(segment.starts[rows], device=segment.device)[:, None]
        places = (starts + torch.arange(span.start, span.stop, device=segment.device)).clamp(max=segment.capacity - 1)
        index = places[:, None, :, None].expand(-1, segment.heads, -1, segment.channels)
        tokens = segment.buffer[rows].gather(2, index).float()
    else:
        tokens = (segment.read_upper if upper else segment.read)(rows, span.start, span.stop, torch.float32)
    if beyond is not None and beyond.shape[-1]:
        tokens[:, :, -beyond.shape[-1] :].masked_fill_(beyond[..., None], 0.0)
    return tokens
