"""Atom's quantizer for keys and values: asymmetric with an integer zero point clamped to the code range.

Source: efeslab/Atom, model/quant.py and qLlamaLayer.py (the KV part)::

    scale = max(mx - mn, 1e-5) / (2**bits - 1)
    zero  = clamp(round(-mn / scale), 0, 2**bits - 1)
    code  = clamp(round(x / scale) + zero, 0, 2**bits - 1)
    x^    = (code - zero) * scale

Clamping the zero point follows the authors' code: a group that does not straddle 0 saturates (an all-positive group
keeps zero 0 and loses everything above ``scale * (2**bits - 1)``). Atom itself takes one group per token and head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer, param_dtype


class AtomQuantizer(AffineQuantizer):
    """Atom's quantizer; its arguments are those of :class:`AffineQuantizer`.

    Parameters are ``(scale, zero)``; the zero point is a whole number in the same floating-point dtype as the scale.
    """

    def encode_groups(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes, scales and zero points of a tensor that :meth:`group` has reshaped.

        Arithmetic is fp16 for fp16 input, otherwise fp32. Arguments and result are those of
        :meth:`AffineQuantizer.encode_groups`, with zero points in place of minima.
        """
        store = param_dtype(x.dtype)
        work = x.dtype if x.dtype in (torch.float16, torch.float32) else torch.float32
        low, high, x = low.to(work), high.to(work), x.to(work)
        levels = self.whole(self.levels, low)
        scale = (high - low).clamp(min=1e-5) / levels
        if store == torch.float16:
            # Stay inside what fp16 can hold: neither a division by 0 nor an infinite step.
            exact = (high.float() - low.float()).clamp(min=1e-5) / levels.float()
            scale = torch.where(torch.isinf(scale), exact, scale.float()).clamp(2.0**-24, FP16_MAX).half().to(work)
        zero = (-low / scale).round().clamp(0, self.levels).abs()  # no -0
        codes = ((x / scale).round() + zero).clamp(0, self.levels)
        return codes, (scale.to(store), zero.to(store))

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize unpacked codes: ``(code - zero) * scale``; see :meth:`AffineQuantizer.decode`."""
        work = torch.float32 if dtype == torch.bfloat16 else dtype
        scale, zero = (self.expand(p.to(work)) for p in params)
        values = self.group(codes.to(work)).sub_(zero).mul_(scale)
        if work == torch.float16:
            values.clamp_(-FP16_MAX, FP16_MAX)
        return values.view(codes.shape).to(dtype)

    def minimum(self, params: tuple[Tensor, ...]) -> Tensor:
        """Return the value that code 0 stands for in each group: ``-zero * scale``."""
        return -params[1] * params[0]
