"""The description of a layer for a fused kernel: runs of slots with one format of keys and one of values.

Keys and values of a layer agree on slots but not on where formats change (KIVI: n mod R exact keys, min(n, R) exact
values), so a walk over both stores passes *phases*: (packed, packed), (packed, exact), (exact, exact), ... A kernel is
compiled for the formats of a list of phases; where each begins and how long it is stands in a table in device memory,
a line a row of the batch, so rows may differ and a captured graph may be replayed while lengths grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.logits import PLAIN, Logits
from kvbench.cache.kernels.tables import upload
from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment, fits_tiles
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

#: tokens (axis ``channel``) or channels (axis ``token``) of a group that kernels are written for
GROUPS = (32, 64, 128)
#: longest window, and longest group of one, that have a number in a kernel
#: (:func:`kvbench.attention.triton.codes.number`)
WIDEST, LONGEST = 2047, 255
#: numbers of a line of the table: first token in the key segment, in the value segment, tokens
FIELDS = 3


@dataclass(frozen=True)
class Format:
    """A storage format that a kernel is compiled for.

    Args:
        kind: ``full``; ``affine``: code * scale + minimum; ``atom``: (code - zero) * scale; ``hierarchical``:
            QuantSpec's 16 U + L + 8, whose value is scale * (code - 8) / 16 + minimum.
        bits: of a code; 16 for ``full``.
        axis: ``channel`` or ``token``; empty for ``full``.
        group: tokens (``channel``) or channels (``token``) that share parameters; 0 for ``full``.
        window: 0: groups divide a tile, or tiles a group; else tokens of a block that is cut into as few groups of at
            most `group` tokens as will do, the first ones longer by a token where they are uneven (LogQuant's W = 42:
            groups lie across the ends of tiles; :class:`kvbench.quantizers.windowed.WindowedQuantizer`).
    """

    kind: str
    bits: int
    axis: str = ""
    group: int = 0
    window: int = 0


@dataclass
class Part:
    """One segment as a kernel reads it: ``words`` int16 ``[B, H, tiles, ...]`` (most significant plane first) and
    ``params`` fp16 (:class:`kvbench.cache.segments.packed.PackedSegment`), or ``buffer`` ``[B, H, capacity, D]``."""

    format: Format
    words: Sequence[Tensor] = ()
    params: Sequence[Tensor] = ()
    buffer: Tensor | None = None


@dataclass
class Work:
    """Phases of one layer for the whole batch.

    Args:
        phases: key part and value part of each phase, in slot order; the last one is (exact, exact) and ends with the
            newest tokens.
        table: int32 ``[B, phases, 3]`` on the layer's device: first token in the key segment, first token in the value
            segment, tokens (0 where a row has none). Where both are packed, both firsts are equal modulo a tile.
        counts: the same as nested lists on the host.
        heads: KV heads.
        key_dim, value_dim: channels.
        logits: what the model does to scores: a softcap, sinks.
        room: tokens that the buffers of a row can hold, where known. Kernels share a head among so many programs as
            suit it, not the tokens of the moment: a captured step and an eager one then add up in the same order.
    """

    phases: list[tuple[Part, Part]]
    table: Tensor
    counts: list[list[tuple[int, int, int]]]
    heads: int
    key_dim: int
    value_dim: int
    room: int | None = None
    logits: Logits = PLAIN

    def signature(self) -> tuple[tuple[Format, Format], ...]:
        """Return the formats of the phases, for which a kernel is compiled."""
        return tuple((key.format, value.format) for key, value in self.phases)

    def tiles(self) -> int:
        """Return the tiles of 128 tokens of the longest row: those that there is room for, where that is known."""
        filled = max(sum(-(-count // TILE) for _, _, count in row) for row in self.counts)
        return filled if self.room is None else max(filled, -(-self.room // TILE))

    def longest(self) -> list[int]:
        """Return the most tokens that a row has in each phase."""
        return [max(row[i][2] for row in self.counts) for i in range(len(self.phases))]


class NotServed(Exception):
    """Error of a layer that no kernel reads; its message is the reason, for the result row."""


def part(segment: Segment, channels: int, upper: bool = False) -> Part:
    """Return `segment` as kernels read it.

    Args:
        channels: of a head: what ``group_size=None`` means.
        upper: read the upper nibble of hierarchical codes alone (QuantSpec's draft).

    Raises:
        NotServed: its format is read by the reference path only.
    """
    if isinstance(segment, FullSegment):
        if segment.dtype not in (torch.float16, torch.bfloat16):
            raise NotServed(f"keys and values are {str(segment.dtype).removeprefix('torch.')}")
        return Part(Format("full", 16), buffer=segment.buffer)
    if not isinstance(segment, PackedSegment):
        raise NotServed(f"{type(segment).__name__} is read by the reference path only")
    quantizer = segment.quantizer
    kind, window = kind_of(quantizer), window_of(quantizer)
    group = quantizer.group_size or channels
    if quantizer.bits not in (2, 4, 8) or (quantizer.bits == 8 and kind == "atom"):
        raise NotServed(f"{quantizer.bits}-bit codes")
    if group not in GROUPS and not window:
        raise NotServed(f"groups of {group}")
    if any(param.dtype != torch.float16 for param in segment.params):
        raise NotServed("scales in fp32")
    if kind == "hierarchical" and upper:
        return Part(Format("affine", 4, quantizer.axis, group), segment.words[:1], segment.params)
    return Part(Format(kind, quantizer.bits, quantizer.axis, group, window), segment.words, segment.params)


def kind_of(quantizer: AffineQuantizer) -> str:
    """Return :attr:`Format.kind` of a quantizer."""
    if isinstance(quantizer, WindowedQuantizer):
        return "affine"
    kind = getattr(quantizer, "kind", None) or {AffineQuantizer: "affine", AtomQuantizer: "atom"}.get(type(quantizer))
    if kind is None:
        raise NotServed(f"codes of {type(quantizer).__name__}")
    return kind


def window_of(quantizer: AffineQuantizer) -> int:
    """Return :attr:`Format.window` of a quantizer.

    Raises:
        NotServed: more than two groups may meet in the tokens of one field of a word, or a number is too large.
    """
    if not isinstance(quantizer, WindowedQuantizer) or fits_tiles(quantizer):
        return 0
    window, groups = quantizer.window, quantizer.groups
    field = TILE * min(quantizer.bits, 4) // 16
    if window // groups < field:
        raise NotServed(f"groups of {window // groups} tokens, fewer than the {field} of a field")
    longest = quantizer.group_size or window
    if window > WIDEST or longest > LONGEST:
        raise NotServed(f"windows of {window} tokens in groups of {longest}")
    return window


def pairs_of_row(keys: Sequence[int], values: Sequence[int]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return the phases of one row from the lengths of its key and value segments.

    Returns:
        (key segment, value segment) -> (first token in the key segment, in the value segment, tokens), in slot order.
    """
    ends_k, ends_v = list(accumulate(keys)), list(accumulate(values))
    phases, slot = {}, 0
    for cut in sorted({*ends_k, *ends_v} - {0}):
        k = next(i for i, end in enumerate(ends_k) if end > slot)
        v = next(i for i, end in enumerate(ends_v) if end > slot)
        phases[k, v] = (slot - ends_k[k] + keys[k], slot - ends_v[v] + values[v], cut - slot)
        slot = cut
    return phases


def lines(layer: KVLayer) -> tuple[list[tuple[int, int]], list[list[tuple[int, int, int]]]]:
    """Return pairs of (key segment, value segment) in slot order, and each row's line for every pair (:class:`Work`).

    Raises:
        NotServed: packed keys and values are not aligned.
    """
    keys, values = layer.stores()
    rows: list[dict[tuple[int, int], tuple[int, int, int]]] = []
    alike: dict[Any, dict[tuple[int, int], tuple[int, int, int]]] = {}
    for row in range(layer.batch):
        lengths = (keys.signature(row), values.signature(row))
        begun = tuple(
            segment.starts[row]
            for store in (keys, values)
            for segment in store.segments
            if isinstance(segment, FullSegment)
        )
        if (lengths, begun) in alike:
            rows.append(alike[lengths, begun])
            continue
        phases = alike[lengths, begun] = pairs_of_row(*lengths)
        for (k, v), (first_k, first_v, count) in phases.items():
            left, right = keys.segments[k], values.segments[v]
            if isinstance(left, FullSegment):
                first_k += left.starts[row]
            if isinstance(right, FullSegment):
                first_v += right.starts[row]
            if left.packed and right.packed and (first_k - first_v) % TILE:
                raise NotServed("packed keys and values do not share tiles")
            phases[k, v] = (first_k, first_v, count)
        rows.append(phases)
    # Pairs once seen stay in the list, so that a kernel is not compiled anew whenever a window happens to be empty.
    layer.pairs.add((len(keys.segments) - 1, len(values.segments) - 1))
    layer.pairs.update(pair for phases in rows for pair in phases)
    order = sorted(layer.pairs)
    return order, [[phases.get(pair, (0, 0, 0)) for pair in order] for phases in rows]


def work(layer: KVLayer, upper: bool = False) -> Work:
    """Return the phases of `layer`.

    Raises:
        NotServed: a segment has a format that no kernel reads, or packed keys and values are not aligned.
    """
    if layer.rotation is not None:
        raise NotServed("keys are stored before RoPE")
    order, counts = lines(layer)
    return assembled(layer, order, counts, shared_table(layer, counts), upper)


def assembled(
    layer: KVLayer,
    order: Sequence[tuple[int, int]],
    counts: list[list[tuple[int, int, int]]],
    table: Tensor,
    upper: bool = False,
) -> Work:
    """Return the work of pairs of segments (:func:`lines`) whose lines stand in `table`.

    Raises:
        NotServed: a segment has a format that no kernel reads.
    """
    keys, values = layer.stores()
    parts_k = {k: part(keys.segments[k], layer.key_dim, upper) for k, _ in order}
    parts_v = {v: part(values.segments[v], layer.value_dim, upper) for _, v in order}
    return Work(
        [(parts_k[k], parts_v[v]) for k, v in order],
        table,
        counts,
        layer.heads,
        layer.key_dim,
        layer.value_dim,
        sum(int(getattr(segment, "capacity", 0)) for segment in keys.segments),
    )


def shared_table(layer: KVLayer, counts: list[list[tuple[int, int, int]]]) -> Tensor:
    """Return the table on the layer's device; layers of a cache that agree share it, so a step copies it once."""
    device = layer.device
    key = (device, tuple(tuple(row) for row in counts))
    tables = layer.progress.tables
    if key not in tables:
        if len(tables) > 64:
            tables.clear()
        tables[key] = upload(counts, torch.int32, device)
    return tables[key]
