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

from kvbench.attention.cpu import build, chunk_kernel
from kvbench.attention.cpu.chunk_kernel import Runs, Source
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Format, NotServed, Part, Work, describe_part, pairs_of_row
from kvbench.cache.layer import KVLayer
from kvbench.cache.policy import NEVER
from kvbench.cache.segments.base import FullSegment, Segment

#: columns of a table of runs: segment of keys, of values, first key, first value, tokens, slot
FIELDS = 6


#: the index in the text of the token of each column, and the first turn that sees it and the first that no longer does
Columns = tuple[Tensor, Tensor, Tensor]


def first_forms(
    old: Tensor, times: tuple[Tensor, Tensor], first: int, count: int, start: int
) -> tuple[Columns, tuple[Tensor, Tensor]]:
    """Return the first form of each token, the one before a pass (or in full precision, for new tokens).

    Arguments are those of :func:`kvbench.attention.foreseen.planned`; `old` has the columns before the pass. Tokens and
    turns are numbered from the first real token, as in `times`.

    Returns:
        The first forms as :data:`Columns`; and `times`, with NEVER for what was packed or dropped before the pass.
    """
    base = torch.cat([old - start, torch.arange(first - start, first + count - start)])
    # a form that does not change during the pass counts as one that never does
    keys, values = (torch.where(time > first - start, time, NEVER) for time in times)
    # a form of a token is seen by the queries [begin, end); the first one until either side changes
    return (base, torch.zeros_like(base), torch.minimum(keys, values)[base]), (keys, values)


def forms(
    columns: tuple[Tensor, Tensor], times: tuple[Tensor, Tensor], first: int, count: int, start: int
) -> tuple[Columns, Columns, tuple[Tensor, Tensor]]:
    """Return the forms that tokens have one after the other while a pass packs them.

    Arguments are those of :func:`kvbench.attention.foreseen.planned`.

    Returns:
        The first forms (:func:`first_forms`) and the later forms, as :data:`Columns`. And for each later form the
        numbers of its key and of its value: i for that of first form i, and n + s for the one in slot s after the pass,
        where n is the number of first forms.
    """
    n, (old, new) = first + count - start, columns
    first_columns, (keys, values) = first_forms(old, times, first, count, start)
    base, slot_before, slot_after = first_columns[0], torch.full((n,), -1), torch.full((n,), -1)
    slot_before[base], slot_after[new - start] = torch.arange(len(base)), torch.arange(len(new))
    later: list[Columns] = []
    chosen: list[tuple[Tensor, Tensor]] = []
    known = (slot_before >= 0) & (slot_after >= 0)
    # a token's later forms: its key is packed and its value not yet, the other way round, or both are; one that is
    # dropped has no slot after the pass, and so no later form
    for begin, end, late in (
        (keys, values, (True, False)),
        (values, keys, (False, True)),
        (torch.maximum(keys, values), torch.full((n,), NEVER), (True, True)),
    ):
        here = (known & (begin < end) & (begin < n)).nonzero()[:, 0]
        later.append((here, begin[here], end[here]))
        sides = [slot_after[here] + len(base) if after else slot_before[here] for after in late]
        chosen.append((sides[0], sides[1]))
    token, begins, ends = (torch.cat(parts) for parts in zip(*later, strict=True))
    key_forms, value_forms = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    return first_columns, (token, begins, ends), (key_forms, value_forms)


def store_pass(layer: KVLayer, keys: Tensor, values: Tensor, last: int) -> None:
    """Append the new tokens of a pass to a layer's stores, and let the method pack or drop what single steps would.

    Args:
        keys: keys of the new tokens in the form that the layer stores, ``[B, H, q, D]``.
        last: number of tokens after the pass; :attr:`KVLayer.seen` becomes that.
    """
    count, rooms = keys.shape[2], [store.tail.capacity for store in layer.stores()]
    # As in single steps, which settle before a token is appended: never with the last token of the pass.
    layer.seen = last - count
    layer.append(keys[:, :, : count - 1], values[:, :, : count - 1])
    layer.seen = last - 1
    layer.settle(forget=False)
    for store, room in zip(layer.stores(), rooms, strict=True):
        store.tail.trim(room)  # a bill shows the buffers of single steps
    layer.append(keys[:, :, count - 1 :], values[:, :, count - 1 :])
    layer.seen = last


