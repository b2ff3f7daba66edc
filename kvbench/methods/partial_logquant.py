"""PartialLogQuant: keys are quantized by LogQuant's rule, values by age.

Source: LogQuant (see :mod:`kvbench.methods.logquant`), sec. 3.3, and PartialLogQuantizedCache of its released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Reach
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.leaving import demoted_by
from kvbench.methods.logquant import LogQuant, flushes
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
else:
    torch = lazy("torch")


@lru_cache(maxsize=16)
def thinned(W: int, device: torch.device) -> torch.Tensor:
    """Return the new order of 2 W packed values when a flush quantizes the keys of half of these tokens.

    The flush quantizes the keys with odd indices. The values of these keys come first in the new order, then the values
    of the keys that stay in full precision. Slot i of both stores thus remains the same token.

    Returns:
        For each place in the new order, the index that its value had in the old one, int64 ``[2 W]``.
    """
    with torch.inference_mode(False):
        return torch.tensor([*range(1, 2 * W, 2), *range(0, 2 * W, 2)], device=device)


@dataclass(kw_only=True)
class PartialLogQuant(LogQuant):
    """PartialLogQuant: keys are quantized by LogQuant's rule, values by age; only the newest stay in full precision.

    Hyper-parameters not listed here are those of :class:`~kvbench.methods.logquant.LogQuant`; `evict` must be False.

    Args:
        value_window: which values are in full precision after n tokens. ``recent``: the newest W (the paper);
            ``released``: the newest n mod W (the authors' code).
        reserved: used only if `window` is None: W is then ``reserved // 2``, as in the authors' scripts, not
            ``reserved // 3``.
    """

    value_window: Literal["recent", "released"] = "recent"

    @property
    def W(self) -> int:
        """The window W in tokens: `window`, or half of `reserved` if `window` is None."""
        return self.window if self.window is not None else self.reserved // 2

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `evict` is set, values are not grouped per token, or :meth:`LogQuant.check` fails."""
        if self.evict:
            raise ConfigError(
                "method.evict",
                True,
                "is not possible, because keys and values are quantized at different times",
                allowed=["false"],
            )
        super().check(head_dim, max_length)
        if self.quantizer and self.quantizer.value.axis != "token":
            raise ConfigError(
                "quantizer.value.axis",
                self.quantizer.value.axis,
                "must be token, because values are reordered together with the keys",
                allowed=["token"],
            )

    def reach(self) -> Reach:
        """Return the largest number of tokens that are all kept exactly: sinks + W, or one less for ``released``."""
        key, value = ("reserved", self.reserved) if self.window is None else ("window", self.window)
        return Reach(f"method.{key}", value, self.sinks + self.W - (self.value_window == "released"))

    def exact_values(self, n: int) -> int:
        """Return how many of the newest values are in full precision after `n` tokens, without the sinks."""
        return min(n, self.W) if self.value_window == "recent" else n % self.W

    def packed_counts(self, demoted: int, n: int, skip: int) -> tuple[int, int]:
        """Return how many keys and how many values of a prompt are quantized; see :meth:`LogQuant.packed_counts`.

        All values except for the newest are quantized. Both stores have the same order of tokens.
        """
        return demoted, n - skip - self.exact_values(n)

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Quantize the values that have become too old, then carry out the flushes of keys that are due.

        A flush quantizes every second key of a block, so quantized keys are not in the order of the text. The packed
        values are then brought into the same order, because slot i of both stores must belong to the same token.
        """
        if self.whole_window(layer.window):
            return
        keys, values = layer.stores()
        for store in (keys, values):
            if self.sinks:
                store.fill_sinks(rows, self.sinks, layer.real_tokens(rows.indices(layer.batch)[0]))
        sinks = keys.segments[0].length(rows) if self.sinks else 0
        excess = values.tail.length(rows) - self.exact_values(keys.length(rows) - sinks)
        if excess > 0:
            values.packed.append(rows, values.tail.view(rows)[:, :, :excess])
            values.tail.drop_front(rows, excess)
        W, tail = self.W, keys.tail
        while tail.length(rows) >= 3 * W:
            # at least the newest W keys are exact here, and no more values: these 2 W values are packed
            values.packed.permute(rows, keys.packed.length(rows), thinned(W, layer.device))
            keys.packed.append(rows, tail.view(rows)[:, :, 1 : 2 * W : 2])
            keys.packed.thin(tail, rows, W)

    def demotions(self, layer: KVLayer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return after how many tokens each key and each value is quantized."""
        keys, values = super().demotions(layer, count)
        if self.whole_window(layer.window):
            return keys, values
        rest = [max(n - self.sinks, 0) for n in range(count + 1)]
        return keys, demoted_by([n - self.exact_values(n) for n in rest], count, self.sinks)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of keys and values, which differ in how many of them are in full precision."""
        if self.whole_window(at.window):
            return at.both(at.tokens - at.hidden)
        assert self.quantizer is not None
        sinks = min(self.sinks, at.tokens)
        n = at.tokens - sinks
        demoted, exact, gone = flushes(n, self.W) * self.W, self.exact_values(n), self.passed(at.hidden)
        total = at.exact(sinks + n - demoted) + at.exact(sinks + exact)
        total += at.packed(n - exact - gone, self.quantizer.value)
        return total + self.demoted_bytes(self.key_format(), demoted - gone, at)
