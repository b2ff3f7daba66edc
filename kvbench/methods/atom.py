"""Atom's KV quantization: every token is packed after its step, with one group per token and head.

Only keys and values are quantized, not weights and activations. The Cocktail paper compares with this variant ("KV
only").

Source: Zhao et al., "Atom: Low-bit Quantization for Efficient and Accurate LLM Serving" (MLSys 2024), sec. 4.4, and
efeslab/Atom, model/qLlamaLayer.py. The authors quantize keys before RoPE, and every token attends to quantized keys and
values, those of the prompt and its own: ``rope=pre prefill=quantized``. By default keys are quantized after RoPE,
prompt tokens attend to each other in full precision during prefill, and so do the tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import SIDES, Side
from kvbench.methods.recency import RecencyMethod

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.quantizers.affine import AffineQuantizer


@dataclass(kw_only=True)
class Atom(RecencyMethod):
    """Atom: every token is packed right after its decode step, with one group per token and head.

    A group has a scale and an integer zero point.

    Args:
        sinks: number of first tokens that stay in full precision (0 in Atom).
        window: number of newest tokens that stay in full precision (0 in Atom). With both, methods are compared at the
            same full-precision tokens.
        rope: ``post`` stores keys after RoPE. ``pre`` stores pre-RoPE keys, to which attention applies RoPE whenever it
            reads them (the authors' code).
        prefill: what tokens attend to. ``exact``: prompt tokens attend to each other in full precision, and so do the
            tokens of one decode step; all else is read from packed codes. ``quantized``: every token attends to
            quantized keys and values only, its own included (the authors' code).
    """

    sinks: int = 0
    window: int = 0
    rope: Literal["post", "pre"] = "post"
    prefill: Literal["exact", "quantized"] = "exact"

    @property
    def by_token(self) -> bool:  # type: ignore[override]
        """True without a window: whether a token is stored in full precision then depends on its position alone."""
        return self.window == 0

    def exact(self, n: int) -> int:
        """Return min(n, `window`): without a window, no token is in full precision between two decode steps."""
        return min(n, self.window)

    @property
    def keys_before_rope(self) -> bool:
        """True for ``rope=pre``: the cache holds pre-RoPE keys."""
        return self.rope == "pre"

    @property
    def quantized_prefill(self) -> bool:
        """True for ``prefill=quantized``: prompt tokens attend to quantized keys and values."""
        return self.prefill == "quantized"

    @property
    def eager(self) -> bool:
        """True for ``prefill=quantized``: a decode step packs its tokens before it computes attention."""
        return self.prefill == "quantized"

    def make_quantizer(self, side: Side, channels: int) -> AffineQuantizer:
        """Return Atom's quantizer, with one group per token and head, whatever the number of channels."""
        from kvbench.quantizers.atom import AtomQuantizer

        return AtomQuantizer(self.formats()[SIDES.index(side)].bits, None, "token")

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment with room for the window and the token of one decode step."""
        return self.full(layer, side, capacity=self.window + 16 if self.window else 1, slack=16 if self.window else 0)

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a group is not a whole head, or if :meth:`RecencyMethod.check` fails."""
        if self.window < 0:
            raise ConfigError("method.window", self.window, "must not be negative", allowed="0 or greater, such as 256")
        if self.window and self.prefill == "quantized":
            raise ConfigError(
                "method.window",
                self.window,
                "needs method.prefill=exact: with prefill=quantized every token is packed before its own step",
                hint="method.prefill=exact",
            )
        super().check(head_dim, max_length)
        for side, spec in zip(SIDES, self.formats(), strict=True):
            if spec.group_size != "head_dim" and head_dim and spec.group_size != head_dim:
                raise ConfigError(
                    f"quantizer.{side}.group_size",
                    spec.group_size,
                    "must be head_dim, because Atom has one group per token and head",
                    allowed=["head_dim"],
                )

    def check_rule(self) -> None:
        """Raise ConfigError if keys or values are grouped per channel, or if :meth:`RecencyMethod.check_rule` fails."""
        for side, spec in zip(SIDES, self.formats(), strict=True):
            if spec.axis != "token":
                raise ConfigError(
                    f"quantizer.{side}.axis",
                    spec.axis,
                    "must be token, because Atom's groups are per token",
                    allowed=["token"],
                )
        super().check_rule()
