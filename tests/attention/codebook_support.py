"""Layers of KVQuant's format with random contents, as kernels read them, and attention to them in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.attention.logits import PLAIN, Logits
from kvbench.attention.phases import Format, Part, Work, looked_up, pairs_of_row
from kvbench.attention.rope.rotation_tables import Rope, rotation_tables
from kvbench.cache.segments.codebook import NuqFormat, NuqSegment

LEVELS = {bits: torch.tanh(torch.linspace(-1.7, 1.9, 2**bits)) for bits in (2, 3, 4)}


class Rotation:
    """RoPE as Llama applies it, in fp32."""

    def __init__(self, base: float = 10000.0) -> None:
        self.base = base

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        half = keys.shape[-1] // 2
        frequency = self.base ** -(torch.arange(half, device=keys.device, dtype=torch.float32) / half)
        angle = positions[:, None, :, None].to(keys.device).float() * frequency
        cos, sin = torch.cos(angle), torch.sin(angle)
        first, second = keys.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass
class Layer:
    """A layer with sinks, packed tokens and a tail in full precision: segments of keys and of values, and the work."""

    keys: tuple[Tensor, NuqSegment, Tensor]
    values: tuple[Tensor, NuqSegment, Tensor]
    lengths: list[tuple[int, int, int]]
    starts: list[int]
    rotation: Rotation | None
    work: Work

    def exact(self, query: Tensor, scaling: float, logits: Logits = PLAIN) -> Tensor:
        """Attention in fp32 to the dequantized tokens, ``[B, 1, Hq, Dv]``."""
        outs = []
        for row, counts in enumerate(self.lengths):
            sides = []
            for side in (self.keys, self.values):
                one = slice(row, row + 1)
                packed = side[1].read(one, 0, counts[1], torch.float32)
                sides.append(
                    torch.cat([side[0][one, :, : counts[0]].float(), packed, side[2][one, :, : counts[2]].float()], 2)
                )
            k, v = sides
            if self.rotation is not None:
                k = self.rotation.rotate(k, self.starts[row] + torch.arange(k.shape[2])[None])
            group = query.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            score = query[row : row + 1].float() @ k.transpose(-1, -2) * scaling
            if logits.softcap is not None:
                score = logits.softcap * torch.tanh(score / logits.softcap)
            if logits.sinks is not None:
                score = torch.cat([score, logits.sinks.float().view(1, -1, 1, 1)], -1)
                v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
            outs.append((score.softmax(-1) @ v).transpose(1, 2))
        return torch.cat(outs)


def layer(
    lengths: Sequence[tuple[int, int, int]],
    *,
    bits: int = 3,
    heads: int = 2,
    channels: int = 64,
    outliers: float = 0.02,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    starts: Sequence[int] | None = None,
    rotate: bool = True,
    seed: int = 0,
    room: int = 0,
    border: float = 2.2,
) -> Layer:
    """A layer with random contents.

    Args:
        lengths: per row, the tokens of sinks, packed tokens and tail.
        border: standard deviations beyond which an element of a key is an outlier, if there are outliers.
        room: packed tokens for which there is room besides.
    """
    rng = torch.Generator(device).manual_seed(seed)
    batch, width = len(lengths), heads * channels

    def draw(count: int, spread: Tensor | float = 1.0, middle: Tensor | float = 0.0) -> Tensor:
        x = torch.randn(batch, heads, count, channels, generator=rng, device=device)
        return (x * spread + middle).to(dtype)

    spread = torch.rand(heads, 1, channels, generator=rng, device=device) + 0.5
    middle = torch.randn(heads, 1, channels, generator=rng, device=device)
    most = [max(counts[i] for counts in lengths) for i in range(3)]
    sides = []
    for side in ("key", "value"):
        thresholds = None
        if side == "key":
            reach = (border if outliers else 3.5) * spread
            thresholds = torch.stack([(middle + reach).reshape(width), (middle - reach).reshape(width)]).half()
        form = NuqFormat(bits, LEVELS[bits], outliers=outliers, thresholds=thresholds)
        segment = NuqSegment(batch, heads, channels, dtype, device, form=form, side=side, capacity=most[1] + room)
        x = draw(most[1], spread, middle) if side == "key" else draw(most[1])
        for row, counts in enumerate(lengths):
            segment.append(slice(row, row + 1), x[row : row + 1, :, : counts[1]])
        sides.append((draw(most[0] + 2), segment, draw(most[2] + 3)))
    keys, values = sides
    rows = [pairs_of_row(counts, counts) for counts in lengths]
    order = sorted({(i, i) for counts in lengths for i, n in enumerate(counts) if n} | {(1, 1)})
    counts = [[phases.get(pair, (0, 0, 0)) for pair in order] for phases in rows]

    def part(side: tuple[Tensor, NuqSegment, Tensor], i: int) -> Part:
        return looked_up(side[1]) if i == 1 else Part(Format("full", 16), buffer=side[i])

    work = Work(
        [(part(keys, i), part(values, i)) for i, _ in order],
        torch.tensor(counts, dtype=torch.int32, device=device),
        counts,
        heads,
        channels,
        channels,
    )
    rotation, begin = Rotation() if rotate else None, list(starts or [0] * batch)
    if rotation is not None:
        fine, coarse = rotation_tables(rotation.rotate, channels, torch.device(device), max(begin) + sum(most) + room)
        work.rope = Rope(torch.tensor(begin, dtype=torch.int32, device=device), fine, coarse)
    return Layer(keys, values, list(lengths), begin, rotation, work)
