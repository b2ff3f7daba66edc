"""Atom's KV quantization: per token and head, at once, nothing exact ("KV only", as Cocktail compares with it).

Source: Zhao et al., "Atom: Low-bit Quantization for Efficient and Accurate LLM Serving" (MLSys 2024), sec. 4.4, and
efeslab/Atom, model/qLlamaLayer.py. The authors quantize keys before RoPE and every token attends to quantized keys and
values, the prompt's and its own: ``rope=pre prefill=quantized``. By default keys are taken after RoPE, and the prompt
and a step's own tokens are seen exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Method, Side
from kvbench.methods.sliding import CHUNK, whole

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment


@dataclass(kw_only=True)
class Atom(Method):
    """Every token packed as soon as its own step is over; one group a token and head, clamped integer zero point.

    Args:
        rope: ``post``: keys after RoPE; ``pre``: keys before it (the authors' code), rotated as attention reads them.
        prefill: ``exact``: the prompt, and each step's own tokens, see exact keys and values; ``quantized``: every
            token sees what is stored, itself included (the authors' code).
    """

    rope: Literal["post", "pre"] = "post"
    prefill: Literal["exact", "quantized"] = "exact"

    rolls: ClassVar[bool] = True
    needs_quantizer: ClassVar[bool] = True
    by_token: ClassVar[bool] = True

    @property
    def keys_before_rope(self) -> bool:
        """As `rope` says."""
        return self.rope == "pre"

    @property
    def quantized_prefill(self) -> bool:
        """As `prefill` says."""
        return self.prefill == "quantized"

    @property
    def eager(self) -> bool:
        """As `prefill` says."""
        return self.prefill == "quantized"

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Groups must be whole heads of one token."""
        super().check(head_dim, max_length)
        assert self.quantizer is not None
        for side, spec in (("key", self.quantizer.key), ("value", self.quantizer.value)):
            if spec.axis != "token":
                raise ConfigError(f"quantizer.{side}.axis", spec.axis, "Atom groups per token", allowed=["token"])
            if spec.group_size != "head_dim" and head_dim and spec.group_size != head_dim:
                raise ConfigError(
                    f"quantizer.{side}.group_size",
                    spec.group_size,
                    "Atom has one group for each token and head",
                    allowed=["head_dim"],
                )

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Packed tokens, and room for those of the step under way."""
        from kvbench.quantizers.atom import AtomQuantizer

        assert self.quantizer is not None
        spec = self.quantizer.key if side == "key" else self.quantizer.value
        quantizer = AtomQuantizer(spec.bits, None, "token")
        return [
            self.packed(layer, side, quantizer, capacity=layer.expected_length()),
            self.full(layer, side, capacity=1, slack=0),
        ]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Everything packed."""
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            store.segments[0].append(rows, x)

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """What is hidden, :data:`~kvbench.methods.sliding.CHUNK` at a time."""
        return whole(hidden, CHUNK)

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Pack the tokens of the last step."""
        for store in layer.stores():
            store.segments[0].append(rows, store.tail.view(rows))
            store.tail.drop_front(rows, store.tail.length(rows))