def attend_by_turns(
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    times: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
    logits: Logits,
) -> Tensor | None:
    """Do what :func:`kvbench.attention.foreseen.attend_foreseen` does; if the kernel cannot, do nothing: return None.

    The mask must be an ordinary causal one.

    Args:
        times: for each of the layer's groups of rows, when the method packs or drops the keys, and the values.
    """
    if layer.progress.options.kernels not in ("auto", "cpu") or query.device.type != "cpu":
        return None
    reason = refuses_turns(layer, query, logits)
    if reason is not None:
        layer.paths.add(f"reference (cpu: {reason})")
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
        # layers of one method with equal shapes may still drop different tokens: of a method that packs in some only
        key = ("first", last, count, row, id(layer.method), str(shapes[-1]), *when(time))
        if key not in plans:
            start = layer.start(row)
            columns, _ = first_forms(old[-1], time, last - count, count, start)
            plans[key] = first_runs(layer, row, columns, last - count - start, count)
        sources = [
            [Source(describe_part(segment, sizes[1 + side]), rows.start) for segment in store.segments[:-1]]
            + [Source(exact_part(recent[side]))]
            for side, store in enumerate(layer.stores())
        ]
        states.append(query.new_empty(*query[rows].shape[:3], layer.value_dim + 2, dtype=torch.float32))
        chunk_kernel.run_chunk(
            *(query[rows], sources[0], sources[1], plans[key], sizes, scaling, logits), state=states[-1], finish=False
        )
    store_pass(layer, keys, values, last)
    layer.paths.add(f"{build.kernel_name()} (forms by turn)")
    outs = []
    for number, (rows, time) in enumerate(zip(groups, times, strict=True)):
        row = rows.indices(layer.batch)[0]
        before, after = shapes[number], layer.lengths(rows)
        again = ("later", last, count, row, id(layer.method), str(before), str(after), *when(time))
        if again not in plans:
            start = layer.start(row)
            pair = old[number], layer.positions(row)
            base, later, chosen = forms(pair, time, last - count, count, start)
            tails = [lengths[-1] for lengths in before]
            plans[again] = later_runs(layer, row, later, chosen, len(base[0]), tails, last - count - start, count)
        sources = [
            [Source(describe_part(segment, sizes[1 + side]), rows.start) for segment in store.segments]
            + [Source(exact_part(recents[number][side]))]
            for side, store in enumerate(layer.stores())
        ]
        out = chunk_kernel.run_chunk(
            *(query[rows], sources[0], sources[1], plans[again], sizes, scaling, logits),
            state=states[number],
            later=True,
        )
        assert out is not None
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def when(times: tuple[Tensor, Tensor]) -> tuple[bytes, bytes]:
    """Return when keys, and values, are packed or dropped, as part of a key of ``layer.progress.plans``."""
    keys, values = times
    return keys.numpy().tobytes(), values.numpy().tobytes()


def refuses_turns(layer: KVLayer, query: Tensor, logits: Logits) -> str | None:
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
    return chunk_kernel.refuses_chunk(query, described)


def exact_part(tokens: Tensor) -> Part:
    """Describe tokens in full precision, ``[rows, H, n, D]``."""
    return Part(Format("full", 16), buffer=tokens.contiguous())


def first_runs(layer: KVLayer, row: int, columns: Columns, first: int, count: int) -> Runs:
    """Return the runs of tokens before a pass, for a layer whose tails are followed by the pass's new tokens.

    Args:
        columns: columns of the first forms (:func:`first_forms`).
        first: index in the text of the first query.
    """
    stores = layer.stores()
    keys, values = ([*store.signature(row)[:-1], store.signature(row)[-1] + count] for store in stores)
    lines = []
    for (k, v), (key, value, tokens) in pairs_of_row(keys, values).items():
        key += begun(stores[0].segments[:-1], k, row)
        value += begun(stores[1].segments[:-1], v, row)
        lines.append((k, v, key, value, tokens, key))
    return Runs(torch.tensor(lines, dtype=torch.int32).reshape(-1, FIELDS), *turns_of(columns, first))


def later_runs(
    layer: KVLayer,
    row: int,
    columns: Columns,
    chosen: tuple[Tensor, Tensor],
    base: int,
    tails: Sequence[int],
    first: int,
    count: int,
) -> Runs:
    """Return the runs of the later forms of tokens, for the second call of the kernel.

    The kernel gets the segments after the pass, followed by a copy of the tails from before with the new tokens.

    Args:
        columns: columns of the later forms (:func:`forms`).
        chosen: numbers of the later forms of keys, and of values, from the same function.
        base: number of columns of first forms.
        tails: number of keys, and of values, in the tails before the pass.
    """
    places = []
    for form, other, store, tail in zip(chosen, chosen[::-1], layer.stores(), tails, strict=True):
        # what was not in the tail does not change on this side, so its slot after the pass, which is also the other
        # side's, has the same form
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


def turns_of(columns: Columns, first: int) -> tuple[Tensor, Tensor]:
    """Return the first query that sees each column, and the first that no longer does, int32 ``[n]``."""
    token, begin, end = columns
    begins, ends = torch.maximum(token, begin) - first, end - first
    return begins.clamp(min=0).to(torch.int32), ends.clamp(0, chunk_kernel.ALWAYS).to(torch.int32)
