"""Decode attention by the CPU kernel: the Python side, which prepares and calls the kernel.

The kernel (`decode.cpp`) is compiled at first use for an instruction set of the machine
(:mod:`kvbench.attention.cpu.build`), and one call serves all phases of a :class:`kvbench.attention.phases.Work`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from kvbench.attention.cpu import build
from kvbench.attention.cpu.build import kernel_name as kernel_name
from kvbench.attention.phases import Part, Work
from kvbench.attention.reads import CPU_KEYS, CPU_VALUES, misfit
from kvbench.attention.work import TABLES
from kvbench.cache.segments.layout import TILE
from kvbench.quantizers.turboquant import levels, stored_codes

#: channels of a head that the kernel takes
HEAD_DIMS = range(32, 257, 16)
#: largest number of query rows of a KV head (query heads per KV head times new tokens)
MOST_ROWS = 256
#: dtypes, and kinds of formats, by their numbers in `lanes.hpp` and `layout.hpp`
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.uint8: 3}
KINDS = {
    **{"full": 0, "affine": 1, "atom": 2, "hierarchical": 3, "offset": 4, "folded": 5, "cross": 6},
    **dict.fromkeys(("float", "levels", "levels_read", "iq4_nl", "octave"), 7),
}


class PartStruct(Structure):
    """The struct ``Part`` of `layout.hpp`."""

    _fields_ = (
        ("words", c_void_p * 2),
        ("params", c_void_p * 3),
        ("buffer", c_void_p),
        ("param_head", c_int64 * 3),
        ("param_row", c_int32 * 3),
        ("kind", c_int32),
        ("bits", c_int32),
        ("by_token", c_int32),
        ("group", c_int32),
        ("window", c_int32),
        ("cuts", c_int32),
        ("type", c_int32),
        ("param_type", c_int32),
        ("capacity", c_int32),
        ("table", c_void_p),
        ("factor", c_float),
        ("normed", c_int32),
        ("cross_tile", c_int32),
    )


class PhaseStruct(Structure):
    """The struct ``Phase`` of `layout.hpp`."""

    _fields_ = (("key", PartStruct), ("value", PartStruct))


class ArgsStruct(Structure):
    """The struct ``Args`` of `layout.hpp`."""

    _fields_ = (
        ("phases", POINTER(PhaseStruct)),
        ("table", c_void_p),
        ("query", c_void_p),
        ("out", c_void_p),
        ("sinks", c_void_p),
        ("query_stride", c_int64 * 3),
        ("phase_count", c_int32),
        ("batch", c_int32),
        ("heads", c_int32),
        ("group", c_int32),
        ("count", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("type", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
        ("cap", c_float),
        ("parallel", c_void_p),
    )


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why this kernel cannot compute the attention of a decode step, or None if it can.

    Returns:
        A short phrase, which a run's results show as the reason for the reference path.
    """
    if query.device.type != "cpu":
        return "the tokens are not on a CPU"
    reason = misfit(query, work, HEAD_DIMS, CPU_KEYS, CPU_VALUES, widening=True)
    if reason:
        return reason
    rows = query.shape[1] // work.heads * query.shape[2]
    if rows > MOST_ROWS:
        return f"{rows} query rows of a KV head, more than {MOST_ROWS}"
    return build.missing()


def attend(query: Tensor, work: Work, scaling: float, instructions: str | None = None) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens.

    Args:
        query: bf16, fp16 or fp32; copied if its channels are not contiguous.
        work: :func:`refuses` must have returned None for it.
        instructions: a set of :data:`kvbench.attention.cpu.build.SETS` that the machine has; None for the best.

    Raises:
        RuntimeError: the kernel could not be compiled or loaded; the message is the reason.
    """
    batch, heads_q, count, _ = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(batch, count, heads_q, work.value_dim)
    sinks = work.logits.sinks
    sinks = None if sinks is None else sinks.float().contiguous()
    structs = ("structs", instructions)
    if structs not in work.prepared:
        library = build.kernel_library(instructions)
        if isinstance(library, str):
            raise RuntimeError(library)
        phases = (PhaseStruct * len(work.phases))(
            *(PhaseStruct(_part(key, work.key_dim), _part(value, work.value_dim)) for key, value in work.phases)
        )
        work.prepared[structs] = library, phases
    library, phases = work.prepared[structs]
    # structs hold bare addresses: `phases`, `work`, `query`, `out` and `sinks` must live until the call has returned
    args = ArgsStruct(
        phases,
        work.table.data_ptr(),
        query.data_ptr(),
        out.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        (c_int64 * 3)(*query.stride()[:3]),
        len(work.phases),
        batch,
        work.heads,
        heads_q // work.heads,
        count,
        work.key_dim,
        work.value_dim,
        TYPES[query.dtype],
        torch.get_num_threads(),
        scaling,
        work.logits.softcap or 0.0,
        library.parallel,
    )
    library.decode(ctypes.byref(args))
    return out


@cache
def number_table(kind: str, bits: int, channels: int) -> Tensor:
    """Return the number for which each code stands, before multiplication by factors, fp32 ``[2**bits]``.

    Args:
        kind: ``float``, ``levels``, ``levels_read``, ``iq4_nl`` or ``octave`` (:class:`kvbench.attention.work.Format`).
        channels: channels of a head, on which TurboQuant's levels depend.
    """
    with torch.inference_mode(False):  # kept, so it outlives the mode in which it is made
        if kind == "float" and bits == 8:
            return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        if kind == "float":
            magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32)
            return torch.cat([magnitudes, -magnitudes])
        if (kind, bits) in TABLES:
            return torch.tensor(TABLES[kind, bits], dtype=torch.float32)
        table = torch.empty(2**bits, dtype=torch.float32)
        table[stored_codes(bits)] = levels(channels, bits)
        return table


def _part(part: Part, channels: int) -> PartStruct:
    """Return the struct of one segment of keys or of values."""
    form = part.format
    if part.buffer is not None:
        return PartStruct(
            buffer=part.buffer.data_ptr(), type=TYPES[part.buffer.dtype], capacity=part.buffer.shape[2], bits=16
        )
    struct = PartStruct(
        (c_void_p * 2)(*(plane.data_ptr() for plane in part.words)),
        (c_void_p * 3)(*(param.data_ptr() for param in part.params)),
        None,
        (c_int64 * 3)(*(param.stride(1) for param in part.params)),
        (c_int32 * 3)(*(param.stride(2) for param in part.params)),
        KINDS[form.kind],
        form.bits,
        form.axis == "token",
        form.group,
        form.window,
        -(-form.window // form.group),
        0,  # type of exact elements, of which there are none
        TYPES[part.params[0].dtype] if part.params else 0,
        part.words[0].shape[2],
    )
    if KINDS[form.kind] == KINDS["float"]:
        struct.table = number_table(form.kind, form.bits, channels).data_ptr()
        struct.factor, struct.normed = part.factor, form.kind == "levels_read"
    if form.kind == "cross":  # capacity in tokens / rows of factors: keys have one for each token
        struct.cross_tile = part.words[0].shape[2] * TILE // part.params[2].shape[2]
    return struct
