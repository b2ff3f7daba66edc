"""llama.cpp's block formats: blocks of 32 channels, each with an fp16 scale d and, for two formats, an fp16 minimum m.

Source: ggml-org/llama.cpp, ``ggml-quants.c`` (MIT): the functions ``quantize_row_*_ref`` and ``dequantize_row_*``.
Codes are computed with d (and m) in fp32, before they are rounded to fp16 for storage; ``1 / d`` is 0 if d is 0.
``peak`` is the first of the elements with the largest magnitude, with its sign. llama.cpp rotates queries, keys and
values before every quantized cache since 2026.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvbench.quantizers.affine import FP16_MAX
from kvbench.quantizers.engine.base import TokenQuantizer, quotient
from kvbench.quantizers.packing import look_up

#: channels per block
BLOCK = 32
#: levels of iq4_nl
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: blocks of iq4_nl whose largest magnitude is below this are stored as zeros
TINY = 1e-15


class Q8_0(TokenQuantizer):
    """llama.cpp's ``q8_0``: symmetric 8-bit codes in blocks of 32 channels.

    ::

        d  = absmax / 127
        q  = round_half_away(x * (1 / d))
        x^ = half(d) * q

    The stored code is ``q + 128``. Bytes per token and head: ``D + D / 32 * 2`` (8.5 bits per element).

    Args:
        even: True for the rounding of llama.cpp's CPU back end: ``q = round_half_even(x * (127 / absmax))``.
    """

    kind = "offset"
    bits = 8
    group_size = BLOCK
    stored = (torch.float16,)

    def __init__(self, *, even: bool = False) -> None:
        super().__init__()
        self.even = even

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        most = x.abs().amax(-1)
        scale = quotient(most, 127)
        if self.even:
            steps = torch.where(most == 0, 0.0, torch.full_like(most, 127) / most)
            codes = (x * steps[..., None]).round()
        else:
            codes = round_away(x * inverse(scale)[..., None])
        return codes.clamp(-128, 127) + 128, (halved(scale),)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``d * (code - 128)``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return (codes - 128).float().mul_(params[0].float()[..., None])


class Signed(TokenQuantizer):
    """llama.cpp's ``q4_0`` and ``q5_0``: symmetric codes in blocks of 32 channels, scaled so that the peak is exact.

    With n = 2**(bits - 1)::

        d  = peak / -n
        q  = min(trunc(x * (1 / d) + n + 0.5), 2 * n - 1)
        x^ = half(d) * (q - n)

    Bytes per token and head: ``D * bits / 8 + D / 32 * 2`` (4.5 or 5.5 bits per element).

    Args:
        bits: bits per code: 4 or 5.
    """

    group_size = BLOCK
    stored = (torch.float16,)

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.kind = "offset" if bits == 4 else "engine"
        super().__init__()

    def __repr__(self) -> str:
        return f"Signed(bits={self.bits})"

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        half = 1 << (self.bits - 1)
        scale = quotient(peak(x), -half)
        codes = (x * inverse(scale)[..., None] + (half + 0.5)).trunc().clamp(0, self.levels)
        return codes, (halved(scale),)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``d * (code - n)``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return (codes - (1 << (self.bits - 1))).float().mul_(params[0].float()[..., None])


class Ranged(TokenQuantizer):
    """llama.cpp's ``q4_1`` and ``q5_1``: asymmetric codes in blocks of 32 channels, with a scale and a minimum.

    ::

        d  = (max - min) / (2**bits - 1)
        q  = min(trunc((x - min) * (1 / d) + 0.5), 2**bits - 1)
        x^ = half(d) * q + half(min)

    Bytes per token and head: ``D * bits / 8 + D / 32 * 4`` (5 or 6 bits per element).

    Args:
        bits: bits per code: 4 or 5.
    """

    group_size = BLOCK
    stored = (torch.float16, torch.float16)

    def __init__(self, bits: int) -> None:
        self.bits = bits
        super().__init__()

    def __repr__(self) -> str:
        return f"Ranged(bits={self.bits})"

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes, scales and minima; arguments and result: see :meth:`TokenQuantizer.encode_blocks`."""
        low, high = torch.aminmax(x, dim=-1)
        scale = quotient(high - low, self.levels)
        codes = ((x - low[..., None]) * inverse(scale)[..., None] + 0.5).trunc().clamp(0, self.levels)
        return codes, (halved(scale), halved(low))

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``d * code + m``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return codes.float().mul_(params[0].float()[..., None]).add_(params[1].float()[..., None])


class IQ4NL(TokenQuantizer):
    """llama.cpp's ``iq4_nl``: 4-bit codes in blocks of 32 channels, looked up in a fixed table v of 16 levels.

    ::

        d0 = peak / v[0];   q = the level nearest to x * (1 / d0), the upper one at a tie
        d  = sum(x^2 * v[q] * x) / sum(x^2 * v[q]^2)
        x^ = half(d) * v[q]

    Bytes per token and head: ``D / 2 + D / 32 * 2`` (4.5 bits per element).
    """

    kind = "iq4_nl"
    bits = 4
    group_size = BLOCK
    stored = (torch.float16,)

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        table = iq4_nl_table(str(x.device))
        first = peak(x)
        zero = first.abs() < TINY
        scaled = x * inverse(quotient(first, IQ4_NL[0]))[..., None]
        upper = torch.searchsorted(table, scaled.contiguous(), right=True).clamp(1, len(IQ4_NL) - 1)
        codes = torch.where(scaled - table[upper - 1] < table[upper] - scaled, upper - 1, upper)
        level, weight = table[codes], x * x
        above, below = in_order(weight * level * x), in_order(weight * level * level)
        scale = torch.where(zero | (below <= 0), 0.0, above / torch.where(below > 0, below, 1.0))
        return torch.where(zero[..., None], 0, codes), (halved(scale),)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``d * v[code]``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return look_up(iq4_nl_table(str(codes.device)), codes).mul_(params[0].float()[..., None])


@cache
def iq4_nl_table(device: str) -> Tensor:
    """Return the levels of iq4_nl, fp32 ``[16]``."""
    with torch.inference_mode(False):  # cached, so it outlives the mode in which it is made
        return torch.tensor(IQ4_NL, dtype=torch.float32, device=device)


def peak(x: Tensor) -> Tensor:
    """Return the element of each block with the largest magnitude, with its sign; the first of several."""
    magnitude = x.abs()
    first = (magnitude == magnitude.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1, keepdim=True)
    return x.gather(-1, first).squeeze(-1) + 0.0  # the reference begins with 0, so that -0 is none


def inverse(scale: Tensor) -> Tensor:
    """Return ``1 / scale``, or 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def halved(x: Tensor) -> Tensor:
    """Round to fp16; numbers beyond its range become its largest number, not infinity as in llama.cpp."""
    return x.clamp(-FP16_MAX, FP16_MAX).half()


def round_away(x: Tensor) -> Tensor:
    """Round to the nearest whole number, away from 0 at a tie (C's ``roundf``)."""
    whole = x.trunc()
    return whole + torch.where((x - whole).abs() >= 0.5, x.sign(), 0.0)


def in_order(x: Tensor) -> Tensor:
    """Sum the elements of each block from the first to the last, as compiled scalar code does."""
    total = torch.zeros_like(x[..., 0])
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total
