"""Decode attention in Triton over every tier of a layer: what the host does.

    attend(query, work, scaling)   # Tensor [B, q, Hq, Dv]
    refuses(query, work)           # why not, or None

The kernel is :mod:`kvbench.attention.triton_kernel`; it is compiled once for a list of formats and shape of the query,
and launched once for all phases (twice where many partial results are merged). Importing this module needs triton.
Sources of the ideas: KIVI (Liu et al. 2024, sec. 4: scales folded into the products), flash decoding (Dao et al. 2023:
split keys and values, merge by log-sum-exp), Marlin (Frantar et al. 2024: codes unpacked by logic operations).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor

from kvbench.attention.phases import Format, Part, Work
from kvbench.attention.triton_codes import number
from kvbench.attention.triton_kernel import decode, part
from kvbench.attention.triton_merge import merge
from kvbench.attention.triton_tuning import Tuning, costs, tuning

#: channels of a head that the kernel is written for
HEAD_DIMS = (64, 128)
#: most query rows of a KV head (query heads of the group x tokens of the step)
ROWS = 128
#: Triton's interpreter runs kernels on the CPU and knows no PTX
INTERPRETED = triton.knobs.runtime.interpret
LOG2E = math.log2(math.e)


def refuses(query: Tensor, work: Work) -> str | None:
    """Why this kernel cannot serve a step, for the result row; None where it can.

    Args:
        query: ``[B, Hq, q, D]``. work: the layer's phases.
    """
    if not (query.is_cuda or INTERPRETED):
        return f"tensors on {query.device.type}"
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"queries are {str(query.dtype).removeprefix('torch.')}"
    if work.key_dim not in HEAD_DIMS or work.value_dim not in HEAD_DIMS:
        return f"head_dim {work.key_dim if work.key_dim not in HEAD_DIMS else work.value_dim}"
    if query.shape[1] // work.heads * query.shape[2] > ROWS:
        return f"{query.shape[1] // work.heads} query heads a KV head x {query.shape[2]} tokens"
    for key, value in work.phases:
        for side, held, channels in (("keys", key, work.key_dim), ("values", value, work.value_dim)):
            form = held.format
            if form.kind != "full" and form.axis == "token" and channels % form.group:
                return f"groups of {form.group} channels in {side} of {channels}"
        if value.format.kind != "full" and value.format.axis == "channel":
            return "values in groups per channel"
    return None


def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
    """Attention of the newest tokens to everything in a layer.

    Args:
        query: ``[B, Hq, q, D]``, any strides with contiguous channels; token i sees all but the newest q - 1 - i slots.
        work: the layer's phases (:func:`refuses` has no objection to them).
        scaling: factor on the scores.

    Returns:
        ``[B, q, Hq, Dv]`` in the query's dtype.
    """
    batch, query_heads, count, channels = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    group = query_heads // work.heads
    forms = tuple((key.format, value.format) for key, value in work.phases)
    chosen = tuning(heaviest(work))
    rows = min(max(triton.next_power_of_2(group * count), 8), chosen.max_rows)
    blocks = -(-group * count // rows)
    numbers, expense = compiled_for(forms, chosen.full_step)
    keys = tuple(pointers(key) for key, _ in work.phases)
    values = tuple(pointers(value) for _, value in work.phases)
    extents = tuple((*extent(key), *extent(value)) for key, value in work.phases)
    out = query.new_empty(batch, count, query_heads, work.value_dim)
    limit = torch.finfo(out.dtype).max
    cells = batch * work.heads
    parts = split(work, query, cells * blocks, chosen, expense)
    stats, sums, arrived = scratch(query.device, cells * blocks * parts, rows, work.value_dim, cells * blocks)
    decode[(blocks, parts, cells)](
        query,
        out,
        work.table,
        keys,
        values,
        extents,
        stats,
        sums,
        arrived,
        *query.stride()[:3],
        work.heads,
        scaling * LOG2E,
        chosen.fused,
        *numbers,
        *expense,
        channels,
        work.value_dim,
        group,
        count,
        rows,
        chosen.full_step,
        chosen.stages,
        chosen.part_stages,
        limit,
        not INTERPRETED,
        num_warps=chosen.warps,
    )
    if parts > max(chosen.fused, 1):
        merge[(group * count, cells)](
            stats, sums, out, parts, work.heads, group * count, group, count, rows, work.value_dim, 16, limit,
            num_warps=4,
        )  # fmt: skip
    return out


def pointers(held: Part) -> tuple[Tensor, ...]:
    """Buffers of one side of a phase, as the kernel takes them."""
    return (held.buffer,) if held.buffer is not None else (*held.words, *held.params)


def extent(held: Part) -> tuple[int, int]:
    """Tiles (or exact tokens) that a buffer has room for, and rows of its per-channel parameters."""
    if held.buffer is not None:
        return held.buffer.shape[2], 0
    return held.words[0].shape[2], held.params[0].shape[2]


def heaviest(work: Work) -> int:
    """Bits of the keys of the phase with the most bytes."""
    tokens = work.longest()
    return max(
        ((key.format.bits + value.format.bits) * tokens[i], key.format.bits)
        for i, (key, value) in enumerate(work.phases)
    )[1]


@lru_cache(maxsize=256)
def compiled_for(forms: tuple[tuple[Format, Format], ...], full_step: int) -> tuple[tuple, tuple]:  # type: ignore[type-arg]
    """Formats as numbers, of keys and of values, and costs of whole tiles and of parts, for each phase."""
    keys, values = ([number(f.kind, f.bits, f.axis, f.group) for f in side] for side in zip(*forms, strict=True))
    steps = [part(key, value, full_step) for key, value in zip(keys, values, strict=True)]
    paid = [costs(key, value, step) for (key, value), step in zip(forms, steps, strict=True)]
    return (tuple(keys), tuple(values)), (tuple(c for c, _ in paid), tuple(c for _, c in paid))


def split(work: Work, query: Tensor, programs: int, chosen: Tuning, expense: tuple[tuple[int, ...], ...]) -> int:
    """Parts into which the work of a block of query rows is cut: as many as run at once, never a little more.

    A second wave of programs that is nearly empty costs as much as a full one.
    """
    steps = sum(-(-tokens // 128) for tokens in work.longest())
    if INTERPRETED:
        return min(steps, 2)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    together = processors * (chosen.resident or 4)
    if programs >= together:
        return 1
    return max(min(together // programs, steps), 1)


@lru_cache(maxsize=64)
def counters(device: torch.device, cells: int) -> Tensor:
    """Zeroed counters; every merge leaves them zeroed."""
    return torch.zeros(cells, dtype=torch.int32, device=device)


def scratch(device: torch.device, parts: int, rows: int, channels: int, cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for partial results, and counters."""
    stats = torch.empty(parts * 2 * rows, dtype=torch.float32, device=device)
    sums = torch.empty(parts * rows * channels, dtype=torch.float32, device=device)
    return stats, sums, counters(device, triton.next_power_of_2(cells))
