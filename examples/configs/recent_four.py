"""Four sinks and the newest tokens exact, all between them in 4 bits per token: a method outside the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods.base import Method, affine


@dataclass(kw_only=True)
class RecentFour(Method):
    """Pack every token that is neither a sink nor among the newest.

    Args:
        sinks: first tokens kept exact.
        residual: newest tokens kept exact.
    """

    needs_quantizer: ClassVar[bool] = True
    sinks: int = 4
    residual: int = 32

    def segments(self, layer, side):
        """Sinks, packed tokens, window."""
        spec = self.quantizer.key if side == "key" else self.quantizer.value
        return [self.full(layer, side), self.packed(layer, side, affine(spec, 0)), self.full(layer, side)]

    def place(self, layer, rows, keys, values, scores):
        """Split the prompt in three."""
        count = keys.shape[2]
        first = min(self.sinks, count)
        border = max(count - self.residual, first)
        for store, tokens in zip(layer.stores(), (keys, values), strict=True):
            store.segments[0].append(rows, tokens[:, :, :first])
            store.packed.append(rows, tokens[:, :, first:border])
            store.tail.append(rows, tokens[:, :, border:])

    def settle(self, layer, rows):
        """Pack what has left the window."""
        for store in layer.stores():
            store.fill_sinks(rows, self.sinks, layer.length(rows))
            excess = store.tail.length(rows) - self.residual
            if excess > 0:
                store.packed.append(rows, store.tail.view(rows)[:, :, :excess])
                store.tail.drop_front(rows, excess)
