"""Passes over many known tokens (:mod:`kvbench.attention.foreseen`) by the CPU kernel that unpacks tiles.

The kernel is called twice: before the new tokens are stored, over all tokens in the form that they have then; and
afterwards, over the later forms of those that were packed in the pass. The second call continues the sums of the
first. At any time, only one tile is dequantized, and only the window and the new tokens are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvbench.attention import foreseen
from kvbench.attention.cpu import build, tiles
from kvbench.attention.cpu.tiles import Runs, Source
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Format, NotServed, Part, Work, describe_part, pairs_of_row
from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.base import FullSegment, Segment

#: columns of a table of runs: segment of keys, of values, first key, first value, tokens, slot
FIELDS = 6


def attend_by_turns(
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    times: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
    logits: Logits,
) -> Tensor | None:
    """Do what :func:`kvbench.attention.foreseen.attend_foreseen` does; return None, with nothing done, if it cannot.

    The mask must be an ordinary causal one.

    Args:
        times: for each of the layer's groups of rows, when the method packs or drops the keys, and the values.
    """
    reason = refuses(layer, query, logits)
    if reason is not None:
        layer.paths.add(f"reference (cpu: {reason})")
    if reason is not None or layer.progress.options.kernels not in ("auto", "cpu") or query.device.type != "cpu":
        return None
    count, last, plans = query.shape[2], layer.seen, layer.progress.plans
    sizes, groups = (layer.heads, layer.key_dim, layer.value_dim), layer.row_groups()
    states, recents, shapes, old = [], [], [], []
    fresh = layer.rotated(keys, values)
    layer.seen = last - count  # as before the pass; `store_pass` puts it back
    for rows, time in zip(groups, times, strict=True):
        row = rows.indices(layer.batch)[0]
        shapes.append(layer.lengths(rows))
        old.append(layer.positions(row))
        recent = [
            torch.cat([store.tail.view(rows), x[rows].to(store.tail.dtype)], 2)
            for store, x in zip(layer.stores(), fresh, strict=True)
        ]
        recents.append(recent)
        key = ("first", last, count, row, layer.window, id(layer.method), str(shapes[-1]))
        if key not in plans:
            start = layer.start(row)
            columns, _ = foreseen.first_forms(old[-1], time, last - count, count, start)
            plans[key] = first_runs(layer, row, columns, last - count - start, count)
        sources = [
            [Source(describe_part(segment, sizes[1 + side]), rows.start) for segment in store.segments[:-1]]
            + [Source(exact_part(recent[side]))]
            for side, store in enumerate(layer.stores())
        ]
        states.append(torch.empty(*query[rows].shape[:3], layer.value_dim + 2))
        tiles.call(
            *(query[rows], sources[0], sources[1], plans[key], sizes, scaling, logits), state=states[-1], finish=False
        )
    foreseen.store_pass(layer, keys, values, last)
    layer.paths.add(f"{build.kernel_name()} (forms by turn)")
    outs = []
    for number, (rows, time) in enumerate(zip(groups, times, strict=True)):
        row = rows.indices(layer.batch)[0]
        before, after = shapes[number], layer.lengths(rows)
        later_key = ("later", last, count, row, layer.window, id(layer.method), str(before), str(after))
        if later_key not in plans:
            start = layer.start(row)
            pair = old[number], layer.positions(row)
            base, later, chosen = foreseen.forms(pair, time, last - count, count, start)
            tails = [lengths[-1] for lengths in before]
            plans[later_key] = later_runs(layer, row, later, chosen, len(base[0]), tails, last - count - start, count)
        sources = [
            [Source(describe_part(segment, sizes[1 + side]), rows.start) for segment in store.segments]
            + [Source(exact_part(recents[number][side]))]
            for side, store in enumerate(layer.stores())
        ]
        out = tiles.call(
            *(query[rows], sources[0], sources[1], plans[later_key], sizes, scaling, logits),
            state=states[number],
            later=True,
        )
        assert out is not None
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def refuses(layer: KVLayer, query: Tensor, logits: Logits) -> str | None:
    """Return why the kernel cannot read a layer's segments, or None if it can."""
    if layer.rope is not None:
        return "keys before RoPE change their form during a pass"
    keys, values = layer.stores()
    try:
        parts = [
            [describe_part(segment, channels) for segment in store.segments]
            for store, channels in ((keys, layer.key_dim), (values, layer.value_dim))
        ]
    except NotServed as reason:
        return str(reason)
    pairs = [(key, value) for key in parts[0] for value in parts[1]]
    described = Work(pairs, torch.empty(0), [], layer.heads, layer.key_dim, layer.value_dim)
    described.logits = logits
    return tiles.refuses(query, described)


