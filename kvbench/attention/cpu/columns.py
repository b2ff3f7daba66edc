"""The attention that a prompt's tokens receive from all its queries: the Python side of the CPU kernel.

The kernel (`columns.cpp`) computes the probabilities a second time, from the log-sum-exp of each query that torch's own
attention returned, and adds them up without storing them.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kvbench.attention.cpu import build
from kvbench.attention.cpu.decode import HEAD_DIMS, TYPES


class ColumnsStruct(Structure):
    """The struct ``ColumnsArgs`` of `columns.cpp`."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("lse", c_void_p),
        ("sums", c_void_p),
        ("starts", c_void_p),
        ("query_stride", c_int64 * 3),
        ("key_stride", c_int64 * 3),
        ("lse_stride", c_int64 * 2),
        ("sums_stride", c_int64 * 2),
        ("batch", c_int32),
        ("heads", c_int32),
        ("group", c_int32),
        ("queries", c_int32),
        ("tokens", c_int32),
        ("dim", c_int32),
        ("query_type", c_int32),
        ("key_type", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
        ("parallel", c_void_p),
    )


def refuses_columns(query: Tensor, keys: Tensor) -> str | None:
    """Return why this kernel cannot add up the attention of a prompt, or None if it can."""
    if query.device.type != "cpu":
        return "the tokens are not on a CPU"
    for x in (query, keys):
        if x.dtype not in TYPES:
            return f"tokens in {str(x.dtype).removeprefix('torch.')}"
    return f"heads of {query.shape[-1]} channels" if query.shape[-1] not in HEAD_DIMS else build.missing()


def add_received(
    sums: Tensor,
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    starts: list[int],
    scaling: float,
    instructions: str | None = None,
) -> None:
    """Add the attention that tokens receive in causal attention to `sums`, fp32 ``[B, Hq, n]``.

    Args:
        query: the last q of the n tokens, ``[B, Hq, q, D]``; :func:`refuses_columns` must have returned None for them.
        keys: ``[B, H, n, D]``.
        lse: natural logarithm of the sum of each query's exponentials, fp32 ``[B, Hq, q]``.
        starts: for each row the first token that is no padding.
        instructions: a set of :data:`kvbench.attention.cpu.build.SETS` that the machine has; None for the best.

    Raises:
        RuntimeError: the kernel could not be compiled or loaded; the message is the reason.
    """
    library = build.kernel_library(instructions)
    if isinstance(library, str):
        raise RuntimeError(library)
    query, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys))
    lse = lse if lse.stride(-1) == 1 else lse.contiguous()
    begun = torch.tensor(starts, dtype=torch.int32)
    args = ColumnsStruct(
        *(x.data_ptr() for x in (query, keys, lse, sums, begun)),
        (c_int64 * 3)(*query.stride()[:3]),
        (c_int64 * 3)(*keys.stride()[:3]),
        (c_int64 * 2)(*lse.stride()[:2]),
        (c_int64 * 2)(*sums.stride()[:2]),
        query.shape[0],
        keys.shape[1],
        query.shape[1] // keys.shape[1],
        query.shape[2],
        keys.shape[2],
        query.shape[3],
        TYPES[query.dtype],
        TYPES[keys.dtype],
        torch.get_num_threads(),
        scaling,
        library.parallel,
    )
    library.columns(ctypes.byref(args))
