"""vLLM's formats with one scale per token and head, its fp8 with one scale per tensor, and NVFP4.

NVFP4 has e2m1 codes in blocks of 16 channels, each block with an e4m3 scale, and one fp32 factor for the whole tensor.

Sources: vllm-project/vllm 0.33.0, ``triton_reshape_and_cache_flash.py`` and ``int4_per_token_head.py`` (Apache-2.0).
``absmax``, ``min`` and ``max`` are those of a token's channels in one head.

NVFP4: vllm-project/vllm, ``nvfp4_kv_cache_kernels.cu`` (c46deb95), and for 4over6 vLLM's pull request 45187 and
flashinfer-ai/flashinfer, ``quantization_utils.cuh`` (fb28d724) with mean squared errors; all Apache-2.0. Their kernels
use an approximate reciprocal, so a few of their scale bytes may differ by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.quantizers.engine.base import (
    E4M3_MAX,
    TokenQuantizer,
    from_e2m1,
    from_e4m3,
    half_away,
    quotient,
    to_e2m1,
    to_e4m3,
)

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
        scale: scale of all keys, or of all values, of a layer; or one for each of its KV heads, fp32 ``[H]``, which no
            kernel reads.
    """

    kind = "float"
    bits = 8

    def __init__(self, scale: float | Tensor = 1.0) -> None:
        super().__init__()
        self.scale = scale
        if isinstance(scale, Tensor):
            self.kind = "engine"
        else:
            self.factor = scale

    def _scales(self, like: Tensor) -> Tensor:
        """Return the scales for blocks ``[..., H, T, groups, group]`` as a tensor that fits them."""
        if isinstance(self.scale, Tensor):
            return self.scale.to(like.device)[:, None, None, None]
        return torch.full((), self.scale, dtype=torch.float32, device=like.device)

    def __repr__(self) -> str:
        return f"Fp8(scale={self.scale})"

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        return to_e4m3(x / self._scales(x)), ()

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``e4m3(code) * scale``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return from_e4m3(codes).mul_(self._scales(codes))


class Int4PerTokenHead(TokenQuantizer):
    """vLLM's ``int4_per_token_head``: asymmetric 4-bit codes whose zero point is hidden in the fp32 scale.

    The engine rotates keys and values first (``rht_unnormalised``). Then::

        s  = max((max - min) / 15, 1e-6)
        z  = clamp(round_half_away(-min / s), 0, 15)
        q  = clamp(round_half_away(x * (1 / s) + z), 0, 15)
        s' = s with its 4 low mantissa bits cleared;   x^ = (q - z) * s'

    The cache stores q, and s with z in place of its 4 low mantissa bits. As z is limited to 0 to 15, a group that does
    not straddle 0 saturates. Bytes per token and head: ``D / 2 + 4``.
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


#: channels per block
BLOCK = 16


class NVFP4(TokenQuantizer):
    """NVFP4 in caches of vLLM, SGLang and TensorRT-LLM.

    With a factor g for all keys, or all values, of a layer (1 unless it is calibrated)::

        s  = e4m3(absmax * (1 / 6) / g)
        q  = e2m1(x / (s * g)), ties to the even code
        x^ = e2m1(q) * s * g

    With g = 1, blocks with elements above 2688 saturate, and blocks whose scale is rounded to 0 are stored as zeros.
    Bytes per token and head: ``D / 2 + D / 16`` (4.5 bits per element).

    Args:
        factor: g.
        four: True for ``4over6``: a second candidate scale maps the largest element to 4 instead of 6. It is used in
            the blocks where its squared error is strictly smaller.
    """

    kind = "float"
    bits = 4
    group_size = BLOCK
    stored = (torch.uint8,)

    def __init__(self, factor: float = 1.0, *, four: bool = False) -> None:
        super().__init__()
        self.factor, self.four = factor, four

    def __repr__(self) -> str:
        return f"NVFP4(factor={self.factor}, four={self.four})"

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        factor = torch.full((), self.factor, dtype=torch.float32, device=x.device)
        sixth = torch.full((), 1 / 6, dtype=torch.float32, device=x.device)
        wanted = x.abs().amax(-1) * sixth / factor
        scale, codes = to_e4m3(wanted), None
        codes = self._codes(x, scale, factor)
        if self.four:
            other = to_e4m3(wanted * 1.5)
            rival = self._codes(x, other, factor)
            better = self._error(x, rival, other) < self._error(x, codes, scale)
            scale, codes = torch.where(better, other, scale), torch.where(better[..., None], rival, codes)
        return codes, (scale,)

    def _codes(self, x: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
        """Return the codes of blocks with given scale bytes; 0 where the scale is 0."""
        step = (from_e4m3(scale) * factor)[..., None]
        return torch.where(step == 0, 0, to_e2m1(x * (1 / step), "even"))

    def _error(self, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the squared error of each block, added up from its first to its last element."""
        square = (x - self.decode_blocks(codes, (scale,))).square()
        total = torch.zeros_like(square[..., 0])
        for i in range(square.shape[-1]):
            total = total + square[..., i]
        return total

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``e2m1(code) * s * g``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return from_e2m1(codes).mul_(from_e4m3(params[0])[..., None]).mul_(self.factor)
