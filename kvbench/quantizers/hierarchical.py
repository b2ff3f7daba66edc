"""QuantSpec's hierarchical quantizer: an upper nibble, and a lower nibble for the upper one's error.

Source: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache" (2025), sec. 4.2;
the arithmetic is that of the first author's code (rishabh-16/QuantSpec, quant_pack_int8toint8_upperlower.py)::

    scale = (mx - mn) / 15
    U     = round(clamp((x - mn) / scale, 0, 15))                      asymmetric, 4 bits
    Lw    = round(clamp((x - (U * scale + mn)) / (scale / 16), -8, 7))   symmetric, 4 bits
    draft:  x^ = U * scale + mn
    target: x^ = U * scale + Lw * (scale / 16) + mn

The stored code is ``16 * U + (Lw + 8)``, as two planes of nibbles, so that a draft reads only the upper plane. The
error of U reaches half a scale, which is +8 lower steps, but Lw is at most +7: the largest error with both nibbles is
therefore one lower step, not half a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer
from kvbench.quantizers.spec import Axis


class HierarchicalQuantizer(AffineQuantizer):
    """QuantSpec's quantizer: 8-bit codes whose upper nibble alone is a valid 4-bit code, for the draft model to read.

    Both nibbles share one scale and minimum per group. The arguments are those of :class:`AffineQuantizer`.

    Attributes:
        upper: 4-bit quantizer that decodes the upper nibbles, with the same parameters.
    """

    #: format kind, which kernels are compiled for (:mod:`kvbench.attention.phases`)
    kind = "hierarchical"

    def __init__(self, group_size: int | None, axis: Axis = "channel") -> None:
        super().__init__(8, group_size, axis)
        self.levels = 15  # of the upper nibble, which the scale belongs to
        self.upper = AffineQuantizer(4, group_size, axis)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group_size={self.group_size}, axis={self.axis!r})"

    def encode_groups(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute 8-bit codes, scales and minima of a tensor that :meth:`group` has reshaped.

        A code is ``16 U + Lw + 8``, with the upper nibble U (0 to 15) and the signed error Lw (-8 to 7) in steps of
        1/16 scale. Arguments and result are those of :meth:`AffineQuantizer.encode_groups`.
        """
        upper, params = super().encode_groups(x, low, high)
        work = x.dtype if x.dtype in (torch.float16, torch.float32) else torch.float32
        scale, base, x, number = params[0].to(work), params[1].to(work), x.to(work), upper.to(work)
        part, step = self.share(scale, base, high), scale / 16
        if part is None:
            rest = x - (number * scale + base)
        else:
            rest, step = x * part - (number * (scale * part) + base * part), step * part
        # A constant group, or one whose step underflows, has no rest to hold: U alone decodes it.
        safe = torch.where(step == 0, torch.ones_like(step), step)
        lower = (rest / safe).clamp_(-8, 7).round_()
        lower = torch.where(step == 0, torch.zeros_like(lower), lower)
        return upper.to(lower.dtype) * 16 + (lower + 8), params

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize codes from both nibbles, as the target model reads them; see :meth:`AffineQuantizer.decode`."""
        work = torch.float32 if dtype == torch.bfloat16 else dtype
        scale, minimum = (self.expand(p.to(work)) for p in params)
        whole = codes.to(torch.int16)
        upper, lower = self.group((whole >> 4).to(work)), self.group(((whole & 15) - 8).to(work))
        values = upper.mul_(scale).add_(lower.mul_(scale / 16)).add_(minimum)
        if work == torch.float16 and not bool(torch.isfinite(values).all()):
            return self.decode(codes, params, torch.float32).clamp(-FP16_MAX, FP16_MAX).half()
        return values.view(codes.shape).to(dtype)

    def decode_upper(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize the upper nibbles of codes only, as a draft model reads them; return the values, ``[..., T, D]``.

        `codes` are those with both nibbles; see :meth:`AffineQuantizer.decode`.
        """
        return self.upper.decode(codes.to(torch.int16) >> 4, params, dtype)
