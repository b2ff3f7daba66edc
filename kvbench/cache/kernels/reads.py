"""Lists of the formats that kernels read, row by row; a format that is in no row is refused, with the reason.

A kernel computes wrong numbers, without an error, from codes that it was not written for. So checks do not look for
what a kernel cannot do: they compare a format with the kernel's rows (:func:`format_refusal`). A new number of bits or
a new kind of codes is in no row, so torch serves it until somebody writes the code for it and adds the row.
The rows of attention kernels are in :mod:`kvbench.attention.reads`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

#: a group of all channels of a head
HEAD = 0
#: dtypes of tokens that kernels with arithmetic of their own take
HALVES = (torch.float16, torch.bfloat16)
#: dtypes of tokens that kernels copy
COPIED = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class Reads:
    """A row of a list: formats that a kernel reads.

    Args:
        kind: kind of the codes, as the kernel calls it.
        bits: bits of a code.
        groups: for each axis, ``channel`` and ``token``, how many elements share parameters; :data:`HEAD` for all
            channels of a head.
        scales: types in which scales are stored.
        heads: channels of a head; None for all that the kernel takes with any format.
        windows: numbers of tokens that are packed at a time, if their groups may cross the ends of tiles (LogQuant's
            W = 42); 0 for groups that do not.
    """

    kind: str
    bits: tuple[int, ...]
    groups: Mapping[str, Container[int]] = field(default_factory=dict)
    scales: tuple[str, ...] = ("fp16",)
    heads: Container[int] | None = None
    windows: Container[int] = (0,)


class Rows(tuple[Reads, ...]):
    """A list of a kernel's formats, hashed by identity because every step looks up cached results for it."""

    __slots__ = ()
    __hash__ = object.__hash__


@lru_cache(maxsize=1024)
def format_refusal(
    rows: Rows, kind: str, bits: int, axis: str, group: int, channels: int, scale: str = "fp16", window: int = 0
) -> str | None:
    """Return how a format differs from those that a kernel reads, or None if one of `rows` has the format.

    The reason is a phrase that can follow "no kernel reads": ``5-bit codes``, ``groups of 48 tokens``.

    Args:
        axis: ``channel``, ``token``, or empty for tokens in full precision.
        group: number of elements that share parameters.
        channels: channels of a head.
        scale: type in which scales are stored.
        window: number of tokens that are packed at a time if their groups may cross the ends of tiles, else 0.
    """

    def grouped(sizes: Container[int]) -> bool:
        if axis == "token" and group:
            return channels % group == 0 and (group in sizes or (group == channels and HEAD in sizes))
        return group in sizes

    left = list(rows)
    for reason, fits in (
        (f"codes of the kind {kind}", lambda row: row.kind == kind),
        (f"{bits}-bit codes", lambda row: bits in row.bits),
        (f"groups per {axis}", lambda row: not axis or axis in row.groups),
        (f"windows of {window} tokens", lambda row: window in row.windows),
        (f"codes with scales in {scale or 'no type'}", lambda row: scale in row.scales),
        (
            f"groups of {group} {'channels' if axis == 'token' else 'tokens'}",
            lambda row: not axis or grouped(row.groups[axis]),
        ),
        (f"heads of {channels} channels", lambda row: row.heads is None or channels in row.heads),
    ):
        left = [row for row in left if fits(row)]
        if not left:
            return reason
    return None


def uncopied(dtype: torch.dtype) -> str | None:
    """Return why kernels cannot copy tokens of a dtype, or None if they can."""
    return None if dtype in COPIED else f"tokens in {str(dtype).removeprefix('torch.')}"


#: sizes of groups of the packing kernels for groups within tiles
_GROUPS = (8, 16, 32, 64, 128)
_BOTH = {"channel": _GROUPS, "token": _GROUPS}
#: what ``pack_kernel`` packs
TILES = Rows(
    (
        Reads("affine", (2, 3, 4, 8), _BOTH),
        Reads("atom", (2, 3, 4, 8), _BOTH),
        Reads("hierarchical", (8,), _BOTH),
    )
)
#: what ``pack_windows`` packs
WINDOWS = Rows((Reads("affine", (2, 4, 8), {"channel": range(8, 65)}, windows=range(1, 1 << 31)),))
#: what ``engine_kernel`` packs, by its rules: formats of inference engines, TurboQuant's among them
ENGINES = Rows(
    (
        Reads("int8", (8,), {"token": (HEAD,)}),
        Reads("fp8_head", (8,), {"token": (HEAD,)}),
        Reads("fp8", (8,), {"token": (HEAD,)}),
        Reads("int4", (4,), {"token": (HEAD,)}),
        Reads("q8_0", (8,), {"token": (32,)}),
        Reads("q8_0_cpu", (8,), {"token": (32,)}),
        Reads("q4_0", (4,), {"token": (32,)}),
        Reads("iq4_nl", (4,), {"token": (32,)}),
        Reads("octave", (3, 4), {"token": (64, HEAD)}),
        Reads("nvfp4", (4,), {"token": (16,)}),
        Reads("4over6", (4,), {"token": (16,)}),
        Reads("levels", (3, 4), {"token": (HEAD,)}),
        Reads("levels_write", (3, 4), {"token": (HEAD,)}),
        Reads("grid", (3, 4), {"token": (HEAD,)}),
    )
)
#: what ``clipped_kernel`` packs (OSCAR)
CLIPPED = Rows((Reads("clipped", (2,), {"token": (HEAD,)}, heads=(16, 32, 64, 128, 256)),))
#: what ``kvarn_kernel`` packs; groups are the tokens of a tile, on either axis of the rounding
BALANCED = Rows((Reads("balanced", (2, 3, 4, 8), {"channel": (64, 128)}, heads=(64, 128)),))
#: what ``nuq.cu`` packs (KVQuant)
LOOKED_UP = Rows((Reads("codebook", (2, 3, 4), {"channel": (HEAD,), "token": (HEAD,)}, heads=(16, 32, 64, 128, 256)),))
