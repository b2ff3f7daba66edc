"""Decode attention in Triton over all storage formats of a layer: the Python side of the kernel.

The launch parameters of each format were chosen by measurement.

    attend(query, work, scaling)   # Tensor [B, q, Hq, Dv]
    refuses(query, work)           # the reason why it cannot serve the step, or None

The kernel is in :mod:`kvbench.attention.triton.decode_kernel`. It is compiled once for each list of formats and shape
of the query, and one launch serves all phases (a second one merges where there are many partial results). Importing
this module requires triton.
Sources of the ideas: KIVI (Liu et al. 2024, sec. 4: scales folded into the products), flash decoding (Dao et al. 2023:
split keys and values, merge by log-sum-exp), Marlin (Frantar et al. 2024: unpack codes with logic operations).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kvbench.attention.phases import Format, Part, Work
from kvbench.attention.reads import TRITON_KEYS, TRITON_VALUES, misfit
from kvbench.attention.triton.codes import format_number
from kvbench.attention.triton.decode_kernel import decode_attention, part_of_tile
from kvbench.attention.triton.merge_kernel import merge


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of the Triton decode kernel; a *program* is Triton's thread block.

    Args:
        warps: number of warps of a program with up to 8 query rows and heads of more than 64 channels. With fewer
            channels, such a program has one warp.
        wide_warps: number of warps of a program with more than 8 query rows.
        stages: pipeline stages of the loop over whole tiles.
        part_stages: pipeline stages of the loop over parts of tiles.
        full_step: number of tokens per iteration if keys and values are in full precision.
        max_rows: largest number of query rows of a program. More rows are spread over several programs, which then read
            the same tiles, all but the first from the L2 cache.
        fused: if a head has at most so many partial results, the program that finishes last merges them; otherwise a
            second kernel does.
        resident: number of programs that a multiprocessor runs at once; 0 to compute it from the kernel's registers and
            shared memory.
    """

    warps: int = 2
    wide_warps: int = 2
    stages: int = 3
    part_stages: int = 3
    full_step: int = 32
    max_rows: int = 16
    fused: int = 16
    resident: int = 0

    def warps_for(self, rows: int, channels: int) -> int:
        """Return how many warps a program should have.

        With too few warps, registers spill. With too many, several warps unpack the same codes.
        """
        return self.wide_warps if rows > 8 else 1 if channels <= 64 else self.warps


#: launch parameters by the width of a layer's narrowest codes; 16: nothing is packed. A field of 2-bit codes has 16
#: tokens, which is one row of matrix instructions, so a second warp would unpack the same keys again. 8 bits are two
#: planes of 4.
TABLE: dict[int, Tuning] = {
    2: Tuning(warps=1, stages=4),
    4: Tuning(warps=2, stages=3),
    8: Tuning(warps=2, stages=3, part_stages=2),
    16: Tuning(warps=2, part_stages=4),
}
#: the same for keys whose groups may cross tile boundaries: twice as many scaled queries pass through shared memory
WINDOWS: dict[int, Tuning] = {bits: replace(TABLE[bits], stages=2, part_stages=2) for bits in (2, 4, 8)}

#: relative time of one token's key or value in a whole tile, by bits: proportional to the bytes, except that
#: unpacking is the bottleneck for 2 bits
COST = {2: 3, 4: 4, 8: 8, 16: 16}
#: factor on it by group size, as smaller groups have more parameters to read; and for groups that may cross tiles
PARAMETERS = {32: 1.25, 64: 1.1, 128: 1.0, 0: 1.0}
WINDOWED = 2.0


def tuning(signature: Iterable[tuple[Format, Format]]) -> Tuning:
    """Look up the launch parameters of the Triton kernel for the formats of a layer.

    They do not depend on the number of tokens, so a growing cache needs no recompilation.
    """
    forms = [form for pair in signature for form in pair]
    bits = min((form.bits for form in forms), default=16)
    return (WINDOWS if any(form.window for form in forms) else TABLE)[bits]


def costs(key: Format, value: Format, part: int) -> tuple[int, int]:
    """Estimate the cost of one iteration of the kernel's loops, so that work can be divided equally between programs.

    Args:
        part: number of tokens in a part of a tile.

    Returns:
        The cost of an iteration over a whole tile, and that of an iteration over a part of a tile, in the same
        arbitrary unit.
    """
    token = sum(COST[form.bits] * (WINDOWED if form.window else PARAMETERS[form.group]) for form in (key, value))
    # parts cost more per token: words are read again for each part, and parameters are loaded one iteration at a time
    return max(round(token * 128 / 16), 1), max(
        round(token * part / 16 * (1.5 if key.bits + value.bits < 32 else 1)), 1
    )


