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
from kvbench.methods.tokenwise import TokenMethod

if TYPE_CHECKING:
    from kvbench.quantizers.affine import AffineQuantizer


@dataclass(kw_only=True)
class Atom(TokenMethod):
    """Atom: every token is packed right after its decode step, with one group per token and head.

    A group has a scale and an integer zero point.

    Args:
        sinks: number of first tokens that stay in full precision (0 in Atom).
        window: number of newest tokens that stay in full precision (0 in Atom). Equal `sinks` and `window` make
            different methods keep the same tokens in full precision, for comparisons.
        rope: ``post`` stores keys after RoPE. ``pre`` stores pre-RoPE keys, to which attention applies RoPE whenever it
            reads them (the authors' code).
        prefill: what tokens attend to. ``exact``: prompt tokens attend to each other in full precision, and so do the
            tokens of one decode step; all else is read from packed codes. ``quantized``: every token attends to
            quantized keys and values only, its own included (the authors' code).
    """

    rope: Literal["post", "pre"] = "post"

    @property
    def keys_before_rope(self) -> bool:
        """True for ``rope=pre``: the cache stores pre-RoPE keys."""
        return self.rope == "pre"

    def make_quantizer(self, side: Side, channels: int) -> AffineQuantizer:
        """Return Atom's quantizer, with one group per token and head, whatever the number of channels."""
        from kvbench.quantizers.atom import AtomQuantizer

        return AtomQuantizer(self.formats()[SIDES.index(side)].bits, None, "token")

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a group is not a whole head, or if :meth:`TokenMethod.check` fails."""
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
