"""Empty stores and segments, as methods create them for a layer. Imports torch on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.methods.rules import Rules, Side
from kvbench.quantizers.spec import FormatSpec

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.cache.store import Store
    from kvbench.quantizers.affine import AffineQuantizer


class Stores(Rules):
    """A method's stores: a list of the segments that the method defines, and the two kinds that most methods use."""

    def make_store(self, layer: KVLayer, side: Side) -> Store:
        """Return an empty store for the keys or the values of `layer`."""
        from kvbench.cache.store import Store

        return Store(self.segments(layer, side))

    def full(self, layer: KVLayer, side: Side, capacity: int = 0, slack: int = 64) -> Segment:
        """Return an empty full-precision segment for the keys or the values of `layer`.

        Args:
            capacity: number of tokens for which to allocate now.
            slack: number of tokens that are allocated in excess whenever the buffer has to grow.
        """
        from kvbench.cache.segments.base import FullSegment

        shape = (layer.batch, layer.heads, layer.key_dim if side == "key" else layer.value_dim)
        return FullSegment(*shape, layer.dtype, layer.device, capacity=capacity, slack=slack)

    def packed(
        self,
        layer: KVLayer,
        side: Side,
        quantizer: AffineQuantizer,
        capacity: int = 0,
        *,
        whole_tiles: bool = False,
    ) -> Segment:
        """Return an empty packed segment for the keys or the values of `layer`.

        Args:
            capacity: number of tokens for which to allocate now.
            whole_tiles: how to count the bytes of the last tile (128 tokens) if it is incomplete. True: as those of a
                whole tile, for segments so short that its unused part matters. False: only those of its tokens.
        """
        from kvbench.cache.segments.packed import PackedSegment

        shape = (layer.batch, layer.heads, layer.key_dim if side == "key" else layer.value_dim)
        return PackedSegment(
            *shape,
            layer.dtype,
            layer.device,
            quantizer=quantizer,
            side=side,
            capacity=capacity,
            whole_tiles=whole_tiles,
        )


def affine(spec: FormatSpec, channels: int | None = None) -> AffineQuantizer:
    """Return the quantizer that encodes and decodes a packed format.

    For ``kind=affine`` it is asymmetric, with a floating-point minimum per group (KIVI). For ``kind=hierarchical`` each
    code consists of two nibbles (QuantSpec).

    Args:
        channels: channels per head. If the format comes from a preset and its group size does not divide this number, a
            smaller group size is used. None: the group size stays as it is.
    """
    from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer

    group = None if spec.group_size == "head_dim" else int(spec.group_size)
    if group is not None and channels is not None and spec.axis == "token":
        group = spec.channels_per_group(channels)
    if spec.kind == "hierarchical":
        return HierarchicalQuantizer(group, spec.axis)
    return AffineQuantizer(spec.bits, group, spec.axis)
