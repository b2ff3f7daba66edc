"""vLLM's formats with one scale per token and head, and its fp8 with one scale per tensor.

Source: vllm-project/vllm 0.33.0, ``triton_reshape_and_cache_flash.py`` and ``int4_per_token_head.py`` (Apache-2.0).
``absmax``, ``min`` and ``max`` are those of a token's channels in one head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.quantizers.engine.base import TokenQuantizer, half_away, quotient
from kvbench.quantizers.engine.floats import E4M3_MAX, from_e4m3, to_e4m3

#: smallest scale
LEAST = 1e-6


class Int8PerTokenHead(TokenQuantizer):
    """vLLM's ``int8_per_token_head``: symmetric 8-bit codes with one fp32 scale per token and head.

    ::

        s  = max(absmax / 127, 1e-6)
        q  = clamp(round_half_away(x * (1 / s)), -128, 127)
        x^ = q * s

    The stored code is ``q + 128``. Bytes per token and head: ``D + 4``.
    """

    kind = "offset"
    bits = 8
    stored = (torch.float32,)

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        scale = quotient(x.abs().amax(-1), 127).clamp(min=LEAST)
        codes = half_away(x * (1 / scale)[..., None]).clamp(-128, 127)
        return codes + 128, (scale,)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``(code - 128) * s``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return (codes - 128).float().mul_(params[0].float()[..., None])


class Fp8PerTokenHead(TokenQuantizer):
    """vLLM's ``fp8_per_token_head``: e4m3 numbers with one fp32 scale per token and head.

    ::

        s  = max(absmax / 448, 1e-6)
        x^ = e4m3(x * (1 / s)) * s

    A code is the byte of the e4m3 number. Bytes per token and head: ``D + 4``.
    """

    kind = "float"
    bits = 8
    stored = (torch.float32,)

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        scale = quotient(x.abs().amax(-1), E4M3_MAX).clamp(min=LEAST)
        return to_e4m3(x * (1 / scale)[..., None]), (scale,)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``e4m3(code) * s``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return from_e4m3(codes).mul_(params[0].float()[..., None])


class Fp8(TokenQuantizer):
    """vLLM's ``fp8`` (``fp8_e4m3``): e4m3 numbers with one scale per tensor, 1 unless it is calibrated.

    ::

        x^ = e4m3(x / scale) * scale

    A code is the byte of the e4m3 number. Bytes per token and head: ``D``.

    Args:
        scale: scale of all keys, or of all values, of a layer.
    """

    kind = "float"
    bits = 8

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = self.factor = scale

    def __repr__(self) -> str:
        return f"Fp8(scale={self.scale})"

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        return to_e4m3(x if self.scale == 1.0 else quotient(x, self.scale)), ()

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``e4m3(code) * scale``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return from_e4m3(codes).mul_(self.scale)


class Int4PerTokenHead(TokenQuantizer):
    """vLLM's ``int4_per_token_head``: asymmetric 4-bit codes whose zero point is hidden in the fp32 scale.

    The engine rotates keys and values first (``rht_unnormalised``). Then::

        s  = max((max - min) / 15, 1e-6)
        z  = clamp(round_half_away(-min / s), 0, 15)
        q  = clamp(round_half_away(x * (1 / s) + z), 0, 15)
        s' = s with its 4 low mantissa bits cleared;   x^ = (q - z) * s'

    Stored are q, and s with z in place of its 4 low mantissa bits. As z cannot leave 0 to 15, a group that does not
    straddle 0 saturates. Bytes per token and head: ``D / 2 + 4``.
    """

    kind = "folded"
    bits = 4
    stored = (torch.float32,)

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and folded scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        low, high = torch.aminmax(x, dim=-1)
        scale = quotient(high - low, 15).clamp(min=LEAST)
        zero = half_away(-low / scale).clamp(0, 15)
        codes = half_away(x * (1 / scale)[..., None] + zero[..., None]).clamp(0, 15)
        return codes, (fold_zero_point(scale, zero.to(torch.int32)),)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``(code - z) * s'``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        scale, zero = unfold(params[0].float())
        return codes.float().sub_(zero[..., None]).mul_(scale[..., None])


def fold_zero_point(scale: Tensor, zero: Tensor) -> Tensor:
    """Replace the 4 low mantissa bits of each fp32 scale by a zero point from 0 to 15, int32 in the same shape."""
    return ((scale.contiguous().view(torch.int32) & -16) | zero).view(torch.float32)


def unfold(folded: Tensor) -> tuple[Tensor, Tensor]:
    """Undo :func:`fold_zero_point`: return scales without their 4 low mantissa bits, and zero points (int32)."""
    bits = folded.contiguous().view(torch.int32)
    return (bits & -16).view(torch.float32), bits & 15
