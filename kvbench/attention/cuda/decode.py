"""Decode attention by the CUDA kernel: the Python side, which prepares, compiles and launches it.

The kernel is compiled at first use for the formats of a layer, once per machine, and one launch serves all phases of a
:class:`kvbench.attention.phases.Work`. The module :mod:`kvbench.util.nvrtc` compiles, loads and launches it;
:mod:`kvbench.attention.cuda.config` chooses the configuration.
"""

from __future__ import annotations

import math
import struct
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvbench.attention.cuda.config import MOST_SPLITS, SLOW_INTEGERS, Build, build, shared_memory, unreadable
from kvbench.attention.cuda.storage import Signature
from kvbench.attention.phases import Part, Work
from kvbench.attention.reads import CUDA_KEYS, CUDA_VALUES, misfit
from kvbench.cache.segments.layout import TILE
from kvbench.util import nvrtc
from kvbench.util.nvrtc import missing as available

#: the files of the source, in the order in which they are joined
PARTS = (
    "header.cuh",
    "instructions.cuh",
    "storage.cuh",
    "tables.cuh",
    "elements.cuh",
    "windows.cuh",
    "loads.cuh",
    "cross.cuh",
    "scores.cuh",
    "window_scores.cuh",
    "levels.cuh",
    "softmax.cuh",
    "values.cuh",
    "factors.cuh",
    "factored.cuh",
    "columns.cuh",
    "integer.cuh",
    "integer_values.cuh",
    "byte_levels.cuh",
    "walk.cuh",
    "queries.cuh",
    "splits.cuh",
    "merge.cuh",
    "decode.cu",
)


#: whether the kernel may be launched before the one before it has ended, for which it then waits
OVERLAPPED = True


class Kernel(nvrtc.Function):
    """The CUDA kernel, compiled for one configuration and loaded on one device.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """

    def __init__(self, build: Build, device: int) -> None:
        self.build = build
        overlapped = OVERLAPPED and torch.cuda.get_device_capability(device) >= (9, 0)
        super().__init__(build.macros() + cuda_source(), "decode", device, build.warps * 32, build.shared, overlapped)


@cache
def cuda_source() -> str:
    """Return the CUDA source of the kernel, without the macro definitions that configure it."""
    return "\n".join(cuda_source_file(name) for name in PARTS)


def cuda_source_file(name: str) -> str:
    """Return one of the files of the CUDA source."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def cuda_kernel(
    phases: Signature,
    channels: int,
    rows: int,
    bf16: bool,
    device: int,
    tuning: tuple[tuple[str, int], ...] = (),
    softcap: bool = False,
    sinks: int = 0,
) -> Kernel:
    """Return the CUDA kernel for a layer's formats, compiled and loaded on a GPU; equal calls share one kernel.

    Args:
        tuning: overrides of ``teams``, ``stages`` and ``resident`` (:class:`Build`), as pairs of name and value.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    capability = torch.cuda.get_device_capability(device)
    known = shared_memory(capability)
    shared = int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", known))
    fast = capability not in SLOW_INTEGERS
    return Kernel(build(phases, channels, rows, bf16, shared, tuning, softcap, sinks, fast), device)