def exact_part(tokens: Tensor) -> Part:
    """Describe tokens in full precision, ``[rows, H, n, D]``."""
    return Part(Format("full", 16), buffer=tokens.contiguous())


def first_runs(layer: KVLayer, row: int, columns: foreseen.Columns, first: int, count: int) -> Runs:
    """Return the runs of tokens before a pass, for a layer whose tails are followed by the pass's new tokens.

    Args:
        columns: columns of the first forms (:func:`kvbench.attention.foreseen.first_forms`).
        first: index in the text of the first query.
    """
    stores = layer.stores()
    lengths = [[*store.signature(row)[:-1], store.signature(row)[-1] + count] for store in stores]
    lines = []
    for (k, v), (key, value, tokens) in pairs_of_row(lengths[0], lengths[1]).items():
        key += begun(stores[0].segments[:-1], k, row)
        value += begun(stores[1].segments[:-1], v, row)
        lines.append((k, v, key, value, tokens, key))
    return Runs(torch.tensor(lines, dtype=torch.int32).reshape(-1, FIELDS), *turns_of(columns, first))


def later_runs(
    layer: KVLayer,
    row: int,
    columns: foreseen.Columns,
    chosen: tuple[Tensor, Tensor],
    base: int,
    tails: Sequence[int],
    first: int,
    count: int,
) -> Runs:
    """Return the runs of the later forms of tokens, for the second call of the kernel.

    The kernel gets the segments after the pass, followed by a copy of the tails from before with the new tokens.

    Args:
        columns: columns of the later forms (:func:`kvbench.attention.foreseen.forms`).
        chosen: numbers of the later forms of keys, and of values, from the same function.
        base: number of columns of first forms.
        tails: number of keys, and of values, in the tails before the pass.
    """
    places = []
    for form, other, store, tail in zip(chosen, chosen[::-1], layer.stores(), tails, strict=True):
        # what was not in the tail does not change on this side, so that its slot after the pass, which is also the
        # other side's, has the same form
        form = torch.where(form < base - count - tail, other, form)
        ends = torch.tensor(list(accumulate(store.signature(row))))
        slot = (form - base).clamp(min=0)
        number = torch.searchsorted(ends, slot, right=True)
        starts = torch.tensor([0, *ends.tolist()[:-1]]) - torch.tensor(
            [begun(store.segments, i, row) for i in range(len(ends))]
        )
        exact = form - (base - count - tail)  # index in the tail from before the pass
        late = form >= base
        index = torch.where(late, slot - starts[number.clamp(max=len(ends) - 1)], exact)
        places.append((torch.where(late, number, len(ends)), index))
    table = torch.stack([places[0][0], places[1][0], places[0][1], places[1][1]], -1)
    step = torch.tensor([0, 0, 1, 1])
    joins = (table[1:] == table[:-1] + step).all(-1) if len(table) else torch.empty(0, dtype=torch.bool)
    heads = torch.cat([torch.zeros(min(len(table), 1), dtype=torch.int64), 1 + (~joins).nonzero()[:, 0]])
    sizes = torch.diff(torch.cat([heads, torch.tensor([len(table)])]))
    lines = torch.cat([table[heads], sizes[:, None], table[heads][:, 2:3]], -1)
    return Runs(lines.to(torch.int32).contiguous(), *turns_of(columns, first))


def begun(segments: Sequence[Segment], number: int, row: int) -> int:
    """Return the index of a row's first token in the buffer of segment `number`; 0 for a number past the last."""
    segment = segments[number] if number < len(segments) else None
    return segment.starts[row] if isinstance(segment, FullSegment) else 0


def turns_of(columns: foreseen.Columns, first: int) -> tuple[Tensor, Tensor]:
    """Return the first query that sees each column, and the first that no longer does, int32 ``[n]``."""
    token, begin, end = columns
    begins, ends = torch.maximum(token, begin) - first, end - first
    return begins.clamp(min=0).to(torch.int32), ends.clamp(0, tiles.ALWAYS).to(torch.int32)
