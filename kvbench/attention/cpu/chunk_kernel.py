"""Attention of many queries by the CPU kernel that unpacks a tile of tokens at a time: the Python side.

The kernel (`tiles.cpp`) reads runs of tokens. For each token, it is given the first query that sees it and the first
that no longer does. So one call serves causal attention, sliding windows, and passes that pack tokens between two
queries (:mod:`kvbench.attention.foreseen`). It also reads KVQuant's codes and keys before RoPE, unlike `decode.cpp`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.attention.cpu import build
from kvbench.attention.cpu.decode import HEAD_DIMS, KINDS, TYPES, PartStruct, _part
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Part, Work
from kvbench.attention.reads import CPU_KEYS, CPU_VALUES, misfit
from kvbench.attention.rope.rotation_tables import Rope
from kvbench.cache.kernels.reads import HEAD, Reads, Rows

#: number of the kind ``codebook`` in `tiles.hpp`
CODEBOOK = 8
#: formats of keys, and of values, that the kernel reads
_CODEBOOKS = [Reads("codebook", (2, 3, 4), {axis: (HEAD,)}, ("fp16", "fp32")) for axis in ("channel", "token")]
TILE_KEYS, TILE_VALUES = (
    Rows((*(row for row in rows if KINDS[row.kind] != KINDS["float"]), book))  # no codes of tables
    for rows, book in zip((CPU_KEYS, CPU_VALUES), _CODEBOOKS, strict=True)
)
#: a query that no token outlasts
ALWAYS = (1 << 31) - 1


class BookStruct(Structure):
    """The struct ``Book`` of `tiles.hpp`."""

    _fields_ = (
        ("levels", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("outliers", c_void_p),
        ("indices", c_void_p),
        ("ends", c_void_p),
        ("row", c_int64),
        ("room", c_int64),
        ("blocks", c_int64),
        ("type", c_int32),
        ("outlier_type", c_int32),
        ("block", c_int32),
        ("width", c_int32),
    )


class SourceStruct(Structure):
    """The struct ``Source`` of `tiles.hpp`."""

    _fields_ = (("part", PartStruct), ("book", BookStruct), ("first_row", c_int32), ("padding", c_int32))


class TilesStruct(Structure):
    """The struct ``TilesArgs`` of `tiles.cpp`."""

    _fields_ = (
        ("keys", POINTER(SourceStruct)),
        ("values", POINTER(SourceStruct)),
        ("runs", c_void_p),
        ("begins", c_void_p),
        ("ends", c_void_p),
        ("query", c_void_p),
        ("state", c_void_p),
        ("out", c_void_p),
        ("sinks", c_void_p),
        ("positions", c_void_p),
        ("fine", c_void_p),
        ("coarse", c_void_p),
        ("query_stride", c_int64 * 3),
        ("run_count", c_int32),
        ("batch", c_int32),
        ("heads", c_int32),
        ("group", c_int32),
        ("count", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("type", c_int32),
        ("threads", c_int32),
        ("later", c_int32),
        ("scale", c_float),
        ("cap", c_float),
        ("parallel", c_void_p),
    )


@dataclass(frozen=True)
class Runs:
    """Runs of tokens, the same for all rows of a call, and the queries that see each token.

    Args:
        runs: for each run the number of its segment of keys, that of its segment of values, the index of its first
            token in either, the number of tokens, and the slot of the first one; int32 ``[runs, 6]``.
        begins: for each token, in the order of the runs, the first query that sees it; int32 ``[n]``.
        ends: for each token, the first query that no longer sees it, int32 ``[n]``; 0 if no query sees it.
    """

    runs: Tensor
    begins: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Source:
    """A segment of keys or of values; row `first_row` of its buffers is row 0 of the call's queries."""

    part: Part
    first_row: int = 0


