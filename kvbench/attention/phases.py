"""The description of a layer for a fused kernel: runs of tokens with one format of keys and one format of values.

Slot i of a layer's keys and slot i of its values belong to the same token, but formats need not change at the same slot
(KIVI keeps n mod R keys but min(n, R) values in full precision). From first to last slot there are therefore several
*phases*, such as keys and values packed, then only keys packed, then neither packed. A kernel is compiled for the
formats of a list of phases. The kernel reads the beginning and the length of each phase from a table in device memory,
with one line per row of the batch and phase. So rows may differ, and a captured CUDA graph can be replayed while
lengths grow.

On a layer with a sliding window, stored tokens that the newest query no longer sees are in no phase. They are in the
first slots, so the window only moves the beginnings of the phases, inside a group of a quantizer too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.logits import PLAIN
from kvbench.attention.reads import describe_part, kind_of, looked_up, window_of
from kvbench.attention.rope.rotation_tables import NotServed, rope_of
from kvbench.attention.work import Codebook, Format, Part, Received, Work
from kvbench.cache.kernels.jobs import upload
from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.segments.scored import ScoredSegment

__all__ = [
    "FIELDS", "Codebook", "Format", "NotServed", "Part", "Received", "Work", "assembled", "describe_part",
    "divide_into_phases", "holder", "kind_of", "looked_up", "out_of_order", "pairs_of_row", "receiving", "shared_table",
    "window_of", "work",
]  # fmt: skip

#: numbers of a line of the table: first token in the key segment, in the value segment, tokens
FIELDS = 3


def pairs_of_row(
    keys: Sequence[int], values: Sequence[int], window: int | None = None
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Divide the tokens of one row into phases: runs of tokens with one key segment and one value segment.

    Args:
        keys: number of tokens in each segment of the row's keys.
        values: number of tokens in each segment of its values; both lists have the same sum.
        window: number of tokens that the newest query sees, its own included; those before are in no phase. None: all.

    Returns:
        A dictionary with one item per phase, in slot order. The key is the pair (number of the key segment, number of
        the value segment). The value is the triple (index of the phase's first token in the key segment, its index in
        the value segment, number of tokens).
    """
    ends_k, ends_v = list(accumulate(keys)), list(accumulate(values))  # one past the last slot of each segment
    hidden = 0 if window is None else max(sum(keys) - window, 0)
    phases, slot = {}, 0
    for cut in sorted({*ends_k, *ends_v} - {0}):  # formats can change only where a segment of either side ends
        k = next(i for i, end in enumerate(ends_k) if end > slot)
        v = next(i for i, end in enumerate(ends_v) if end > slot)
        first = max(slot, hidden)
        if first < cut:
            begin_k, begin_v = ends_k[k] - keys[k], ends_v[v] - values[v]
            phases[k, v] = (first - begin_k, first - begin_v, cut - first)
        slot = cut
    return phases


def out_of_order(layer: KVLayer) -> bool:
    """Return True if the slots of a layer do not hold consecutive tokens in the order of the text."""
    return any(layer.method.positions(layer, row) is not None for row in range(layer.batch))


def divide_into_phases(layer: KVLayer) -> tuple[list[tuple[int, int]], list[list[tuple[int, int, int]]]]:
    """Divide all rows of a layer into phases, and return where each phase lies in each row.

    Returns:
        The phases, in slot order, as pairs (number of the key segment, number of the value segment): all pairs that any
        row has now or has had before. And for each row one triple per pair, as in :attr:`Work.counts`.

    Raises:
        NotServed: keys and values of a phase are both packed, but begin at different places in their tiles; or a
            sliding window hides tokens, and the slots are not in the order of the text.
    """
    keys, values = layer.stores()
    window = layer.window or sys.maxsize
    if any(sum(keys.signature(row)) > window for row in range(layer.batch)) and out_of_order(layer):
        raise NotServed("a sliding window hides tokens whose slots are not in the order of the text")
    rows: list[dict[tuple[int, int], tuple[int, int, int]]] = []
    # rows with equal lengths, and equal beginnings in the buffers in full precision, share their phases
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
        phases = alike[lengths, begun] = pairs_of_row(*lengths, layer.window)
        for (k, v), (first_k, first_v, count) in phases.items():
            left, right = keys.segments[k], values.segments[v]
            # tokens in full precision begin at `starts` in their buffer; packed tokens begin at 0
            if isinstance(left, FullSegment):
                first_k += left.starts[row]
            if isinstance(right, FullSegment):
                first_v += right.starts[row]
            if left.packed and right.packed and (first_k - first_v) % TILE:
                raise NotServed("packed keys and packed values begin at different places in their tiles")
            phases[k, v] = (first_k, first_v, count)
        rows.append(phases)
    # Pairs stay in the list once they have occurred, so that no kernel is recompiled when a window happens to be empty.
    # The newest tokens are in the last segments of both sides, so this pair is always there, and the last one.
    layer.pairs.add((len(keys.segments) - 1, len(values.segments) - 1))
    layer.pairs.update(pair for phases in rows for pair in phases)
    order = sorted(layer.pairs)
    return order, [[phases.get(pair, (0, 0, 0)) for pair in order] for phases in rows]


