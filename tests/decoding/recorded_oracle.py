"""A kernel in plain torch, for recorded steps on a CPU: what it knows of lengths and places it reads from the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from kvbench.attention import phases, synthetic
from kvbench.attention.phases import Part, Work


class Oracle:
    """Serves any layer, in fp32 too: near ties would part two paths in 16 bits."""

    @staticmethod
    def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
        counts = [[tuple(line) for line in row] for row in work.table.tolist()]
        return synthetic.exact(query, replace(work, counts=counts), scaling).to(query.dtype)


def part(segment: Any, channels: int, upper: bool = False) -> Part:
    """:func:`kvbench.attention.phases.part`, whatever the dtype."""
    if not segment.packed:
        return Part(phases.Format("full", 16), buffer=segment.buffer)
    quantizer = segment.quantizer
    kind, group = phases.kind_of(quantizer), quantizer.group_size or channels
    if kind == "hierarchical" and upper:
        return Part(phases.Format("affine", 4, quantizer.axis, group), segment.words[:1], segment.params)
    window = phases.window_of(quantizer)
    return Part(phases.Format(kind, quantizer.bits, quantizer.axis, group, window), segment.words, segment.params)
