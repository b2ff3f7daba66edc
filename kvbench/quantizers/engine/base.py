"""Base of the engines' quantizers, and the small floating-point formats that they store as bytes: e4m3 and e2m1.

Every token is quantized alone, with one or more scales per head. e4m3 has 8 bits, e2m1 has 4.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError
from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer, Parameter, first_non_finite
from kvbench.quantizers.packing import look_up

#: largest e4m3 number
E4M3_MAX = 448.0
#: magnitudes of the e2m1 numbers, by their three low bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: sign bit of an e2m1 code
SIGN = 8


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3 number (ties to even) and return its byte, uint8; beyond ±448 the result is ±448."""
    # hardware saturates, but torch's cast returns NaN beyond the range
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """Return the e4m3 numbers of given bytes, fp32."""
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def to_e2m1(x: Tensor, ties: Literal["even", "away"]) -> Tensor:
    """Round to the nearest e2m1 number and return its 4-bit code, uint8; beyond ±6 the result is ±6.

    A negative number that is rounded to 0 keeps its sign bit (code 8).

    Args:
        x: numbers, fp32; NaN has code 0.
        ties: for a number in the middle between two others, ``even`` takes the one with the even code, ``away`` the
            larger magnitude.
    """
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code in range(1, len(E2M1)):
        middle = (E2M1[code - 1] + E2M1[code]) / 2
        # from the middle between two numbers, `even` goes up only to an even code
        above = magnitude >= middle if ties == "away" or code % 2 == 0 else magnitude > middle
        codes += above
    return torch.where(torch.signbit(x) & ~torch.isnan(x), codes + SIGN, codes)


def from_e2m1(codes: Tensor) -> Tensor:
    """Return the e2m1 numbers of given 4-bit codes, fp32."""
    return look_up(e2m1_table(str(codes.device)), codes)


@cache
def e2m1_table(device: str) -> Tensor:
    """Return the e2m1 number of each 4-bit code, fp32 ``[16]``."""
    with torch.inference_mode(False):  # cached, so it outlives the mode in which it is made
        return torch.tensor([*E2M1, *(-x for x in E2M1)], device=device)


class TokenQuantizer(AffineQuantizer):
    """Base of quantizers whose groups are consecutive channels of one token.

    All arithmetic is fp32, whatever the dtype of the keys and values, as in the engines' kernels. A subclass defines
    :meth:`encode_blocks`, :meth:`decode_blocks` and the class attributes below.
    """

    #: name of the arithmetic that kernels are compiled for (:attr:`kvbench.attention.work.Format.kind`); ``engine`` if
    #: only torch code reads the codes
    kind: str = "engine"
    #: bits per code
    bits: int
    #: number of channels that share a scale; None: all channels of a head
    group_size: int | None = None
    #: dtypes of the parameters of a group
    stored: ClassVar[tuple[torch.dtype, ...]] = ()

    def __init__(self) -> None:
        self.axis = "token"
        self.levels = (1 << self.bits) - 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the parameters of groups, whose dtypes are the engine's for every `dtype` of keys and values."""
        return tuple(Parameter(stored, "token", self.group_size) for stored in self.stored)

    def encode(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Quantize keys or values ``[..., T, D]``, already rotated if the format rotates heads; do not pack the codes.

        Returns:
            The codes, uint8 ``[..., T, D]``, and the parameters, each ``[..., T, D / group]``.

        Raises:
            ConfigError: the group size does not divide D.
            NonFiniteError: `x` contains NaN or Inf.
        """
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError(f"a tensor to be quantized contains NaN or Inf at index {first_non_finite(x)}")
        codes, params = self.encode_blocks(self.group(x.float()))
        return codes.to(torch.uint8).view(x.shape), params

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and parameters of groups ``[..., T, groups, group]``, finite and fp32.

        Returns:
            The codes, whole numbers of any dtype in the shape of `x`, and the parameters, each ``[..., T, groups]`` in
            the dtype in which it is stored.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method encode_blocks(x)")

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize unpacked codes in fp32, and round the result to `dtype` (fp16: limited to its finite range).

        The result is in the basis in which the keys or values were quantized; see :meth:`AffineQuantizer.decode`.
        """
        codes = codes.to(torch.int16) if codes.dtype == torch.uint8 else codes  # codes less 128 are negative
        values = self.decode_blocks(self.group(codes), params).view(codes.shape)
        return values.clamp_(-FP16_MAX, FP16_MAX).half() if dtype == torch.float16 else values.to(dtype)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Dequantize the codes of groups; return the values, fp32 in the shape of `codes`.

        Args:
            codes: codes, of an integer dtype of at least 16 bits, ``[..., T, groups, group]``.
            params: the parameters, each ``[..., T, groups]``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method decode_blocks(codes, params)")

    def minimum(self, params: tuple[Tensor, ...]) -> Tensor:
        """Return the value that code 0 stands for in each group."""
        width = params[0].shape[-1] if params else 1
        shape = (*params[0].shape, 1) if params else (1, width, 1)
        return self.decode_blocks(torch.zeros(shape, dtype=torch.int32), params).squeeze(-1)


def quotient(x: Tensor, by: float) -> Tensor:
    """Divide by a constant with correct rounding, which CUDA does for a tensor but not for a Python number."""
    return x / torch.full((), by, dtype=torch.float32, device=x.device)


def half_away(x: Tensor) -> Tensor:
    """Round as the engines' kernels do: add 0.5 with the sign of `x` in fp32, then drop the fraction."""
    return (x + torch.where(x >= 0, 0.5, -0.5)).trunc()
