"""Decode attention over a codebook's codes (KVQuant) by the CUDA kernel: the Python side, which prepares the call.

The kernel is compiled at first use, for the format of a layer and a number of warps per CTA. One launch computes a
step: it looks codes up in registers, rotates keys that are stored before RoPE, adds outliers, and includes the tokens
in full precision before and after the packed ones.

Source: Hooper et al., "KVQuant" (NeurIPS 2024), sec. 3.7 and appendix: codes looked up in registers or shared memory,
keys rotated in the kernel, sparse outliers apart. The look-up by byte permutations, the rotation that is folded into
ranges and offsets, and the sums of outliers in integers are our own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.cuda import decode as uniform
from kvbench.attention.cuda.config import RESERVED, shared_memory
from kvbench.attention.cuda.decode import best_splits, extras, score_factors, workspace
from kvbench.attention.phases import Part, Work
from kvbench.attention.reads import LOOKED_UP_KEYS, LOOKED_UP_VALUES, misfit
from kvbench.util import nvrtc
from kvbench.util.nvrtc import missing

#: warps of a CTA and CTAs that a multiprocessor must hold, to choose from
CHOICES = ((16, 1), (12, 1), (10, 1), (8, 1), (6, 1), (4, 1), (2, 1), (1, 1))
#: warps of a CTA that serves several query rows, at most: each has 255 registers, and was timed with 4 rows
WARPS_OF_ROWS = 8
#: largest number of query rows that a CTA serves: the columns of a product
ROWS = 8


@dataclass(frozen=True)
class CodebookBuild:
    """Compile-time configuration of the kernel, as values for the macros that ``header.cuh`` explains.

    Args:
        channels: number of channels of a head (macro ``D``).
        bits: bits of a code (``BITS``).
        rows: number of query rows of a KV head that a CTA serves, at most 8 (``ROWS``).
        heads: number of KV heads (``HEADS``).
        block: number of tokens of a block of outliers (``BLOCK``).
        bf16: True if queries, outliers and tokens in full precision are bf16, False if they are fp16.
        phases: number of phases (``NPHASES``).
        packed: number of the packed phase (``PACKED``).
        rotate: True if keys are stored before RoPE (``ROTATE``).
        outliers: True if there are outliers (``OUTLIERS``).
        sinks: dtype of the model's attention sinks, as a number. 0: no sinks; 1: the dtype of the query; 2: fp32.
        warps: number of warps of a CTA (``WARPS``).
        resident: number of CTAs that a multiprocessor must be able to run at once (``MINB``), which bounds the
            registers of a thread.
    """

    channels: int
    bits: int
    rows: int
    heads: int
    block: int
    bf16: bool
    phases: int
    packed: int
    rotate: bool
    outliers: bool
    softcap: bool = False
    sinks: int = 0
    warps: int = 12
    resident: int = 1

    def macros(self) -> str:
        """Return the macro definitions that must precede the kernel's source."""
        values = {
            "D": self.channels,
            "BITS": self.bits,
            "ROWS": self.rows,
            "HEADS": self.heads,
            "BLOCK": self.block,
            "BF16": int(self.bf16),
            "NPHASES": self.phases,
            "PACKED": self.packed,
            "ROTATE": int(self.rotate),
            "OUTLIERS": int(self.outliers),
            "SOFTCAP": int(self.softcap),
            "SINKS": self.sinks,
            "WARPS": self.warps,
            "MINB": self.resident,
            "SHARED": self.shared,
        }
        return "".join(f"#define {name} {value}\n" for name, value in values.items())

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a CTA in bytes: the larger of what ``CTA_BYTES`` and ``merge_warps`` need."""
        steps = self.channels // 16
        sets = 1 << (self.rows - 1).bit_length()
        common = steps * 1536 + 16 * self.channels * 2 + (self.rows + 1) * self.channels * 4 + 320
        tile = 16 * self.bits * self.channels + 512  # keys and values take turns
        own = self.rows * (512 + 256) + 512 + sets * (steps // 2) * 512 + 64
        merged = self.rows * (self.channels + 4) * 4
        return max(common + self.warps * (tile + own), self.warps * max(merged, 512))

    def fits(self, shared: int) -> bool:
        """Return True if :attr:`resident` CTAs fit into a multiprocessor that allows one CTA `shared` bytes."""
        static = -(-(self.warps * self.rows * 8 + 4) // 128) * 128
        return (self.shared + static + RESERVED) * self.resident <= shared + RESERVED


def choose_warps(build: CodebookBuild, shared: int, tiles: float) -> CodebookBuild:
    """Return `build` with the number of warps that should be fastest of those that fit; if none fits, the fewest.

    For one query row these are 16 warps of 128 registers, or 12 of 168 where that does not take more rounds.

    Args:
        shared: bytes of shared memory that a multiprocessor allows one CTA.
        tiles: number of tiles of all heads and rows per multiprocessor of the GPU.
    """
    most = WARPS_OF_ROWS
    if build.rows == 1:
        most = 12 if ceil(tiles / 12) == ceil(tiles / 16) else 16
    options = [replace(build, warps=warps, resident=resident) for warps, resident in CHOICES if warps <= most]
    return next((option for option in options if option.fits(shared)), options[-1])


#: the files of the source, in the order in which they are joined; those of the kernel for uniform levels are shared
PARTS = (
    "header.cuh",
    "lookup.cuh",
    "loads.cuh",
    "rotation.cuh",
    "outliers.cuh",
    "scores.cuh",
    "values.cuh",
    "exact.cuh",
    "merge.cuh",
    "decode.cu",
)
SHARED = ("instructions.cuh", "splits.cuh")


class CodebookKernel(nvrtc.Function):
    """The CUDA kernel, compiled for one configuration and loaded on one device.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """

    def __init__(self, build: CodebookBuild, device: int) -> None:
        self.build = build
        overlapped = uniform.OVERLAPPED and torch.cuda.get_device_capability(device) >= (9, 0)
        super().__init__(
            build.macros() + codebook_source(), "decode", device, build.warps * 32, build.shared, overlapped
        )


@cache
def codebook_source() -> str:
    """Return the CUDA source of the kernel, without the macro definitions that configure it."""
    first, *others = (codebook_source_file(name) for name in PARTS)
    # the shared files use the macros of the header, and all others use the shared files
    return "\n".join([first, *map(uniform.cuda_source_file, SHARED), *others])


def codebook_source_file(name: str) -> str:
    """Return one of the files of the CUDA source."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def codebook_kernel(build: CodebookBuild, device: int) -> CodebookKernel:
    """Return the CUDA kernel for a configuration, compiled and loaded on a GPU; equal calls share one kernel.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    return CodebookKernel(build, device)


#: smallest block of outliers, in tokens: a warp has a lane for each block of a tile at least
BLOCK = 4
#: head dimensions that the kernel supports
HEAD_DIMS = (64, 128)


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute the attention of a decode step, or None if it can.

    Returns:
        A short phrase, which a run's results show as the reason for another kernel or the reference path.
    """
    reason = missing() or unlike(query, work)
    if reason:
        return reason
    if work.key_dim != work.value_dim:
        return f"heads of {work.key_dim} and {work.value_dim} channels"
    # of keys and of values: `unlike` has made sure that one phase alone has codes
    sparse = [part.codebook.outliers for pair in work.phases for part in pair if part.codebook is not None]
    if (sparse[0] is None) != (sparse[1] is None):
        return "outliers of keys or of values alone"
    for outliers in sparse:
        if outliers is not None and outliers.values.dtype != query.dtype:
            return "queries and outliers differ in dtype"
        if outliers is not None and outliers.block < BLOCK:
            return f"blocks of {outliers.block} tokens of outliers"
    return codebook_problem(configured(query, work), query.device.index or 0)