def changed(**choices: int) -> dict[int, Tuning]:
    """Return a copy of :data:`TABLE` with some launch parameters set to the same value for all code widths.

    To try a variant: ``TABLE.update(changed(warps=1))``.
    """
    return {bits: replace(line, **choices) for bits, line in TABLE.items()}


#: head dimensions that the kernel supports
HEAD_DIMS = (64, 128)
#: largest number of query rows of a KV head (query heads per KV head x new tokens of the step)
ROWS = 128
#: whether Triton's interpreter is on: it runs kernels on the CPU and cannot execute PTX
INTERPRETED = triton.knobs.runtime.interpret
#: 32-bit registers of a multiprocessor (compute capability 7.0 to 10.0)
REGISTERS = 65536
LOG2E = math.log2(math.e)
#: number of programs that a GPU runs at once (:func:`concurrent_programs`), for each compiled kernel
TOGETHER: dict[Any, int] = {}


def no_device(query: Tensor) -> str | None:
    """Return why Triton cannot run on the device of the queries, or None if it can."""
    if not (query.is_cuda or INTERPRETED):
        return f"tensors on {query.device.type}"
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    return None


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute the attention of a decode step, or None if it can.

    Returns:
        A short phrase, which a run's results show as the reason for the reference path.
    """
    if reason := no_device(query):
        return reason
    if query.shape[1] // work.heads * query.shape[2] > ROWS:
        return f"{query.shape[1] // work.heads} query heads a KV head x {query.shape[2]} tokens"
    return misfit(query, work, HEAD_DIMS, TRITON_KEYS, TRITON_VALUES)


def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens of a layer.

    Args:
        query: of any strides; copied if its channels are not contiguous. New token i sees all slots except the newest
            q - 1 - i.
        work: :func:`refuses` must have returned None for it.
    """
    batch, query_heads, count, channels = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    group = query_heads // work.heads
    forms = tuple((key.format, value.format) for key, value in work.phases)
    chosen = tuning(forms)
    rows = min(max(triton.next_power_of_2(group * count), 8), chosen.max_rows)
    blocks = -(-group * count // rows)
    warps = chosen.warps_for(rows, channels)
    numbers, expense = compiled_for(forms, chosen.full_step)
    keys = tuple(pointers(key) for key, _ in work.phases)
    values = tuple(pointers(value) for _, value in work.phases)
    extents = tuple((*extent(key), *extent(value)) for key, value in work.phases)
    out = query.new_empty(batch, count, query_heads, work.value_dim)
    cells = batch * work.heads
    fixed = (*numbers, *expense, channels, work.value_dim, group, count, rows, chosen.full_step)
    limit, softcap, sinks = torch.finfo(out.dtype).max, work.logits.softcap, work.logits.sinks
    fixed += (chosen.stages, chosen.part_stages, limit, softcap is not None, sinks is not None, not INTERPRETED)
    strides = query.stride()[:3]
    # with a softcap, tanh(y) is computed from exp(2 y), hence the 2 (kvbench.attention.triton.walk.capped)
    factors = (scaling * LOG2E, 0.0) if softcap is None else (2 * scaling * LOG2E / softcap, softcap * LOG2E)
    sinks = None if sinks is None else sinks.contiguous()

    def arguments(parts: int) -> tuple[Any, ...]:
        room = scratch(query.device, cells * blocks * parts, rows, work.value_dim, cells * blocks)
        tensors = (query, out, work.table, keys, values, extents, *room, sinks)
        return (*tensors, *strides, work.heads, *factors, chosen.fused, *fixed)

    steps = work.tiles()
    if INTERPRETED:
        parts = min(steps, 2)  # enough to test the merge
    else:
        known = (query.device, query.dtype, None if sinks is None else sinks.dtype, fixed, warps)
        if known not in TOGETHER:
            kernel = decode_attention.warmup(*arguments(1), grid=(1,), num_warps=warps)
            TOGETHER[known] = concurrent_programs(kernel, query.device, chosen, warps)
        parts = choose_split(steps, cells * blocks, TOGETHER[known])
    passed = arguments(parts)
    decode_attention[(blocks, parts, cells)](*passed, num_warps=warps)
    if parts > max(chosen.fused, 1):
        shape = (group * count, group, count, rows, work.value_dim, 16, limit, sinks is not None)
        stats, sums = passed[6:8]
        merge[(group * count, cells)](stats, sums, out, sinks, parts, work.heads, *shape, num_warps=4)
    return out


def pointers(side: Part) -> tuple[Tensor, ...]:
    """Return the buffers of a phase's keys or values in the order in which the kernel takes them.

    Returns:
        The one buffer in full precision; or the words of each plane, the scales, and the minima or zero points.
    """
    return (side.buffer,) if side.buffer is not None else (*side.words, *side.params)


def extent(side: Part) -> tuple[int, int]:
    """Return how many tiles or tokens, and how many rows of scales, a head has in the buffers of a phase.

    The kernel computes addresses from these two numbers.

    Returns:
        The capacity of a head's part of the buffer, in tiles if packed and in tokens if in full precision; and the
        number of rows in a head's part of the scales and minima, which is 0 in full precision. The second number
        matters only for per-channel formats, which have one row per group of tokens.
    """
    if side.buffer is not None:
        return side.buffer.shape[2], 0
    return side.words[0].shape[2], side.params[0].shape[2]


@lru_cache(maxsize=256)
def compiled_for(forms: tuple[tuple[Format, Format], ...], full_step: int) -> tuple[tuple, tuple]:  # type: ignore[type-arg]
    """Compute those compile-time arguments of the kernel that depend on the formats of a layer.

    Returns:
        Two pairs of tuples, each tuple with one entry per phase. The first pair contains the encoded formats of keys
        and of values. The second contains the cost of an iteration over a whole tile and that of an iteration over a
        part of a tile (:func:`kvbench.attention.triton.decode.costs`).
    """
    keys, values = (
        [format_number(f.kind, f.bits, f.axis, f.group, f.window) for f in side] for side in zip(*forms, strict=True)
    )
    steps = [part_of_tile(key, value, full_step) for key, value in zip(keys, values, strict=True)]
    paid = [costs(key, value, step) for (key, value), step in zip(forms, steps, strict=True)]
    return (tuple(keys), tuple(values)), (tuple(c for c, _ in paid), tuple(c for _, c in paid))


def concurrent_programs(kernel: Any, device: torch.device, chosen: Tuning, warps: int) -> int:
    """Return how many thread blocks (Triton's programs) of a compiled kernel the GPU can run at once.

    Args:
        chosen: launch parameters; a nonzero ``resident`` is used in place of the computed number per multiprocessor.
    """
    kernel._init_handles()
    about = torch.cuda.get_device_properties(device)
    registers = -(-kernel.n_regs // 8) * 8 * 32 * warps  # a thread's are allocated in eights
    # the system takes 1 KiB of shared memory of each program; a multiprocessor runs at most 32 programs
    memory = about.shared_memory_per_multiprocessor // (kernel.metadata.shared + 1024)
    fitting = min(REGISTERS // registers, memory, 32)
    return about.multi_processor_count * (chosen.resident or max(fitting, 1))


def choose_split(steps: int, programs: int, at_once: int) -> int:
    """Choose among how many programs (thread blocks) to split the cached tokens of a head, as in flash decoding.

    Preferably all waves of programs on the GPU are full, because a nearly empty wave takes as long as a full one.

    Args:
        steps: number of tiles in the longest row of the batch.
        programs: number of programs without a split: blocks of query rows, counted over all sequences and KV heads.
        at_once: number of programs that the GPU can run at once.
    """
    best, least = 1, float("inf")
    for waves in range(1, 9):
        parts = min(at_once * waves // programs, steps)
        if parts < 1:
            continue
        # starting a program costs about as much as two tiles: table, query, first copies
        cost = -(-parts * programs // at_once) * (-(-steps // parts) + 2)
        if cost < least:
            best, least = parts, cost
    return best


@lru_cache(maxsize=64)
def counters(device: torch.device, cells: int) -> Tensor:
    """Return counters that show which program of a launch finishes last; they are zero before and after each launch.

    A launch that also merges its partial results uses one counter for each sequence, KV head and block of query rows.
    It counts the programs that have stored their partial result. The last of them merges these results and resets the
    counter, so all launches can share one tensor.

    Returns:
        int32 ``[cells]``.
    """
    return torch.zeros(cells, dtype=torch.int32, device=device)


def scratch(device: torch.device, parts: int, rows: int, channels: int, cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the buffers through which the programs of a launch pass partial results to the merge.

    Args:
        parts: number of partial results, counted over all blocks of query rows.
        cells: number of blocks of query rows, counted over all sequences and KV heads; each is merged separately.

    Returns:
        A buffer for maxima and sums, fp32; a buffer for weighted values, fp32; and counters of finished programs,
        int32.
    """
    stats = torch.empty(parts * 2 * rows, dtype=torch.float32, device=device)
    sums = torch.empty(parts * rows * channels, dtype=torch.float32, device=device)
    return stats, sums, counters(device, triton.next_power_of_2(cells))
