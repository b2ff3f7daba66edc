"""Decode attention over a codebook's codes (KVQuant) in Triton: the code that runs on the host.

    attend(query, work, scaling)   # Tensor [B, 1, Hq, Dv]
    refuses(query, work)           # the reason why it cannot serve the step, or None

Up to four launches compute a step: what the outliers of keys add to the scores, the codes, what the outliers of values
add to the sums, and the merge of partial results. Importing this module requires triton.
Source: Hooper et al., "KVQuant" (NeurIPS 2024), sec. 3.7 and appendix: codes looked up in registers or shared memory,
keys rotated in the kernel, sparse outliers apart. The rotation by two tables and the look-up by byte permutations are
our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kvbench.attention.codebook.fit import place_of_codes, unfit
from kvbench.attention.codebook.triton.kernel import decode
from kvbench.attention.codebook.triton.sparse import key_outliers, value_outliers
from kvbench.attention.phases import Work
from kvbench.attention.triton.decode import together
from kvbench.attention.triton.merge import merge

#: largest number of query heads per KV head
ROWS = 16
#: whether Triton's interpreter is on: it runs kernels on the CPU and cannot execute PTX
INTERPRETED = triton.knobs.runtime.interpret
LOG2E = math.log2(math.e)
#: number of programs that a GPU runs at once, for each compiled kernel
TOGETHER: dict[Any, int] = {}


@dataclass
class Tuning:
    """Launch parameters.

    Args:
        warps: warps of a program of the dense kernel.
        chunk: pairs of channels of keys that it processes at a time.
        value_chunk: channels of values that it processes at a time.
        stages: pipeline stages of its loop.
        resident: programs of it that a multiprocessor runs at once, by which tokens are split; 0 to compute the number.
        registers: limit on the registers of a thread; 0 for none.
        key_warps: warps of a program over the outliers of keys.
        key_entries: entries that it processes at a time.
        value_warps: warps of a program over the outliers of values.
        value_entries: entries that it processes at a time.
    """

    warps: int = 1
    chunk: int = 16
    value_chunk: int = 32
    stages: int = 1
    resident: int = 0
    registers: int = 0
    key_warps: int = 2
    key_entries: int = 256
    value_warps: int = 4
    value_entries: int = 128


#: launch parameters, by bits of a code
TABLE: dict[int, Tuning] = {2: Tuning(), 3: Tuning(), 4: Tuning(warps=2)}


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute the attention of a decode step, or None if it can.

    Args:
        query: queries of the new tokens, ``[B, Hq, q, D]``.
        work: the layer's stored keys and values, as kernels read them.

    Returns:
        A short phrase, which a run's results show as the reason for the reference path.
    """
    if not (query.is_cuda or INTERPRETED):
        return f"tensors on {query.device.type}"
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    if query.shape[1] // work.heads > ROWS:
        return f"{query.shape[1] // work.heads} query heads a KV head"
    return unfit(query, work)


