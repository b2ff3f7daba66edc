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
from kvbench.attention.triton.decode import INTERPRETED, LOG2E, TOGETHER
from kvbench.attention.triton.in_place_kernel import ADDRESSES, decode_in_place
from kvbench.attention.triton.merge_kernel import merge
from kvbench.util.failures import is_out_of_memory

#: key of :attr:`Work.prepared` for the tables of a layer's runs, which do not change while its buffers stay
TABLES = "runs in place"
#: fewest warps of a program: with one, four times as many registers spill (compiled for sm_90; not measured)
WARPS = 2
#: why the kernel could not be compiled, by :attr:`_Launch.key`, so that no later step waits for the compiler again
FAILED: dict[Any, str] = {}


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute the attention of a decode step, or None if it can."""
    if reason := decode.refuses(query, work):
        return reason
    key, value = work.phases[-1]
    if key.buffer is None or value.buffer is None:
        return "newest tokens that are packed"
    if any((key.buffer is None) != (value.buffer is None) for key, value in work.phases):
        return "tokens of which only the keys or only the values are packed"
    if INTERPRETED:
        return None
    launch = _Launch(query, work, 1.0)
    if launch.key not in FAILED:
        try:
            launch.at_once()
        except Exception as error:  # whatever the compiler of another version of triton raises
            if is_out_of_memory(error):
                raise
            FAILED[launch.key] = f"its kernel cannot be compiled ({type(error).__name__})"
    return FAILED.get(launch.key)


def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens of a layer, run by run.

    Args:
        query: of any strides; copied if its channels are not contiguous. New token i sees all slots except the newest
            q - 1 - i.
        work: :func:`refuses` must have returned None for it. Its buffers must stay, as for a captured step.
    """
    if query.stride(-1) != 1:
        query = query.contiguous()
    launch = _Launch(query, work, scaling)
    steps = work.tiles()
    # interpreted, two parts are enough to test the merge
    parts = min(steps, 2) if INTERPRETED else decode.choose_split(steps, launch.programs, launch.at_once())
    return launch.run(parts)


class _Launch:
    """The arguments of one launch of the kernel."""

    def __init__(self, query: Tensor, work: Work, scaling: float) -> None:
        batch, query_heads, count, channels = query.shape
        self.query, self.work, group = query, work, query_heads // work.heads
        forms, *self.tables = tables(work)
        self.chosen = decode.tuning(forms)
        self.rows = min(max(triton.next_power_of_2(group * count), 8), self.chosen.max_rows)
        self.blocks = -(-group * count // self.rows)
        self.cells = batch * work.heads
        self.warps = max(self.chosen.warps_for(self.rows, channels), WARPS)
        numbers, expense = decode.compiled_for(forms, self.chosen.full_step)
        self.out = query.new_empty(batch, count, query_heads, work.value_dim)
        limit, softcap, sinks = torch.finfo(self.out.dtype).max, work.logits.softcap, work.logits.sinks
        self.sinks = None if sinks is None else sinks.contiguous()
        self.fixed = (*numbers, *expense, channels, work.value_dim, group, count, self.rows, self.chosen.full_step)
        self.fixed += (self.chosen.stages, self.chosen.part_stages, limit, softcap is not None, sinks is not None)
        self.fixed += (not INTERPRETED,)
        self.factors = (scaling * LOG2E, 0.0) if softcap is None else (2 * scaling * LOG2E / softcap, softcap * LOG2E)
        self.merged = (group * count, group, count, self.rows, work.value_dim, 16, limit, sinks is not None)

    @property
    def programs(self) -> int:
        """Number of programs of an undivided launch."""
        return self.cells * self.blocks

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of a compiled kernel: launches with equal keys share one."""
        sinks = None if self.sinks is None else self.sinks.dtype
        return TABLES, self.query.device, self.query.dtype, sinks, self.fixed, self.warps

    def at_once(self) -> int:
        """Compile the kernel unless that has been done, and return how many programs the GPU runs at once."""
        if self.key not in TOGETHER:
            kernel = decode_in_place.warmup(*self.arguments(1), grid=(1,), num_warps=self.warps)
            TOGETHER[self.key] = decode.concurrent_programs(kernel, self.query.device, self.chosen, self.warps)
        return TOGETHER[self.key]

    def arguments(self, parts: int) -> tuple[Any, ...]:
        """Return the kernel's arguments for so many parts of the tokens, with new buffers for partial results."""
        room = decode.scratch(self.query.device, self.programs * parts, self.rows, self.work.value_dim, self.programs)
        like = self.work.phases[-1][0].buffer
        tensors = (self.query, self.out, self.work.table, *self.tables, like, *room, self.sinks)
        sizes = (*self.query.stride()[:3], len(self.work.phases), self.work.heads, *self.factors, self.chosen.fused)
        return (*tensors, *sizes, *self.fixed)

    def run(self, parts: int) -> Tensor:
        """Launch the kernel, and the merge where there are many parts; return the output."""
        passed = self.arguments(parts)
        decode_in_place[(self.blocks, parts, self.cells)](*passed, num_warps=self.warps)
        if parts > max(self.chosen.fused, 1):
            stats, sums = passed[7:9]
            grid = (self.merged[0], self.cells)
            merge[grid](stats, sums, self.out, self.sinks, parts, self.work.heads, *self.merged, num_warps=4)
        return self.out


def tables(work: Work) -> tuple[tuple[tuple[Format, Format], ...], Tensor, Tensor, Tensor]:
    """Return what the kernel reads of a layer's phases besides their places.

    Returns:
        The formats of keys and values, each pair once, in a fixed order that ends with full precision, so that the
        kernel is compiled once; for each phase the index of its pair, int32 ``[phases]``; the addresses of its buffers,
        int64 ``[phases, 2 * ADDRESSES]``; and their sizes, int32 ``[phases, 4]``.
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
