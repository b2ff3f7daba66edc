"""Base of methods that pack every token by itself, behind optional sinks and an optional window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Side
from kvbench.methods.recency import RecencyMethod
from kvbench.quantizers.spec import FormatSpec

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment


@dataclass(frozen=True, kw_only=True)
class StoredFormat(FormatSpec):
    """The format of keys or of values, which says which of the two it is."""

    side: Side = "key"


@dataclass(kw_only=True)
class TokenMethod(RecencyMethod):
    """Base of methods in formats of their own that pack every token by itself.

    Args:
        sinks: number of first tokens that stay in full precision.
        window: number of newest tokens that stay in full precision.
        prefill: ``exact``: prompt tokens attend to full-precision keys and values; ``quantized``: to stored ones.
        own: ``stored``: the token of a decode step is packed before it attends; ``exact``: it attends to its own key
            and value in full precision.
    """

    sinks: int = 0
    window: int = 0
    prefill: Literal["exact", "quantized"] = "exact"
    own: Literal["stored", "exact"] = "stored"

    needs_quantizer: ClassVar[bool] = False

    @property
    def by_token(self) -> bool:  # type: ignore[override]
        """True without a window: whether a token is packed then depends on its position alone."""
        return self.window == 0

    @property
    def quantized_prefill(self) -> bool:
        """True for ``prefill=quantized``: prompt tokens attend to quantized keys and values."""
        return self.prefill == "quantized"

    @property
    def eager(self) -> bool:
        """True for ``own=stored`` without a window: a decode step packs its tokens before it computes attention."""
        return self.own == "stored" and self.window == 0

    def exact(self, n: int) -> int:
        """Return min(n, `window`): without a window, no token is in full precision between two decode steps."""
        return min(n, self.window)

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment with room for the window and the token of one decode step."""
        if not self._packs(layer):
            return super().exact_segment(layer, side)
        return self.full(layer, side, capacity=self.window + 16 if self.window else 1, slack=16 if self.window else 0)

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if sinks or window are negative, or if the window needs another prefill."""
        for name in ("sinks", "window"):
            if getattr(self, name) < 0:
                raise ConfigError(f"method.{name}", getattr(self, name), "must not be negative", allowed="0 or greater")
        if self.window and self.prefill == "quantized":
            raise ConfigError(
                "method.window",
                self.window,
                "needs method.prefill=exact: with prefill=quantized every token is packed before its own step",
                hint="method.prefill=exact",
            )
        super().check(head_dim, max_length)
