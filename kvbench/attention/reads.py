"""The formats of keys and of values that each attention kernel reads (:class:`kvbench.cache.kernels.reads.Reads`)."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from kvbench.attention.work import Format, Work
from kvbench.cache.kernels.reads import HALVES, HEAD, Reads, Rows, format_refusal

#: tokens in full precision
EXACT = Reads("full", (16,))
#: tokens of groups per channel, and channels of groups per token, that the CUDA kernel reads
_TOKENS = (16, 32, 64, 128)
_BOTH = {"channel": _TOKENS, "token": (*_TOKENS, HEAD)}
_ONE = {"token": (HEAD,)}
#: tokens that are packed at a time, where their groups cross the ends of tiles
_WINDOWS = range(16, 2048)
#: heads of 3-bit codes: the last bits of 32 channels are in one transfer
_HEADS_3 = (64, 96, 128, 256)

#: formats of keys that the CUDA kernel reads
CUDA_KEYS = Rows(
    (
        EXACT,
        Reads("affine", (2, 4, 8), _BOTH),
        Reads("affine", (3,), _BOTH, heads=_HEADS_3),
        Reads("affine", (2, 4, 8), {"channel": range(16, 256)}, windows=_WINDOWS),
        Reads("affine", (3,), {"channel": range(16, 256)}, heads=_HEADS_3, windows=_WINDOWS),
        Reads("atom", (2, 4), _BOTH),
        Reads("atom", (3,), _BOTH, heads=_HEADS_3),
        Reads("hierarchical", (8,), _BOTH),
        Reads("cross", (2, 4, 8), {"channel": (64, 128)}),
        Reads("cross", (3,), {"channel": (64, 128)}, heads=_HEADS_3),
        Reads("offset", (8,), _ONE, ("fp32",)),
        Reads("offset", (4, 8), {"token": (32,)}),
        Reads("folded", (4,), _ONE, ("fp32",)),
        Reads("float", (8,), _ONE, ("fp32", "")),
        Reads("float", (4,), {"token": (16,)}, ("e4m3",)),
        Reads("levels", (4,), _ONE),
        Reads("levels", (3,), _ONE, heads=_HEADS_3),
        Reads("levels_read", (4,), _ONE),
        Reads("levels_read", (3,), _ONE, heads=_HEADS_3),
    )
)
#: formats of values that the CUDA kernel reads: of the same kinds those per token, without levels
CUDA_VALUES = Rows(
    (
        EXACT,
        *(
            Reads(row.kind, row.bits, {"token": row.groups["token"]}, row.scales, row.heads)
            for row in CUDA_KEYS
            if "token" in row.groups and not row.kind.startswith("levels")
        ),
        Reads("cross", (2, 4, 8), _ONE),
        Reads("cross", (3,), _ONE, heads=_HEADS_3),
    )
)

_GROUPS = (32, 64, 128)
#: formats of keys, and of values, that the Triton kernel reads
TRITON_KEYS = Rows(
    (
        EXACT,
        Reads("affine", (2, 4, 8), {"channel": _GROUPS, "token": _GROUPS}),
        Reads("affine", (2, 4, 8), {"channel": range(16, 256)}, windows=_WINDOWS),
        Reads("atom", (2, 4), {"channel": _GROUPS, "token": _GROUPS}),
        Reads("hierarchical", (8,), {"channel": _GROUPS, "token": _GROUPS}),
    )
)
TRITON_VALUES = Rows(
    (
        EXACT,
        *(Reads(row.kind, row.bits, {"token": _GROUPS}) for row in TRITON_KEYS if "token" in row.groups),
    )
)

#: formats that the kernels for codebooks read (KVQuant): of keys, and of values
LOOKED_UP_KEYS = Rows((EXACT, Reads("codebook", (2, 3, 4), {"channel": (HEAD,)})))
LOOKED_UP_VALUES = Rows((EXACT, Reads("codebook", (2, 3, 4), {"token": (HEAD,)})))

#: formats that the kernels that return attention weights read
OBSERVED = Rows((EXACT,))

#: formats that at least one kernel reads, of keys or of values
ANY = Rows((*CUDA_KEYS, *CUDA_VALUES, *TRITON_KEYS, *TRITON_VALUES, *LOOKED_UP_KEYS, *LOOKED_UP_VALUES))

#: largest number of (sequence, KV head) pairs: CUDA's limit on the later dimensions of a grid
LINES = 65535


def unread(rows: Rows, form: Format, channels: int) -> str | None:
    """Return in what a format differs from all that a kernel reads, or None if it is in the kernel's list."""
    return format_refusal(rows, form.kind, form.bits, form.axis, form.group, channels, form.scale, form.window)


def misfit(query: Tensor, work: Work, heads: Container[int], keys: Rows, values: Rows) -> str | None:
    """Return why a kernel cannot serve a step, as far as its lists say, or None if they have all that the step needs.

    Queries and what is stored in full precision must be of the same 16-bit dtype.

    Args:
        heads: channels of a head that the kernel takes.
    """
    if query.dtype not in HALVES:
        return f"queries in {_name(query.dtype)}"
    for channels in (work.key_dim, work.value_dim):
        if channels not in heads:
            return f"heads of {channels} channels"
    if query.shape[0] * work.heads > LINES:
        return f"{query.shape[0]} rows of {work.heads} heads, more than {LINES} in all"
    for pair in work.phases:
        for side, part, rows, channels in (
            ("keys", pair[0], keys, work.key_dim),
            ("values", pair[1], values, work.value_dim),
        ):
            if part.buffer is None:
                reason = unread(rows, part.format, channels)
                if reason:
                    return f"{side} in {reason}"
            elif part.buffer.dtype != query.dtype:
                return f"queries in {_name(query.dtype)}, but {side} in {_name(part.buffer.dtype)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
