"""A kernel in plain torch, for recorded steps on a CPU: what it knows of lengths and places it reads from the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.attention import phases
from kvbench.attention.phases import Part, Work
from kvbench.attention.synthetic import read_tokens


class Oracle:
    """Serves any layer, in fp32 too: near ties would part two paths in 16 bits."""

    @staticmethod
    def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
        counts = [[tuple(line) for line in row] for row in work.table.tolist()]
        if work.received is not None:
            observed(query, work, counts, scaling)
        rows = [attention(query[row], work, row, lines, scaling) for row, lines in enumerate(counts)]
        return torch.stack(rows).to(query.dtype)


def attention(query: Tensor, work: Work, row: int, lines: list[Any], scaling: float) -> Tensor:
    """Attention of a row over its dequantized tokens, ``[T, Hq, D]``, as dequantized_attention, all heads at once."""
    parts = [(pair, line) for pair, line in zip(work.phases, lines, strict=True) if line[2]]
    every = slice(None)
    k = torch.cat([read_tokens(p, "key", row, every, first, n, work.key_dim) for (p, _), (first, _, n) in parts], 1)
    v = torch.cat([read_tokens(p, "value", row, every, first, n, work.value_dim) for (_, p), (_, first, n) in parts], 1)
    grouped = query.unflatten(0, (work.heads, -1)).float() * scaling
    scores = work.logits.capped(grouped @ k[:, None].transpose(-1, -2))
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~visible, -torch.inf)
    if work.logits.sinks is not None:
        sink = work.logits.sinks.float().view(work.heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v[:, None]).flatten(0, 1).transpose(0, 1)


def observed(query: Tensor, work: Work, counts: list[Any], scaling: float) -> None:
    """Write the attention that tokens in full precision receive to ``work.received``."""
    assert work.received is not None
    room, keys = work.received.buffer, work.phases[0][0].buffer
    for row, [(first, _, count)] in enumerate(counts):
        grouped = query[row].unflatten(0, (work.heads, -1)).float()
        scores = grouped @ keys[row, :, None, first : first + count].float().transpose(-1, -2) * scaling
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(count - scores.shape[-2])
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        if room.shape[2] == 1:
            weights = weights.mean(1, keepdim=True) if work.received.mean else weights.sum(1, keepdim=True)
        room[row, ..., :count] = weights


def part(segment: Any, channels: int, upper: bool = False) -> Part:
    """:func:`kvbench.attention.phases.describe_part`, whatever the dtype."""
    if not segment.packed:
        return Part(phases.Format("full", 16), buffer=segment.buffer)
    quantizer = segment.quantizer
    kind, group = phases.kind_of(quantizer), quantizer.group_size or channels
    if kind == "hierarchical" and upper:
        return Part(phases.Format("affine", 4, quantizer.axis, group), segment.words[:1], segment.params)
    window = phases.window_of(quantizer)
    return Part(phases.Format(kind, quantizer.bits, quantizer.axis, group, window), segment.words, segment.params)
