"""TurboQuant's quantizers: keys and values as vLLM serves them, and the paper's inner-product quantizer.

vLLM rounds keys to a codebook of normal levels, and values to an asymmetric grid. The inner-product quantizer of the
paper has levels of b - 1 bits, and a 1-bit sketch of the residual.

Keys (Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", ICLR 2026, arXiv
2504.19874, algorithm 1; vLLM 0.33, ``v1/attention/ops/triton_turboquant_store.py``). A rotated key k of D channels::

    n = |k|    y = k / (n + 1e-8)    code = number of midpoints <= y    stored: codes, half(n)
    k^ = half(n) * level[code]       with norm correction: half(n) * z / sqrt(sum z^2 + 1e-16), z = level[code]

The levels are the Lloyd-Max levels of a normal distribution with variance 1/D, by the rule of vLLM
(``quantization/turboquant/centroids.py``). Values (per token and head, not rotated)::

    scale = max((mx - mn) / (2**bits - 1), 1e-8)    code = min(trunc((v - mn) / scale + 0.5), 2**bits - 1)
    v^ = code * half(scale) + half(mn)

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
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError
from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer, Parameter, first_non_finite
from kvbench.quantizers.packing import look_up

#: intervals of the trapezoid rule, and the largest number of rounds of the Lloyd-Max iteration
INTERVALS, ROUNDS = 200, 200
#: largest change of a level at which the iteration ends
TOLERANCE = 1e-10


@cache
def levels(channels: int, bits: int) -> Tensor:
    """Return the Lloyd-Max levels of a normal distribution with variance 1 / `channels`, fp32 ``[2**bits]``, ascending.

    They are those of vLLM bit for bit: levels begin evenly spaced between -3.5 and 3.5 standard deviations, integrals
    are trapezoid sums over :data:`INTERVALS` intervals between midpoints, and the outermost cells end at 10.5
    deviations.
    """
    count, variance = 1 << bits, 1.0 / channels
    sigma = math.sqrt(variance)
    low = -3.5 * sigma
    current = [low + 2 * -low * (i + 0.5) / count for i in range(count)]
    for _ in range(ROUNDS):
        middles = [(a + b) / 2.0 for a, b in pairwise(current)]
        edges = torch.tensor([3 * low, *middles, -3 * low], dtype=torch.float64)
        step = (edges[1:] - edges[:-1]) / INTERVALS
        x = edges[:-1, None] + torch.arange(INTERVALS + 1, dtype=torch.float64) * step[:, None]
        density = torch.exp(-x * x / (2 * variance)) * (1.0 / math.sqrt(2 * math.pi * variance))
        density[:, [0, -1]] *= 0.5
        mass = density.sum(1) * step
        means = ((density * x).sum(1) * step / mass).tolist()
        new = [mean if part > 1e-15 else old for mean, part, old in zip(means, mass.tolist(), current, strict=True)]
        change = max(abs(a - b) for a, b in zip(new, current, strict=True))
        if change < TOLERANCE:  # the levels before the last round stay, as in vLLM
            break
        current = new
    return torch.tensor(current, dtype=torch.float32)


def midpoints(ascending: Tensor) -> Tensor:
    """Return the midpoints between neighbouring, ascending levels; a number at a midpoint takes the upper level."""
    return (ascending[1:] + ascending[:-1]) / 2


@cache
def stored_codes(bits: int) -> Tensor:
    """Return the code under which each level is stored, int64 ``[2**bits]``, for levels in ascending order.

    With 2 and 3 bits, the codes count the levels from the lowest. With 4 bits, a code consists of a sign, 1 for
    negative levels, and the number of the magnitude, counted from the smallest: the fused kernel looks up eight
    magnitudes by byte permutations (``kvbench/attention/cuda/levels.cuh``).
    """
    index = torch.arange(1 << bits)
    return torch.where(index < 8, 15 - index, index - 8) if bits == 4 else index


def ordered_sum(x: Tensor) -> Tensor:
    """Return the sums over the last dimension, ``[..., 1]``, added in the same order on every device.

    The second half of the elements is added to the first, and so on; the number of elements is first rounded up to a
    power of two. Kernels that pack tokens add in the same order, so that norms are equal bit for bit.
    """
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x


class LevelQuantizer(AffineQuantizer):
    """TurboQuant's keys: the norm of each token, and codes of the Lloyd-Max levels of its normalised, rotated channels.

    The keys must have been rotated. Parameters are ``(norm,)``, in fp16 ``[..., T, 1]``, whatever the model's dtype.

    Args:
        bits: bits per code: 2, 3 or 4.
        correction: norm correction, that is, the decoded key has the stored norm exactly. ``read``: the levels of a
            token are normalised whenever they are read (vLLM). ``write``: the stored number is the norm divided by the
            length of the token's levels, so that readers need not compute it; the two differ in one rounding. ``none``:
            no correction.
    """

    def __init__(self, bits: int, correction: Literal["read", "write", "none"] = "read") -> None:
        super().__init__(bits, None, "token")
        self.correction = correction
        self.kind = "levels_read" if correction == "read" else "levels"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bits={self.bits}, correction={self.correction!r})"

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the buffer of norms: fp16, one per token and head."""
        return (Parameter(torch.float16),)

    def table(self, channels: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the level of each stored code, fp32 ``[2**bits]``."""
        return level_table(channels, self.bits, str(device))

    def encode(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Quantize rotated keys; arguments, result and errors are those of :meth:`AffineQuantizer.encode`."""
        full = x.float()
        norm = ordered_sum(full.square()).sqrt()
        if not bool(torch.isfinite(norm).all()) and not bool(torch.isfinite(x).all()):
            raise NonFiniteError(f"a tensor to be quantized contains NaN or Inf at index {first_non_finite(x)}")
        codes = self.encode_unit(full / (norm + 1e-8))
        if self.correction == "write":
            norm = norm / self.length(codes)
        return codes, (norm.clamp_(max=FP16_MAX).half(),)

    def encode_unit(self, y: Tensor) -> Tensor:
        """Return the stored codes, uint8 in the shape of `y`, of normalised and rotated keys, fp32 ``[..., D]``."""
        return nearest_levels(y, self.bits)

    def length(self, codes: Tensor) -> Tensor:
        """Return the length of the vector of each token's levels, fp32 ``[..., T, 1]``."""
        z = look_up(self.table(codes.shape[-1], codes.device), codes)
        return (ordered_sum(z.square()) + 1e-16).sqrt()

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize unpacked codes; the keys stay rotated. Arguments as for :meth:`AffineQuantizer.decode`."""
        z = look_up(self.table(codes.shape[-1], codes.device), codes)
        if self.correction == "read":
            z.div_((z.square().sum(-1, keepdim=True) + 1e-16).sqrt())
        return z.mul_(params[0].float()).to(dtype)


class TruncatingQuantizer(AffineQuantizer):
    """TurboQuant's values: a scale and a minimum per token and head, codes rounded half up.

    Parameters are ``(scale, minimum)``, in fp16 ``[..., T, 1]``, whatever the model's dtype. Codes are computed in fp32
    from scale and minimum before these are rounded.

    Args:
        bits: bits per code: 3 or 4.
    """

    kind = "affine"

    def __init__(self, bits: int) -> None:
        super().__init__(bits, None, "token")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bits={self.bits})"

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the buffers of scales and minima: fp16, one each per token and head."""
        return (Parameter(torch.float16), Parameter(torch.float16))

    def encode_groups(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes, scales and minima; arguments and result are those of :meth:`AffineQuantizer.encode_groups`."""
        low, high = low.float(), high.float()
        scale = ((high - low) / self.whole(self.levels, low)).clamp(min=1e-8)
        codes = ((x.float() - low) / scale + 0.5).floor().clamp_(0, self.levels)
        return codes, (scale.clamp(max=FP16_MAX).half(), low.clamp(-FP16_MAX, FP16_MAX).half())

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize unpacked codes in fp32, then round to `dtype`; arguments as for :meth:`AffineQuantizer.decode`."""
        scale, minimum = (param.float() for param in params)
        return codes.float().mul_(scale).add_(minimum).to(dtype)


def nearest_levels(y: Tensor, bits: int) -> Tensor:
    """Return the stored codes of the levels nearest to normalised and rotated keys; at a tie, the upper level.

    Keys are fp32 ``[..., D]``, codes uint8 in their shape.
    """
    borders, codes = _search_tables(y.shape[-1], bits, str(y.device))
    return codes[torch.bucketize(y.contiguous(), borders, right=True)]


@cache
def level_table(channels: int, bits: int, device: str) -> Tensor:
    """Return the level of each stored code, fp32 ``[2**bits]``."""
    ascending = levels(channels, bits)
    table = torch.empty_like(ascending)
    table[stored_codes(bits)] = ascending
    return table.to(device)


@cache
def _search_tables(channels: int, bits: int, device: str) -> tuple[Tensor, Tensor]:
    return midpoints(levels(channels, bits)).to(device), stored_codes(bits).to(torch.uint8).to(device)


class SketchQuantizer(AffineQuantizer):
    """TurboQuant's keys with a 1-bit sketch of the residual: attention scores are unbiased, but vary more.

    The upper b - 1 bits of a code stand for the level (:func:`kvbench.quantizers.turboquant.stored_codes`). The lowest
    bit of channel i is the sign of projection i of the residual, 1 if negative. Parameters are ``(norm, residual)``, in
    fp16 ``[..., T, 1]``.

    Args:
        bits: bits per code, b: 2, 3 or 4.
        projection: the matrix S, which is applied to rotated keys, fp32 ``[D, D]``; None: :func:`gaussian` with `seed`.
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
        """Return the matrix S of the sketch, fp32 ``[D, D]``."""
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