def unlike(query: Tensor, work: Work) -> str | None:
    """Return which shape or format of a step the kernel cannot read; None if it can read all of them."""
    reason = misfit(query, work, HEAD_DIMS, LOOKED_UP_KEYS, LOOKED_UP_VALUES)
    if reason:
        return reason
    if query.shape[2] > 1:
        return f"{query.shape[2]} new tokens"
    kinds = [(key.format.kind, value.format.kind) for key, value in work.phases]
    if any(key != value for key, value in kinds) or kinds.count(("codebook", "codebook")) != 1:
        return "keys and values that are packed at different tokens"
    packed = place_of_codes(work)
    key, value = work.phases[packed]
    if key.format.bits != value.format.bits:
        return f"keys of {key.format.bits} and values of {value.format.bits} bits"
    if packed > 1 or len(kinds) - packed > 2 or any(row[packed][0] or row[packed][1] for row in work.counts):
        return "more than one run of tokens in full precision before or after the packed ones"
    for one, other in work.phases:
        if one.buffer is not None and other.buffer is not None and one.buffer.shape[2] != other.buffer.shape[2]:
            return "buffers of keys and of values of different lengths"
    return None


def place_of_codes(work: Work) -> int:
    """Return the number of the phase whose codes are looked up in a codebook."""
    return next(i for i, (key, _) in enumerate(work.phases) if key.format.kind == "codebook")


@lru_cache(maxsize=256)
def codebook_problem(build: CodebookBuild, device: int) -> str | None:
    """Compile the kernel to find out if it works on a GPU; return the reason why it does not, or None if it does."""
    try:
        compiled = codebook_kernel(build, device)
    except RuntimeError as error:
        return f"not compiled: {str(error).splitlines()[0]}"
    return None if compiled.resident else "a multiprocessor of this GPU has no room for it"


