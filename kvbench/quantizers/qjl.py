"""The inner-product quantizer of the TurboQuant paper: levels of b - 1 bits, and a 1-bit sketch of what they leave.

Source: Zandieh et al., arXiv 2504.19874, algorithm 2 ("TurboQuant_prod"), with the sketch of QJL (Zandieh et al., arXiv
2406.03482). For a rotated key k with n = |k| and y = k / n::

    z = levels of b - 1 bits nearest to y      r = y - z      stored: codes, signs of S r, n, g = |r|
    <q, k> is estimated by  n (<q, z> + sqrt(pi / 2) / D * g * <S q, sign(S r)>)

where S is a D x D matrix of independent standard normal numbers. The estimate is linear in q, so it is the product with
the decoded key ``n (z + sqrt(pi / 2) / D * g * S^T sign(S r))``. vLLM leaves the sketch out.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError
from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer, Parameter, first_non_finite
from kvbench.quantizers.packing import look_up
from kvbench.quantizers.turboquant import level_table, nearest_levels


class SketchQuantizer(AffineQuantizer):
    """TurboQuant's keys with a 1-bit sketch of the residual, which makes scores unbiased and their variance larger.

    The upper b - 1 bits of a code are the level's (:func:`kvbench.quantizers.turboquant.stored_codes`), and the lowest
    is the sign of the projection with the channel's number, 1 for a negative one. Parameters are ``(norm, residual)``,
    in fp16 ``[..., T, 1]``.

    Args:
        bits: bits per code, b: 2, 3 or 4.
        projection: S for keys as they are stored, fp32 ``[D, D]``; None for :func:`gaussian` of `seed`.
    """

    kind = "sketch"

    def __init__(self, bits: int, projection: Tensor | None = None, seed: int = 0) -> None:
        super().__init__(bits, None, "token")
        self.given, self.seed = projection, seed

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bits={self.bits}, seed={self.seed})"

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the buffers of norms and of lengths of residuals: fp16, one each per token and head."""
        return (Parameter(torch.float16), Parameter(torch.float16))

    def projection(self, channels: int, device: torch.device) -> Tensor:
        """Return S, fp32 ``[D, D]``."""
        return gaussian(channels, self.seed, str(device)) if self.given is None else self.given.to(device)

    def encode(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Quantize rotated keys; arguments, result and errors are those of :meth:`AffineQuantizer.encode`."""
        full = x.float()
        norm = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
        if not bool(torch.isfinite(norm).all()):
            raise NonFiniteError(f"a tensor to be quantized contains NaN or Inf at index {first_non_finite(x)}")
        codes, length = self.encode_unit(full / (norm + 1e-8))
        return codes, (norm.clamp_(max=FP16_MAX).half(), length.half())

    def encode_unit(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of normalised and rotated keys, fp32 ``[..., D]``, and the lengths of their residuals.

        Returns:
            Codes, uint8 in the shape of `y`; and lengths, fp32 ``[..., 1]``.
        """
        codes = nearest_levels(y, self.bits - 1)
        rest = y - level_table(y.shape[-1], self.bits - 1, str(y.device))[codes.long()]
        negative = rest @ self.projection(y.shape[-1], y.device).T < 0
        return codes * 2 + negative, torch.linalg.vector_norm(rest, dim=-1, keepdim=True)

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize unpacked codes; the keys stay rotated. Arguments as for :meth:`AffineQuantizer.decode`."""
        norm, length = (param.float() for param in params)
        return self.decode_unit(codes, length).mul_(norm).to(dtype)

    def decode_unit(self, codes: Tensor, length: Tensor) -> Tensor:
        """Return decoded keys before they are multiplied by their norms, fp32 ``[..., D]``.

        Args:
            length: lengths of the residuals, fp32 ``[..., T, 1]``.
        """
        channels, device = codes.shape[-1], codes.device
        z = look_up(level_table(channels, self.bits - 1, str(device)), codes >> 1)
        signs = (codes & 1).float().mul_(-2.0).add_(1.0)
        sketch = signs @ self.projection(channels, device)
        return z.add_(sketch.mul_((math.sqrt(math.pi / 2) / channels) * length))


@cache
def gaussian(channels: int, seed: int, device: str) -> Tensor:
    """Return independent standard normal numbers, fp32 ``[channels, channels]``, the same on every device."""
    with torch.inference_mode(False):
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(channels, channels, generator=generator).to(device)


@cache
def orthogonal(channels: int, seed: int) -> Tensor:
    """Return a random rotation: the factor Q of a matrix of normal numbers, fp32 ``[channels, channels]``.

    Columns are multiplied by the signs of the diagonal of R, so that all rotations are equally likely.
    """
    with torch.inference_mode(False):
        q, r = torch.linalg.qr(gaussian(channels, seed, "cpu").double())
        return (q * r.diagonal().sign()).float()
