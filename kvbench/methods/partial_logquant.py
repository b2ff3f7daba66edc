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
from kvbench.methods.logquant import LogQuant, flushes, placed, remaining
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
else:
    torch = lazy("torch")


@lru_cache(maxsize=16)
def thinned(W: int, device: torch.device) -> torch.Tensor:
    """Return the order into which a block of 2 W packed values is brought when LogQuant's rule quantizes their keys.

    The rule quantizes the keys with odd indices in the block, so their values come first. The values of the other keys,
    which stay in full precision, follow. This keeps slot i of both stores the same token.

    Args:
        W: the method's window, in tokens.
        device: device of the result.

    Returns:
        Indices in the block, int64 ``[2 W]``.
    """
    with torch.inference_mode(False):
        return torch.tensor([*range(1, 2 * W, 2), *range(0, 2 * W, 2)], device=device)


@dataclass(kw_only=True)
class PartialLogQuant(LogQuant):
    """PartialLogQuant: keys follow LogQuant's rule, while only the newest values stay in full precision.

    The other hyper-parameters are those of :class:`~kvbench.methods.logquant.LogQuant`; `evict` must be False.

    Args:
        value_window: values in full precision after n tokens. ``recent``: the newest W (the paper); ``released``: the
            newest n mod W (the authors' code).
        reserved: R. If `window` is None, W is ``reserved // 2``, as in the authors' scripts, not ``reserved // 3``.
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
        """Return the number of tokens up to which none is quantized: the sinks and the window of values."""
        key, value = ("reserved", self.reserved) if self.window is None else ("window", self.window)
        return Reach(f"method.{key}", value, self.sinks + self.W - (self.value_window == "released"))

    def exact_values(self, n: int) -> int:
        """Return the number of values in full precision after `n` tokens; neither number counts the sinks."""
        return min(n, self.W) if self.value_window == "recent" else n % self.W

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store keys as LogQuant does, and values in the same order of tokens, all packed apart from the newest."""
        sinks = min(self.sinks, keys.shape[2])
        n = keys.shape[2] - sinks
        if self.whole_window(layer.window):
            for store, x in zip(layer.stores(), (keys, values), strict=True):
                store.tail.append(rows, x)
            return
        skip = self.passed(layer.hidden(rows.indices(layer.batch)[0]))
        demoted, exact = placed(keys.shape[2], self.W, sinks, keys.device, skip)
        order = torch.cat([demoted, exact])
        borders = (len(demoted), n - skip - self.exact_values(n))
        for store, x, border in zip(layer.stores(), (keys, values), borders, strict=True):
            if self.sinks:
                store.segments[0].append(rows, x[:, :, :sinks])
            store.packed.append_chosen(rows, x, order[:border])
            store.tail.append_chosen(rows, x, order[border:])

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Quantize the values that have left their window; then quantize keys whenever LogQuant's rule calls for it.

        The rule quantizes every second key of a block, so packed keys are not in the order of the text. Packed values
        are then put into the same order, because slot i of both stores must belong to the same token.
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
            tail.keep(rows, remaining(W, tail.length(rows), layer.device))

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of keys, by LogQuant's rule, and of values, of which the newest are not packed."""
        if self.whole_window(at.window):
            return at.both(at.tokens - at.hidden)
        assert self.quantizer is not None
        sinks = min(self.sinks, at.tokens)
        n = at.tokens - sinks
        demoted, exact, gone = flushes(n, self.W) * self.W, self.exact_values(n), self.passed(at.hidden)
        total = at.exact(sinks + n - demoted) + at.exact(sinks + exact)
        total += at.packed(n - exact - gone, self.quantizer.value)
        return total + self.demoted_bytes(self.key_format(), demoted - gone, at)