def refuses_chunk(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute attention over a layer's segments, or None if it can."""
    reason = misfit(query, work, HEAD_DIMS, TILE_KEYS, TILE_VALUES, widening=True)
    if reason is None and work.rope is not None and work.key_dim % 32:
        reason = f"keys before RoPE of {work.key_dim} channels"
    return reason or build.missing()


def causal_runs(counts: Sequence[tuple[int, int, int]], stored: int, ages: Tensor, window: int | None = None) -> Runs:
    """Return the runs of a row of a layer for causal attention; segments are numbered by phase.

    Args:
        counts: for each phase the first key, the first value and the number of tokens (:attr:`Work.counts`).
        stored: number of slots of the row; the phases end with the last one.
        ages: for each token of the phases, which query it belongs to: 0 for the first query's own token, negative for
            those before it, ``[n]``.
        window: sliding window: number of tokens that a query sees, its own included; None: all.
    """
    lines, slot = [], stored - len(ages)
    for phase, (key, value, tokens) in enumerate(counts):
        if tokens:
            lines.append((phase, phase, key, value, tokens, slot))
        slot += tokens
    ends = torch.full_like(ages, ALWAYS) if window is None else (ages + window).clamp(min=0)
    table = torch.tensor(lines, dtype=torch.int32).reshape(-1, 6)
    return Runs(table, ages.clamp(min=0).to(torch.int32), ends.to(torch.int32))


def attend_phases(
    query: Tensor, rows: slice, work: Work, runs: Runs, scaling: float, instructions: str | None = None
) -> Tensor:
    """Compute the attention ``[rows, q, Hq, Dv]`` of some rows of a layer whose phases are equally long.

    Args:
        query: queries of these rows, ``[rows, Hq, q, D]``.
        runs: runs over the phases of `work`.
    """
    keys, values = ([Source(pair[side], rows.start) for pair in work.phases] for side in (0, 1))
    sizes = work.heads, work.key_dim, work.value_dim
    out = run_chunk(query, keys, values, runs, sizes, scaling, work.logits, rope=work.rope, instructions=instructions)
    assert out is not None
    return out


def run_chunk(
    query: Tensor,
    keys: Sequence[Source],
    values: Sequence[Source],
    runs: Runs,
    sizes: tuple[int, int, int],
    scaling: float,
    logits: Logits,
    *,
    state: Tensor | None = None,
    later: bool = False,
    finish: bool = True,
    rope: Rope | None = None,
    instructions: str | None = None,
) -> Tensor | None:
    """Run the kernel for rows that share their runs.

    Args:
        query: queries of these rows, ``[rows, Hq, q, D]``.
        sizes: number of KV heads, channels of a key, channels of a value.
        state: fp32 ``[rows, Hq, q, Dv + 2]``, where calls other than the last store their sums; None for a single call.
        later: True if `state` has the sums of an earlier call.
        finish: True to return the output, ``[rows, q, Hq, Dv]``; False if another call follows.

    Raises:
        RuntimeError: the kernel could not be compiled or loaded; the message is the reason.
    """
    library = build.kernel_library(instructions)
    if isinstance(library, str):
        raise RuntimeError(library)
    batch, query_heads, count, _ = query.shape
    heads, key_dim, value_dim = sizes
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(batch, count, query_heads, value_dim) if finish else None
    sinks = None if logits.sinks is None else logits.sinks.float().contiguous()
    positions = None if rope is None else rope.starts[keys[0].first_row :]
    # structs hold bare addresses: whatever they point to must live until the call has returned
    args = TilesStruct(
        (SourceStruct * len(keys))(*map(_source, keys)),
        (SourceStruct * len(values))(*map(_source, values)),
        *(pointer(x) for x in (runs.runs, runs.begins, runs.ends, query, state, out, sinks, positions)),
        *((None, None) if rope is None else (pointer(rope.fine), pointer(rope.coarse))),
        (c_int64 * 3)(*query.stride()[:3]),
        len(runs.runs),
        batch,
        heads,
        query_heads // heads,
        count,
        key_dim,
        value_dim,
        TYPES[query.dtype],
        torch.get_num_threads(),
        later,
        scaling,
        logits.softcap or 0.0,
        library.parallel,
    )
    library.tiles(ctypes.byref(args))
    return out


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's memory, or None for None."""
    return None if tensor is None else tensor.data_ptr()


def _source(source: Source) -> SourceStruct:
    part, book = source.part, source.part.codebook
    if book is None:
        return SourceStruct(_part(part, 0), BookStruct(), source.first_row)
    struct = PartStruct(
        (c_void_p * 2)(*(plane.data_ptr() for plane in part.words)),
        kind=CODEBOOK,
        bits=part.format.bits,
        capacity=part.words[0].shape[2],
    )
    tables = BookStruct(
        book.levels.data_ptr(),
        book.scale.data_ptr(),
        book.offset.data_ptr(),
        row=book.scale.stride(0),
        type=TYPES[book.scale.dtype],
    )
    if book.outliers is not None:
        exact = book.outliers
        tables.outliers, tables.indices, tables.ends = (
            x.data_ptr() for x in (exact.values, exact.indices, exact.table)
        )
        tables.room, tables.blocks = exact.values.shape[1], exact.table.shape[1]
        tables.outlier_type, tables.block, tables.width = TYPES[exact.values.dtype], exact.block, exact.width
    return SourceStruct(struct, tables, source.first_row)
