"""OSCAR's quantizer: outliers of a token clipped to an order statistic, then one asymmetric group per token and head.

Source: arXiv 2605.17757 and FutureMLS-Lab/OSCAR, the serving kernel (``oscar_rotation_clip_int2_kv.py``), in fp32::

    t     = sorted |x| at index int(clip * D), no interpolation; x = clamp(x, -t, t)
    scale = max(mx - mn, 1e-8) / (2**bits - 1)
    zero  = -mn / scale, not rounded
    code  = trunc(x / scale + zero + 0.5)
    x^    = (code - zero) * scale

With ``lloyd_max``, codes are cut at the edges of a Gaussian's optimal 2-bit quantizer, while decoding stays uniform::

    code  = number of edges (-0.98106527, 0, 0.98106527) that (x - mean) / sd reaches
    scale = 1.00637237 * 1.16 * sd,  zero = 1.5 - mean / scale

The authors store scale and zero in fp32, or in bf16 as an option. By default, kvbench stores the scale and the minimum
``-zero * scale`` in fp16 (fp32 for fp32 input), which is what attention kernels read. That takes as many bytes as bf16
and rounds less.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer, Parameter, param_dtype

#: dtype in which scales are stored
Scales = Literal["fp16", "bf16", "fp32"]

#: middle edge to outer edge of the optimal 2-bit quantizer of a standard Gaussian
EDGE = 0.98106527
#: distance of the levels by which its codes are decoded, in standard deviations
STEP = 1.00637237 * 1.16
#: least range of a group, and what is added to a variance
LEAST = 1e-8


class OscarQuantizer(AffineQuantizer):
    """OSCAR's quantizer: one group per token and head, clipped before its range is taken.

    Args:
        clip: share of a token's channels whose absolute value is below the threshold of clipping; 1 for no clipping.
        lloyd_max: True to cut codes at the edges for a Gaussian (2 bits only).
        scales: ``fp16``: store scale and minimum as :class:`AffineQuantizer` does. ``fp32`` or ``bf16``: store scale
            and zero point in this dtype, as the authors do; no attention kernel reads these.
    """

    def __init__(self, bits: int = 2, clip: float = 1.0, *, lloyd_max: bool = False, scales: Scales = "fp16") -> None:
        super().__init__(bits, None, "token")
        self.clip, self.lloyd_max, self.scales = clip, lloyd_max, scales

    @property
    def kind(self) -> str:
        """Formula by which attention kernels decode: ``affine`` for fp16, else ``oscar``, which no kernel reads."""
        return "affine" if self.scales == "fp16" else "oscar"

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the stored parameters: scale and minimum, or scale and zero point."""
        parameter = Parameter(self._stored(dtype))
        return (parameter, parameter)

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        if self.scales == "fp16":
            return param_dtype(dtype)
        return torch.float32 if self.scales == "fp32" else torch.bfloat16

    def encode_groups(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and parameters of groups; see :meth:`AffineQuantizer.encode_groups`."""
        stored, x, low, high = self._stored(x.dtype), x.float(), low.float(), high.float()
        if self.clip < 1:
            limit = threshold(x, self.clip)
            x, low, high = (torch.maximum(torch.minimum(part, limit), -limit) for part in (x, low, high))
        codes, scale, zero = self.gaussian(x) if self.lloyd_max else self.uniform(x, low, high)
        if self.scales != "fp16":
            return codes, (scale.to(stored), zero.to(stored))
        minimum = -zero * scale if self.lloyd_max else low
        if stored == torch.float16:
            scale, minimum = scale.clamp(0.0, FP16_MAX), minimum.clamp(-FP16_MAX, FP16_MAX)
        return codes, (scale.to(stored), minimum.to(stored))

    def uniform(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zero point of groups (last dimension, fp32) by their range."""
        scale = (high - low).clamp(min=LEAST) / self.whole(self.levels, low)
        zero = -low / scale
        # the authors do not clamp: it matters only where |x| / scale passes what fp32 resolves
        return (x / scale + zero + 0.5).trunc().clamp_(0, self.levels), scale, zero

    def gaussian(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zero point of groups (last dimension, fp32) by mean and deviation (Lloyd-Max)."""
        mean = x.mean(-1, keepdim=True)
        deviation = (x.var(-1, unbiased=False, keepdim=True) + LEAST).sqrt()
        scale = STEP * deviation
        place = (x - mean) / deviation
        codes = (place >= -EDGE).float() + (place >= 0.0).float() + (place >= EDGE).float()
        return codes, scale, 1.5 - mean / scale

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize unpacked codes; arguments and result are those of :meth:`AffineQuantizer.decode`."""
        if self.scales == "fp16":
            return super().decode(codes, params, dtype)
        scale, zero = (self.expand(param.float()) for param in params)
        return self.group(codes.float()).sub_(zero).mul_(scale).view(codes.shape).to(dtype)

    def minimum(self, params: tuple[Tensor, ...]) -> Tensor:
        """Return the value that code 0 stands for in each group."""
        return params[1] if self.scales == "fp16" else -params[1] * params[0]


def threshold(x: Tensor, clip: float) -> Tensor:
    """Return the absolute value to which each group of `x` (its last dimension) is clipped, ``[..., 1]``.

    It is the `clip` quantile (below 1) of the absolute values of the group, without interpolation.
    """
    return x.abs().kthvalue(int(clip * x.shape[-1]) + 1, dim=-1, keepdim=True).values