def attend(query: Tensor, work: Work, scaling: float) -> Tensor:
    """Compute the attention of one new token per row over all cached tokens of a layer.

    Args:
        query: queries of the new tokens, ``[B, Hq, 1, D]``; copied if its channels are not contiguous.
        work: the layer's stored keys and values, as kernels read them. :func:`refuses` must have returned None for
            them.
        scaling: factor by which scores are multiplied.

    Returns:
        The output ``[B, 1, Hq, Dv]`` in the query's dtype.
    """
    batch, query_heads, _, key_dim = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    heads, value_dim, rows = work.heads, work.value_dim, query_heads // work.heads
    columns, cells, device = max(triton.next_power_of_2(rows), 8), batch * heads, query.device
    packed = place_of_codes(work)
    key, value = work.phases[packed]
    assert key.codebook is not None and value.codebook is not None
    chosen = TABLE[key.format.bits]
    softcap, sinks, rope = work.logits.softcap, work.logits.sinks, work.rope
    factor, cap = (scaling * LOG2E, 0.0) if softcap is None else (2 * scaling * LOG2E / softcap, softcap * LOG2E)
    tiles = work.tiles()
    rooms = [key.buffer.shape[2] if key.buffer is not None else 0 for key, _ in work.phases]
    slots = sum(rooms) + key.words[0].shape[2] * 128
    key_sparse, value_sparse = key.codebook.outliers, value.codebook.outliers
    sparse = key_sparse is not None or value_sparse is not None
    phases, turn = len(work.phases), rope is not None
    strides = query.stride()[:2]
    scores = torch.empty(cells * rows * slots if sparse else 1, dtype=torch.float32, device=device)
    none = (work.table, scores, scores, scores)
    starts, fine, near, coarse = (rope.starts, rope.fine, rope.rounded, rope.coarse) if rope is not None else none
    shape = (
        phases, packed, key.format.bits, value.format.bits, turn, sparse, key_dim, value_dim, rows, columns,
        chosen.chunk, chosen.value_chunk, chosen.stages, softcap is not None, not INTERPRETED,
    )  # fmt: skip

    def arguments(stats: Tensor, sums: Tensor) -> tuple[Any, ...]:
        buffers = (tuple(pointers(part) for part, _ in work.phases), tuple(pointers(part) for _, part in work.phases))
        tensors = (query, work.table, starts, fine, near, coarse, *buffers, scores, stats, sums)
        tiles_of = (key.words[0].shape[2], value.words[0].shape[2])
        return (*tensors, *strides, heads, factor, cap, slots, *tiles_of, rooms[0], rooms[-1], *shape)

    how: dict[str, int] = {"num_warps": chosen.warps}
    if chosen.registers and not INTERPRETED:
        how["maxnreg"] = chosen.registers
    if INTERPRETED:
        parts = min(tiles, 2)
    else:
        known = (device, query.dtype, shape, chosen.warps)
        if known not in TOGETHER:
            kernel = decode.warmup(*arguments(scores, scores), grid=(1,), **how)
            TOGETHER[known] = together(kernel, device, chosen, chosen.warps)  # type: ignore[arg-type]
        parts = max(min(TOGETHER[known] // cells, tiles), 1)
    out = query.new_empty(batch, 1, query_heads, value_dim)
    stats = torch.empty(cells * parts * 2 * columns, dtype=torch.float32, device=device)
    sums = torch.empty(cells * parts * columns * value_dim, dtype=torch.float32, device=device)
    if key_sparse is not None:
        key_outliers[(max(tiles, 1), cells)](
            query, work.table, starts, fine, coarse, scores, key_sparse.values, key_sparse.indices, key_sparse.table,
            key.codebook.stand_in, *strides, heads, factor, slots, key_sparse.values.shape[1],
            key_sparse.table.shape[1], phases, packed, turn, key_dim, rows, heads * key_dim, key_sparse.block,
            chosen.key_entries, num_warps=chosen.key_warps,
        )  # fmt: skip
    elif sparse:
        scores.zero_()
    decode[(parts, cells)](*arguments(stats, sums), **how)
    if value_sparse is not None:
        value_outliers[(parts, cells)](
            work.table, scores, stats, sums, value_sparse.values, value_sparse.indices, value_sparse.table,
            value.codebook.stand_in, value.codebook.scale, value.codebook.offset, heads, slots,
            value_sparse.values.shape[1], value_sparse.table.shape[1], value.codebook.scale.shape[1], phases, packed,
            key.format.bits, value_dim, rows, columns, heads * value_dim, value_sparse.block, chosen.value_entries,
            not INTERPRETED, num_warps=chosen.value_warps,
        )  # fmt: skip
    limit = torch.finfo(out.dtype).max
    sinks = None if sinks is None else sinks.contiguous()
    merge[(rows, cells)](
        stats, sums, out, sinks, parts, heads, rows, rows, 1, columns, value_dim, 16, limit, sinks is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def pointers(part: Any) -> tuple[Tensor, ...]:
    """Return the buffers of a phase's keys or values in the order in which the kernel takes them.

    Args:
        part: the keys or the values of a phase (:class:`kvbench.attention.phases.Part`).
    """
    if part.buffer is not None:
        return (part.buffer,)
    return (*part.words, part.codebook.levels, part.codebook.scale, part.codebook.offset)
