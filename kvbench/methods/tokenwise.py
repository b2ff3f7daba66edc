"""Base of methods that pack every token by itself, behind optional sinks and an optional window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Side
from kvbench.methods.recency import RecencyMethod
from kvbench.quantizers.spec import FormatSpec
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.models.spec import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StoredFormat(FormatSpec):
    """The packed format of one side, keys or values, which `side` names."""

    side: Side = "key"


@dataclass(kw_only=True)
class TokenMethod(RecencyMethod):
    """Base of methods that pack every token by itself.

    Args:
        sinks: number of first tokens that stay in full precision.
        window: number of newest tokens that stay in full precision.
        prefill: what prompt tokens attend to. ``exact``: each other in full precision; ``quantized``: the stored,
            packed tokens.
    """

    sinks: int = bounded(0, minimum=0)
    window: int = bounded(0, minimum=0)
    prefill: Literal["exact", "quantized"] = "exact"

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
        """True for ``prefill=quantized``: a decode step packs its tokens before it computes attention."""
        return self.prefill == "quantized"

    def exact(self, n: int) -> int:
        """Return min(n, `window`): without a window, no token is in full precision between two decode steps."""
        return min(n, self.window)

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment with room for the window and the token of one decode step."""
        if not self._packs(layer):
            return super().exact_segment(layer, side)
        return self.full(layer, side, capacity=self.window + 16 if self.window else 1, slack=16 if self.window else 0)

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError for a window with ``prefill=quantized``, or if :meth:`RecencyMethod.check` fails."""
        super().check(head_dim, max_length)
        if self.window and self.prefill == "quantized":
            raise ConfigError(
                "method.window",
                self.window,
                "needs method.prefill=exact: with prefill=quantized every token is packed before its own step",
                hint="method.prefill=exact",
            )


@dataclass(kw_only=True)
class FormatMethod(TokenMethod):
    """Base of methods that pack every token by itself, in a format of their own.

    Args:
        own: ``stored``: the token of a decode step is packed before it attends; ``exact``: it attends to its own key
            and value in full precision.
    """

    own: Literal["stored", "exact"] = "stored"

    needs_quantizer: ClassVar[bool] = False

    @property
    def eager(self) -> bool:
        """True for ``own=stored`` without a window: a decode step packs its tokens before it computes attention."""
        return self.own == "stored" and self.window == 0

    def prepare(self, model: ModelConfig) -> None:
        """Read the numbers on which the formats depend from the model's configuration (:meth:`suit`)."""
        self.suit(model.dimensions())

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Call :meth:`suit` for the model, then return an empty cache; see :meth:`Method.new_cache`."""
        self.suit(model.config.get_text_config(decoder=True).to_dict())
        return super().new_cache(model, prompts, max_length)
