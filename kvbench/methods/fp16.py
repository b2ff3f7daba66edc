"""fp16: the baseline in full precision, which reproduces stock transformers exactly."""

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
    """fp16: the baseline, which keeps every key and value in the model's dtype (fp16, bf16 or fp32).

    On a layer with a sliding window it keeps the newest ``window - 1`` tokens, as stock transformers does.
    """

    @property
    def holds_codes(self) -> bool:
        """False: all tokens are in full precision."""
        return False

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one full-precision segment, allocated for the expected length."""
        return [self.full(layer, side, capacity=layer.expected_length())]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store all tokens unchanged."""
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            store.tail.append(rows, x)

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return `hidden`: without groups each token can be dropped by itself."""
        return hidden

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of all tokens that a later token can see, in full precision."""
        return at.both(at.tokens - at.hidden)