def work(layer: KVLayer, upper: bool = False) -> Work:
    """Describe a layer's stored keys and values for a decode kernel.

    Args:
        upper: True to read only the upper nibble of QuantSpec's 8-bit codes, as QuantSpec's drafts do.

    Returns:
        The description. On a CPU, a later call may change it and return it again.

    Raises:
        NotServed: a segment has a format that no kernel reads, packed keys and values are not aligned
            (:func:`divide_into_phases`), or the cache holds pre-RoPE keys that kernels cannot rotate.
    """
    order, counts, table = shared_phases(layer)
    buffers = [buffers_of(segment) for segment in layer.segments()]
    # on a GPU, where steps may be replayed without a call, a description would keep old buffers in memory
    if layer.device.type != "cpu" or layer.rope is not None or any(buffer is None for buffer in buffers):
        return assembled(layer, order, counts, table, upper)
    known = layer.described
    if known is not None and known[:2] == (order, upper) and all(map(is_, known[2], buffers)):
        described: Work = known[3]
        described.table, described.counts, described.logits, described.received = table, counts, PLAIN, None
        return described
    described = assembled(layer, order, counts, table, upper)
    layer.described = (order, upper, buffers, described)
    return described


def buffers_of(segment: Segment) -> object | None:
    """Return an object that tells by its identity if a segment's buffers were replaced; None if its kind is unknown."""
    if type(segment) is FullSegment:
        return segment.buffer
    return segment.words if type(segment) is PackedSegment else None


def shared_phases(
    layer: KVLayer,
) -> tuple[list[tuple[int, int]], list[list[tuple[int, int, int]]], Tensor]:
    """Return the phases of a layer, where they lie (:func:`divide_into_phases`) and their table.

    Layers whose segments hold equally many tokens share the result, so it is usually computed once per step.
    """
    if layer.window is not None:  # slots that are not in the order of the text must be refused
        order, counts = divide_into_phases(layer)
        return order, counts, shared_table(layer, counts)
    key: Any = [layer.device, *sorted(layer.pairs)]
    for store in layer.stores():
        key.append(len(store.segments))
        for segment in store.segments:
            key += (segment.packed, *segment.lengths)
            if isinstance(segment, FullSegment):
                key += segment.starts
    placed, key = layer.progress.placed, tuple(key)
    if key not in placed:
        if len(placed) > 64:
            placed.clear()
        order, counts = divide_into_phases(layer)
        placed[key] = order, counts, shared_table(layer, counts)
    layer.pairs.update(placed[key][0])
    return placed[key]  # type: ignore[no-any-return]


def assembled(
    layer: KVLayer,
    order: Sequence[tuple[int, int]],
    counts: list[list[tuple[int, int, int]]],
    table: Tensor,
    upper: bool = False,
) -> Work:
    """Describe a layer for a decode kernel as :func:`work` does, when its phases and their table are already known.

    Args:
        order: for each phase, the number of its key segment and the number of its value segment
            (:func:`divide_into_phases`).
        counts: for each row and phase, the index of the first token in the key segment, its index in the value segment,
            and the number of tokens (:func:`divide_into_phases`).
        table: `counts` in device memory, int32 ``[B, phases, 3]``.

    Raises:
        NotServed: a segment has a format that no kernel reads.
    """
    keys, values = layer.stores()
    parts_k = {k: describe_part(keys.segments[k], layer.key_dim, upper) for k, _ in order}
    parts_v = {v: describe_part(values.segments[v], layer.value_dim, upper) for _, v in order}
    room = sum(int(getattr(segment, "capacity", 0)) for segment in keys.segments)
    pairs = [(parts_k[k], parts_v[v]) for k, v in order]
    described = Work(pairs, table, counts, layer.heads, layer.key_dim, layer.value_dim, room)
    described.in_place = layer.method.reading_order(layer, slice(0, 1)) is not None
    if layer.rope is not None:
        if not any(form.kind == "codebook" for pair in described.signature() for form in pair):
            raise NotServed("the cache holds pre-RoPE keys, which no kernel reads")
        described.rope = rope_of(layer, room)
    return described


def holder(layer: KVLayer) -> ScoredSegment:
    """Return the segment that stores how much attention each token of a layer has received: the tail of the keys.

    Raises:
        NotServed: the method does not store this attention with its keys.
    """
    tail = layer.stores()[0].tail
    if not isinstance(tail, ScoredSegment):
        raise NotServed(f"{type(layer.method).__name__.lower()} does not hold attention with its keys")
    return tail


def receiving(layer: KVLayer, count: int, *, fresh: bool = False) -> Received:
    """Return the buffer into which a kernel writes the attention that the tokens of a layer receive in a decode step.

    Args:
        fresh: True for a new buffer, because the usual one still holds an earlier step's attention that is needed.

    Raises:
        NotServed: the method does not store this attention with its keys.
    """
    return Received(holder(layer).room(count, fresh=fresh), layer.method.observe_group == "mean")


def shared_table(layer: KVLayer, counts: list[list[tuple[int, int, int]]]) -> Tensor:
    """Copy the table of a layer's phases (:attr:`Work.table`) to the layer's device, or reuse an equal one.

    Layers with equal tables share one tensor, so a step usually copies a single table to the GPU.
    """
    device = layer.device
    key = (device, tuple(tuple(row) for row in counts))
    tables = layer.progress.tables
    if key not in tables:
        if len(tables) > 64:
            tables.clear()
        tables[key] = upload(counts, torch.int32, device)
    return tables[key]
