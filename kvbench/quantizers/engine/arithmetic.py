"""Rounding inside the attention of inference engines: of queries, of probabilities, and of what is read.

Sources, files and versions are in docs/formats.md ("Arithmetic of attention"). Products and sums are computed in fp32
here; what an engine rounds before them is rounded in the same way, bit for bit where the rounding does not depend on
the order of its sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.quantizers.engine.base import from_e4m3, quotient, to_e4m3
from kvbench.quantizers.engine.formats import EngineFormat
from kvbench.quantizers.engine.llamacpp import BLOCK, Q8_0, round_away

#: values of ``method.attention`` besides ``exact``
Attention = Literal["engine", "engine_cuda"]
#: factor of probabilities before they are rounded to e4m3: FlashAttention 3 subtracts 8 from the base-2 exponent's top
E4M3_FACTOR = 256.0
#: queries up to which llama.cpp's CUDA back end reads codes; more are served by tensor cores, from an fp16 copy
VECTOR_QUERIES = 2


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """The rounding of one engine's attention over one format of keys.

    Args:
        query: format to which queries are rounded; None: not rounded.
        scaled: queries are multiplied by the scaling factor of attention before they are rounded, not after.
        minimum: factor of the minimum of a block of keys. ``rounded``: the sum of the rounded queries; ``fp16``: the
            sum of the codes times their scale, in fp16; ``exact``: the sum of the queries before rounding.
        weights: format to which probabilities are rounded before they multiply values, but not in their sum.
        stored: dtype to which dequantized keys and values are rounded.
        scale: factor of queries in ``e4m3``; one number, or one for each KV head, fp32 ``[H]``.
    """

    query: Literal["q8", "q8_cuda", "e4m3", "fp16"] | None = None
    scaled: bool = False
    minimum: Literal["rounded", "fp16", "exact"] = "rounded"
    weights: Literal["e4m3", "fp16", "bf16"] | None = None
    stored: torch.dtype = torch.float32
    scale: float | Tensor = field(default=1.0, repr=False)

    @property
    def by_query(self) -> bool:
        """True if only queries are rounded, and before they are scaled, so that any kernel may read the rest."""
        return not self.scaled and self.minimum == "rounded" and self.weights is None and self.stored == torch.float32

    @property
    def rounds(self) -> str:
        """The names of what is rounded in a way that needs the reference path."""
        parts = {
            "scaled queries": self.scaled,
            "sums of queries": self.minimum != "rounded",
            "probabilities": self.weights is not None,
            "dequantized keys and values": self.stored != torch.float32,
        }
        return " and ".join(name for name, there in parts.items() if there)

    def rounded(self, query: Tensor) -> Tensor:
        """Return queries ``[B, Hq, q, D]`` as the engine rounds them, in fp32."""
        x = query.float()
        if self.query == "e4m3":
            scale = self.scale
            if isinstance(scale, Tensor):  # the query heads of a KV head are adjacent
                scale = scale.to(x.device).repeat_interleave(x.shape[1] // len(scale))[:, None, None]
            return from_e4m3(to_e4m3(x / scale)) * scale
        if self.query == "fp16":
            return x.half().float()
        if self.query is None:
            return x
        blocks = x.unflatten(-1, (-1, BLOCK))
        if self.query == "q8":
            quantizer = Q8_0(even=True)
            codes, params = quantizer.encode_blocks(blocks)
            return quantizer.decode_blocks(codes, params).flatten(-2)
        step = quotient(blocks.abs().amax(-1, keepdim=True), 127)  # in fp32, also where it is used
        return torch.where(step == 0, 0.0, round_away(blocks / step) * step).flatten(-2)

    def sums(self, query: Tensor, rounded: Tensor) -> Tensor | None:
        """Return what a query's rounded sums lack, by which minima of key blocks are multiplied in addition.

        Args:
            query: queries before rounding, ``[..., D]``.
            rounded: the same queries after it.

        Returns:
            fp32 ``[..., D / 32]``; None if the minima are multiplied by the sums of the rounded queries.
        """
        if self.minimum == "rounded":
            return None
        blocks = query.float().unflatten(-1, (-1, BLOCK))
        total = rounded.unflatten(-1, (-1, BLOCK)).sum(-1)
        if self.minimum == "exact":
            return blocks.sum(-1) - total
        codes, _ = Q8_0(even=True).encode_blocks(blocks)
        # the scale of the sum is not rounded to fp16 before it, unlike that of the codes
        return ((codes - 128).sum(-1) * quotient(blocks.abs().amax(-1), 127)).half().float() - total

    def weighed(self, weights: Tensor) -> Tensor:
        """Return probabilities, relative to a row's largest so far, as they multiply values; fp32."""
        if self.weights == "e4m3":
            return from_e4m3(to_e4m3(weights * E4M3_FACTOR)) / E4M3_FACTOR
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, None: torch.float32}[self.weights]
        return weights.to(dtype).float()


def arithmetic_of(form: EngineFormat, attention: Attention, count: int = 1, scale: float | Tensor = 1.0) -> Arithmetic:
    """Return the rounding of the attention that an engine computes over keys in its format.

    Args:
        attention: ``engine``, or ``engine_cuda`` for llama.cpp's CUDA back end instead of its CPU back end.
        count: number of queries in one pass, on which llama.cpp's CUDA back end chooses its kernel.
        scale: scale of queries in fp8.

    Raises:
        ConfigError: it is not known how an engine computes with this format.
    """
    if reason := form.unknown(attention):
        raise ConfigError("method.attention", attention, reason, hint="method.attention=exact")
    if attention == "engine_cuda":
        if count > VECTOR_QUERIES:
            return Arithmetic("fp16", scaled=True, weights="fp16", stored=torch.float16)
        return Arithmetic("q8_cuda", scaled=True, minimum="rounded" if form.name.startswith("q8_0") else "exact")
    return replace(ARITHMETICS[form.name], scale=scale)


#: arithmetic by format of the keys; llama.cpp's on CPUs
ARITHMETICS = {
    **dict.fromkeys(("q8_0", "q8_0_cpu", "q5_0", "q4_0", "iq4_nl"), Arithmetic("q8")),
    **dict.fromkeys(("q5_1", "q4_1"), Arithmetic("q8", minimum="fp16")),
    "fp8": Arithmetic("e4m3", weights="e4m3"),
    "ultraquant_4bit": Arithmetic("e4m3", weights="bf16"),
}