LOG2E = math.log2(math.e)
#: head dimensions that the kernel supports
HEAD_DIMS = (64, 80, 96, 128, 256)


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute the attention of a decode step, or None if it can.

    Returns:
        A short phrase, which a run's results show as the reason for another kernel or the reference path.
    """
    reason = available() or misfit(query, work, HEAD_DIMS, CUDA_KEYS, CUDA_VALUES)
    if reason:
        return reason
    if work.key_dim != work.value_dim:
        return f"heads of {work.key_dim} and {work.value_dim} channels"
    for key, value in work.phases:
        reason = unreadable(key.format, value.format, work.key_dim)
        if reason:
            return reason
        form = key.format
        # the kernel finds a tile's scales from its number, so a whole number of groups must fill the tiles
        if (
            form.axis == "channel"
            and not form.window
            and key.params[0].shape[2] * form.group != key.words[0].shape[2] * TILE
        ):
            return f"groups of {form.group} tokens that end within a tile"
    rows = query.shape[1] // work.heads * query.shape[2]
    bf16, extra = query.dtype == torch.bfloat16, extras(query, work)
    return cuda_problem(work.signature(), work.key_dim, rows, bf16, query.device.index or 0, *extra)


@lru_cache(maxsize=256)
def cuda_problem(
    phases: Signature, channels: int, rows: int, bf16: bool, device: int, softcap: bool = False, sinks: int = 0
) -> str | None:
    """Compile the kernel to find out if it works on a GPU; return the reason why it does not, or None if it does."""
    try:
        compiled = cuda_kernel(phases, channels, rows, bf16, device, (), softcap, sinks)
    except RuntimeError as error:
        return f"not compiled: {str(error).splitlines()[0]}"
    return None if compiled.resident else "a multiprocessor of this GPU has no room for it"


def attend(
    query: Tensor, work: Work, scaling: float, tuning: tuple[tuple[str, int], ...] = (), splits: int | None = None
) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens.

    Args:
        query: fp16 or bf16; copied if its channels are not contiguous.
        work: :func:`refuses` must have returned None for it.
        tuning: values for ``teams``, ``stages`` and ``resident`` in place of the chosen ones, for benchmarks, as pairs
            of name and value (:class:`kvbench.attention.cuda.config.Build`).
        splits: number of CTAs that share the tokens of a head, at most 128. None for the number that
            :func:`best_splits` estimates to be fastest.
    """
    batch, heads_q, count, channels = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    group = heads_q // work.heads
    rows = group * count
    device = query.device.index or 0
    extra = extras(query, work)
    compiled = cuda_kernel(work.signature(), channels, rows, query.dtype == torch.bfloat16, device, tuning, *extra)
    build = compiled.build
    blocks = -(-rows // build.rows)
    if splits is not None:
        splits = max(1, min(splits, MOST_SPLITS))
    else:
        splits = best_splits(batch * work.heads * blocks, compiled.resident, work.tiles(), build.teams)
    out = torch.empty(batch, count, heads_q, channels, dtype=query.dtype, device=query.device)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    lines = batch * work.heads * blocks
    # of each column: the weighted values, then maximum and sum of the weights
    partial, counter = workspace(device, stream, lines * splits * build.columns * (channels + 2), lines)
    sinks = work.logits.sinks
    if sinks is not None:
        sinks = (sinks.float() if extra[1] == 2 else sinks).contiguous()
    packed = cuda_arguments(query, work, scaling, splits, out, partial, counter, sinks)
    compiled.launch((splits, batch * work.heads, blocks), packed, stream)
    return out


def cuda_arguments(
    query: Tensor,
    work: Work,
    scaling: float,
    splits: int,
    out: Tensor,
    partial: Tensor,
    counter: Tensor,
    sinks: Tensor | None = None,
) -> bytes:
    """Serialize the kernel's only argument, the C struct ``Args`` of ``cuda/header.cuh``.

    Args:
        partial: buffer of partial results (:func:`workspace`).
        counter: buffer of counters, all zero.
        sinks: the model's attention sinks in the dtype that the kernel is compiled for, or None.
    """
    # P: an address; q: 64 bits; i: 32 bits; f: fp32, padded as a C compiler pads them
    return b"".join(pack(key, value) for key, value in work.phases) + struct.pack(
        "PP3qPPP4i2fP",
        work.table.data_ptr(),
        query.data_ptr(),
        *query.stride()[:3],
        out.data_ptr(),
        partial.data_ptr(),
        counter.data_ptr(),
        work.heads,
        query.shape[1] // work.heads,
        query.shape[2],
        splits,
        *score_factors(scaling, work.logits.softcap),
        0 if sinks is None else sinks.data_ptr(),
    )


def extras(query: Tensor, work: Work) -> tuple[bool, int]:
    """Return whether a step needs the kernel's code for a softcap, and which code it needs for attention sinks.

    Returns:
        The arguments `softcap` and `sinks` of :func:`kvbench.attention.cuda.decode.cuda_kernel`: True if scores have a
        softcap; and the dtype of the sinks as a number: 0 if there are none, 1 for the dtype of the query, 2 for fp32.
    """
    sinks = work.logits.sinks
    return work.logits.softcap is not None, 0 if sinks is None else 1 if sinks.dtype == query.dtype else 2


def score_factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Return the kernel's arguments ``scale`` and ``cap``, which turn a product of query and key into a base-2 score.

    Returns:
        Without a softcap, ``scaling * log2(e)`` and 0. With one, ``2 * scaling * log2(e) / softcap``, from which the
        kernel computes tanh by a base-2 exponential, and ``softcap * log2(e)``.
    """
    if softcap is None:
        return scaling * LOG2E, 0.0
    return 2 * scaling * LOG2E / softcap, softcap * LOG2E


def pack(key: Part, value: Part) -> bytes:
    """Serialize the buffer addresses of one phase as the C struct that ``cuda/header.cuh`` defines.

    Returns:
        The bytes of the struct: four pointers for keys and four for values (words, lower plane of 8-bit codes, scales,
        minima; 0 if absent), then the capacities of both buffers, in tiles if packed, in tokens if in full precision,
        the rows of scales of a head's keys if their groups do not fit tiles, two pointers to cross factors, and the
        factors on all keys and on all values.
    """
    fields: list[int] = []
    capacity, cross = [], []
    for part in (key, value):
        if part.buffer is not None:
            fields += [part.buffer.data_ptr(), 0, 0, 0]
            capacity.append(part.buffer.shape[2])
        else:
            lower = part.words[1].data_ptr() if len(part.words) > 1 else 0
            params = [param.data_ptr() for param in part.params[:2]]
            fields += [part.words[0].data_ptr(), lower, *params, *[0] * (2 - len(params))]
            capacity.append(part.words[0].shape[2])
        cross.append(part.params[2].data_ptr() if len(part.params) > 2 else 0)
    groups = key.params[0].shape[2] if key.format.window else 0
    return struct.pack("8P4i2P2f", *fields, *capacity, groups, 0, *cross, key.factor, value.factor)


@lru_cache(maxsize=4096)
def best_splits(lines: int, resident: int, tiles: int, teams: int) -> int:
    """Estimate among how many CTAs to split the tokens of a head (flash decoding) so that a step takes the least time.

    The estimate assumes that the time of a CTA is proportional to the number of tiles of one of its teams (groups of
    warps), plus one for its first loads and its merge. It also assumes that a nearly empty wave of CTAs takes as long
    as a full one.

    Args:
        lines: number of CTAs without a split: KV heads times sequences times blocks of query rows.
        resident: number of CTAs that the GPU can run at once.
    """
    most = min(max(-(-tiles // teams), 1), MOST_SPLITS)  # with more CTAs some teams would have no tile

    def cost(splits: int) -> tuple[float, int]:
        return -(-lines * splits // resident) * (1 + max(tiles / (splits * teams), 1)), splits

    return min(range(1, most + 1), key=cost)


_workspaces: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}


def workspace(device: int, stream: int, floats: int, lines: int) -> tuple[Tensor, Tensor]:
    """Return the buffers in which the CTAs of a launch exchange partial results; each CUDA stream has its own.

    If the buffers are too small, larger ones are allocated. The old ones are kept, because a CUDA graph captured
    earlier may still write to them.

    Args:
        floats: minimum size of the buffer of partial results, in elements.
        lines: minimum number of counters.

    Returns:
        A buffer for partial results, fp32; and a buffer of counters, int32, initially zero.
    """
    workspaces = _workspaces.setdefault((device, stream), [])
    if not workspaces or workspaces[-1][0].numel() < floats or workspaces[-1][1].numel() < lines:
        most = max(floats, 2 * workspaces[-1][0].numel() if workspaces else 1 << 20)
        where = torch.device("cuda", device)
        with torch.inference_mode(False):
            workspaces.append(
                (torch.empty(most, device=where), torch.zeros(max(lines, 4096), dtype=torch.int32, device=where))
            )
    return workspaces[-1]
