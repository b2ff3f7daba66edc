"""Decode attention in Triton over runs of tokens that stay where they stand in the text (Cocktail without module II).

    attend(query, work, scaling)   # Tensor [B, q, Hq, Dv]
    refuses(query, work)           # the reason why it cannot serve the step, or None

The kernel is in :mod:`kvbench.attention.triton.in_place_kernel`. Launch parameters, limits and the division of the work
are those of :mod:`kvbench.attention.triton.decode`. Importing this module requires triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kvbench.attention.phases import Format, Work
from kvbench.attention.triton import decode
from kvbench.attention.triton.decode import INTERPRETED, LOG2E, ROWS, TOGETHER
from kvbench.attention.triton.in_place_kernel import ADDRESSES, decode_in_place
from kvbench.attention.triton.merge_kernel import merge

#: key of :attr:`Work.prepared` for the tables of a layer's runs, which do not change while its buffers stay
TABLES = "runs in place"
#: fewest warps of a program: with one, four times as many registers spill (compiled for sm_90; not measured)
WARPS = 2


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute the attention of a decode step, or None if it can."""
    if reason := decode.refuses(query, work):
        return reason
    key, value = work.phases[-1]
    if key.buffer is None or value.buffer is None:
        return "newest tokens that are packed"
    if any((key.buffer is None) != (value.buffer is None) for key, value in work.phases):
        return "tokens of which only the keys or only the values are packed"
    return None


def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens of a layer, run by run.

    Args:
        query: of any strides; copied if its channels are not contiguous. New token i sees all slots except the newest
            q - 1 - i.
        work: :func:`refuses` must have returned None for it. Its buffers must stay, as for a captured step.
    """
    batch, query_heads, count, channels = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    group = query_heads // work.heads
    forms, kinds, addresses, extents = tables(work)
    chosen = decode.tuning(forms)
    rows = min(max(triton.next_power_of_2(group * count), 8), chosen.max_rows)
    assert group * count <= ROWS
    blocks = -(-group * count // rows)
    warps = max(chosen.warps_for(rows, channels), WARPS)
    numbers, expense = decode.compiled_for(forms, chosen.full_step)
    out = query.new_empty(batch, count, query_heads, work.value_dim)
    cells, like = batch * work.heads, work.phases[-1][0].buffer
    fixed = (*numbers, *expense, channels, work.value_dim, group, count, rows, chosen.full_step)
    limit, softcap, sinks = torch.finfo(out.dtype).max, work.logits.softcap, work.logits.sinks
    fixed += (chosen.stages, chosen.part_stages, limit, softcap is not None, sinks is not None, not INTERPRETED)
    factors = (scaling * LOG2E, 0.0) if softcap is None else (2 * scaling * LOG2E / softcap, softcap * LOG2E)
    sinks = None if sinks is None else sinks.contiguous()

    def arguments(parts: int) -> tuple[Any, ...]:
        room = decode.scratch(query.device, cells * blocks * parts, rows, work.value_dim, cells * blocks)
        tensors = (query, out, work.table, kinds, addresses, extents, like, *room, sinks)
        return (*tensors, *query.stride()[:3], len(work.phases), work.heads, *factors, chosen.fused, *fixed)

    steps = work.tiles()
    if INTERPRETED:
        parts = min(steps, 2)  # enough to test the merge
    else:
        known = (TABLES, query.device, query.dtype, None if sinks is None else sinks.dtype, fixed, warps)
        if known not in TOGETHER:
            kernel = decode_in_place.warmup(*arguments(1), grid=(1,), num_warps=warps)
            TOGETHER[known] = decode.concurrent_programs(kernel, query.device, chosen, warps)
        parts = decode.choose_split(steps, cells * blocks, TOGETHER[known])
    passed = arguments(parts)
    decode_in_place[(blocks, parts, cells)](*passed, num_warps=warps)
    if parts > max(chosen.fused, 1):
        shape = (group * count, group, count, rows, work.value_dim, 16, limit, sinks is not None)
        stats, sums = passed[7:9]
        merge[(group * count, cells)](stats, sums, out, sinks, parts, work.heads, *shape, num_warps=4)
    return out


def tables(work: Work) -> tuple[tuple[tuple[Format, Format], ...], Tensor, Tensor, Tensor]:
    """Return what the kernel reads of a layer's phases besides their places.

    Returns:
        The formats of keys and values, each pair once, in a fixed order that ends with full precision, so that the kernel
        is compiled once; for each phase the index of its pair, int32 ``[phases]``; the addresses of its buffers, int64
        ``[phases, 2 * ADDRESSES]``; and their sizes, int32 ``[phases, 4]``.
    """
    known = work.prepared.get(TABLES)
    if known is None:
        signature = work.signature()
        forms = tuple(sorted({*signature}, key=lambda pair: (pair[0].bits, repr(pair))))  # the last: full precision
        device, width = work.table.device, int(ADDRESSES.value)
        numbers = [
            [
                address
                for side in pair
                for address in ([t.data_ptr() for t in decode.pointers(side)] + [0] * width)[:width]
            ]
            for pair in work.phases
        ]
        with torch.inference_mode(False):
            kinds = torch.tensor([forms.index(pair) for pair in signature], dtype=torch.int32)
            sizes = [(*decode.extent(key), *decode.extent(value)) for key, value in work.phases]
            tensors = [x.to(device) for x in (kinds, torch.tensor(numbers), torch.tensor(sizes, dtype=torch.int32))]
        known = work.prepared[TABLES] = (forms, *tensors)
    result: tuple[tuple[tuple[Format, Format], ...], Tensor, Tensor, Tensor] = known
    return result
