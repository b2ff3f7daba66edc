"""fp16: every token stays in full precision. The baseline; reproduces stock transformers exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.methods.base import Method, Side
from kvbench.methods.byte_parts import KVBytes, Setting

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment


@dataclass(kw_only=True)
class FP16(Method):
    """One full-precision segment for keys and one for values, in the model's dtype (fp16, bf16 or fp32).

    A layer with a sliding window holds what stock transformers does: the newest ``window - 1`` tokens.
    """

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one growing buffer, allocated for the expected length at once."""
        return [self.full(layer, side, capacity=layer.expected_length())]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store all tokens as they are."""
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            store.tail.append(rows, x)

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return all hidden tokens."""
        return hidden

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Return the bytes of what is seen."""
        return at.both(at.tokens - at.hidden)
