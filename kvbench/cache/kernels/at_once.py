"""Packing of the new tokens of a captured step before they attend, by the kernel that belongs to their segments."""

from __future__ import annotations

from torch import Tensor

from kvbench.cache.kernels import engine, nuq
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.packed import PackedSegment

#: segments of the keys and of the values of a layer, for both of which one kernel packs a token
PackedAtOnce = tuple[NuqSegment, NuqSegment] | tuple[PackedSegment, PackedSegment]


def packing_refusal(segments: PackedAtOnce) -> str | None:
    """Return why no kernel can pack new tokens on the device, or None if one can."""
    keys, values = segments
    if isinstance(keys, PackedSegment) and isinstance(values, PackedSegment):
        return engine.engine_refusal(keys, values)
    assert isinstance(keys, NuqSegment) and isinstance(values, NuqSegment)
    return nuq.nuq_refusal(keys, values)


def pack_new_tokens(segments: PackedAtOnce, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Pack the key and the value of one new token per row, in one launch that can be recorded.

    The host must have made room for them (``advance`` of each segment).

    Args:
        key: keys of the new tokens as the segment stores them, ``[B, H, 1, D]``.
        value: values of the new tokens, ``[B, H, 1, Dv]``.
        places: index of the token in each segment, int32 ``[B, 2]``, read on the device; negative to store nothing.
    """
    keys, values = segments
    if isinstance(keys, PackedSegment) and isinstance(values, PackedSegment):
        engine.pack_engine_tokens(keys, values, key, value, places)
    else:
        assert isinstance(keys, NuqSegment) and isinstance(values, NuqSegment)
        nuq.pack_nuq_tokens(keys, values, key, value, places)
