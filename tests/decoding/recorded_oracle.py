"""A kernel in plain torch, for recorded steps on a CPU: what it knows of lengths and places it reads from the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbench.attention import phases, synthetic
from kvbench.attention.phases import Part, Work


class Oracle:
    """Serves any layer, in fp32 too: near ties would part two paths in 16 bits."""

    @staticmethod
    def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
        counts = [[tuple(line) for line in row] for row in work.table.tolist()]
        if work.received is not None:
            observed(query, work, counts, scaling)
        return synthetic.dequantized_attention(query, replace(work, counts=counts), scaling).to(query.dtype)


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