def configured(query: Tensor, work: Work) -> CodebookBuild:
    """Return the configuration of the kernel for a step, with the number of warps that suits its GPU."""
    device = query.device.index or 0
    shared, processors = shared_memory((9, 0)), 132
    if query.is_cuda:
        known = shared_memory(torch.cuda.get_device_capability(device))
        about = torch.cuda.get_device_properties(device)
        shared = int(getattr(about, "shared_memory_per_block_optin", known))
        processors = about.multi_processor_count
    packed = place_of_codes(work)
    book = work.phases[packed][0].codebook
    assert book is not None
    rows = query.shape[1] // work.heads
    softcap, sinks = extras(query, work)
    build = CodebookBuild(
        channels=work.key_dim,
        bits=work.phases[packed][0].format.bits,
        rows=-(-rows // -(-rows // ROWS)),  # as few CTAs as possible, with equally many rows
        heads=work.heads,
        block=128 if book.outliers is None else book.outliers.block,
        bf16=query.dtype == torch.bfloat16,
        phases=len(work.phases),
        packed=packed,
        rotate=work.rope is not None,
        outliers=book.outliers is not None,
        softcap=softcap,
        sinks=sinks,
    )
    return choose_warps(build, shared, query.shape[0] * work.heads * work.tiles() / processors)


def attend(
    query: Tensor, work: Work, scaling: float, tuning: tuple[tuple[str, int], ...] = (), splits: int | None = None
) -> Tensor:
    """Compute the attention of one new token per row over all cached tokens of a layer.

    Args:
        query: queries of the new tokens, ``[B, Hq, 1, D]``; copied if its channels are not contiguous.
        tuning: values of the configuration in place of the chosen ones, for benchmarks, as pairs of name and value
            (:class:`kvbench.attention.codebook.decode.CodebookBuild`).
        splits: number of CTAs that share the tokens of a head, at most 128. None for the number that
            :func:`kvbench.attention.cuda.decode.best_splits` estimates to be fastest.
    """
    batch, query_heads, _, channels = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    device = query.device.index or 0
    changes: dict[str, Any] = dict(tuning)
    build = replace(configured(query, work), **changes)
    compiled = codebook_kernel(build, device)
    blocks = -(-(query_heads // work.heads) // build.rows)
    lines = batch * work.heads * blocks
    if splits is None:
        splits = best_splits(lines, compiled.resident, work.tiles(), build.warps)
    out = torch.empty(batch, 1, query_heads, channels, dtype=query.dtype, device=query.device)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    partial, counter = workspace(device, stream, lines * splits * build.rows * (channels + 4), lines)
    sinks = work.logits.sinks
    if sinks is not None:
        sinks = (sinks.float() if build.sinks == 2 else sinks).contiguous()
    packed = codebook_arguments(query, work, scaling, splits, out, partial, counter, sinks)
    compiled.launch((splits, batch * work.heads, blocks), packed, stream)
    return out


def codebook_arguments(
    query: Tensor,
    work: Work,
    scaling: float,
    splits: int,
    out: Tensor,
    partial: Tensor,
    counter: Tensor,
    sinks: Tensor | None = None,
) -> bytes:
    """Serialize the kernel's only argument, the C struct ``Args`` of ``header.cuh``."""
    packed = place_of_codes(work)
    key, value = work.phases[packed]
    assert key.codebook is not None and value.codebook is not None
    books, rope = (key.codebook, value.codebook), work.rope
    step = struct.pack(
        "PP3qPPP4i2fP",
        *(work.table.data_ptr(), query.data_ptr(), *query.stride()[:3]),
        *(out.data_ptr(), partial.data_ptr(), counter.data_ptr()),
        *(work.heads, query.shape[1] // work.heads, 1, splits),
        *score_factors(scaling, work.logits.softcap),
        address(sinks),
    )
    codes = struct.pack(
        "4P2q8P3P",
        *(address(part.words[i] if i < len(part.words) else None) for part in (key, value) for i in (0, 1)),
        *(part.words[0].shape[2] for part in (key, value)),
        *(book.levels.data_ptr() for book in books),
        *(tensor.data_ptr() for book in books for tensor in (book.scale, book.offset)),
        *(book.stand_in.data_ptr() for book in books),
        *((0, 0, 0) if rope is None else (rope.starts.data_ptr(), rope.fine.data_ptr(), rope.coarse.data_ptr())),
    )
    exact = b"".join(
        full(*work.phases[i]) if 0 <= i < len(work.phases) else struct.pack("2P2q", 0, 0, 0, 0)
        for i in (packed - 1, packed + 1)
    )
    # an exact phase before the packed one and one after it; zeros where there is none
    return step + codes + exact + b"".join(sparse(book.outliers) for book in books)


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's memory, or 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def full(key: Part, value: Part) -> bytes:
    """Serialize a phase in full precision as the C struct ``Exact``."""
    assert key.buffer is not None and value.buffer is not None
    capacity = key.buffer.shape[2], value.buffer.shape[2]
    return struct.pack("2P2q", key.buffer.data_ptr(), value.buffer.data_ptr(), *capacity)


def sparse(outliers: Any) -> bytes:
    """Serialize the outliers of keys or of values as the C struct ``Sparse``."""
    if outliers is None:
        return struct.pack("3P2q", 0, 0, 0, 0, 0)
    tensors = outliers.values, outliers.indices, outliers.table
    return struct.pack("3P2q", *(t.data_ptr() for t in tensors), outliers.values.shape[1], outliers.table.shape[1])
