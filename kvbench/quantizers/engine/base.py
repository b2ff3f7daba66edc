"""Base of the engines' quantizers: every token is quantized alone, with one or more scales per head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError
from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer, Parameter, first_non_finite


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
