"""Linear layers with 4-bit weights, as one operation for ``torch.compile``: ``w = (code - zero) * scale``.

Codes are 0 to 15; each group of 128, 64 or 32 consecutive input channels of an output channel has a scale in 16 bits
and a zero, an integer from 0 to 16. On a GPU, products of 1 to 16 rows use kvbench's CUDA kernel
(:mod:`kvbench.linear.product_kernels`), which reads the 4-bit weights once. More rows, and inputs that the kernel
cannot take, multiply by the dequantized weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, library, nn

from kvbench.linear import layout, product_kernels

#: output channels that are dequantized at a time for products that the kernel does not compute
SLICE = 4096
#: dtypes of scales
SCALES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Int4Weight:
    """A weight matrix in 4 bits, in the layout of the kernel (:mod:`kvbench.linear.layout`).

    Args:
        codes: codes, int32 ``[tiles of 16 output channels, tiles of 64 input channels, 32, 4]``.
        groups: scales and zeros, int32 ``[tiles of 16 output channels, groups, 8, 2]``.
        rows: number of output channels, N.
        columns: number of input channels, K.
        group: number of input channels that share a scale.
        dtype: dtype of the scales, fp16 or bf16.
    """

    codes: Tensor
    groups: Tensor
    rows: int
    columns: int
    group: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of codes, scales and zeros in bytes."""
        return 4 * (self.codes.numel() + self.groups.numel())

    def to(self, device: torch.device | str) -> Int4Weight:
        """Return the matrix on a device; the same object if it is there already."""
        if self.codes.device == torch.device(device):
            return self
        codes, groups = self.codes.to(device), self.groups.to(device)
        return Int4Weight(codes, groups, self.rows, self.columns, self.group, self.dtype)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor) -> Int4Weight:
    """Return a 4-bit weight matrix in the layout of the kernel, on the device of `codes`.

    Args:
        codes: codes 0 to 15, uint8 ``[N, K]``; K must be a multiple of 32.
        scales: scales of the groups, fp16 or bf16 ``[N, K / group]``.
        zeros: zeros of the groups, integers 0 to 16, ``[N, K / group]``.

    Raises:
        ValueError: the group size, a shape, the dtype of the scales, or the range of codes or zeros is wrong.
    """
    rows, columns = codes.shape
    count = scales.shape[-1]
    group = columns // count if count and columns % count == 0 else 0
    if group not in layout.GROUPS:
        groups = ", ".join(map(str, layout.GROUPS))
        raise ValueError(
            f"{columns} input channels have {count} scales per output channel: expected groups of {groups}"
        )
    if scales.shape != (rows, count) or zeros.shape != scales.shape:
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} need scales and zeros of shape {(rows, count)}; the scales have "
            f"shape {tuple(scales.shape)}, the zeros {tuple(zeros.shape)}"
        )
    if scales.dtype not in SCALES:
        raise ValueError(f"scales must be float16 or bfloat16, not {str(scales.dtype).removeprefix('torch.')}")
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"the largest code is {int(codes.max())}, but 4 bits hold 0 to 15")
    if zeros.numel() and not 0 <= int(zeros.min()) <= int(zeros.max()) <= 16:
        raise ValueError(f"zeros must be from 0 to 16; they range from {int(zeros.min())} to {int(zeros.max())}")
    below, right = -rows % layout.ROWS, -columns % layout.COLUMNS
    more = -(-(columns + right) // group) - count
    words = layout.fragments(nn.functional.pad(codes.to(torch.uint8), (0, right, 0, below)))
    params = layout.group_words(
        nn.functional.pad(scales, (0, more, 0, below)), nn.functional.pad(zeros.to(torch.int16), (0, more, 0, below))
    )
    return Int4Weight(words, params, rows, columns, group, scales.dtype)


def unpacked(weight: Int4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (uint8 ``[N, K]``), scales and zeros (uint8; ``[N, K / group]``): the arguments of :func:`pack`."""
    count = weight.columns // weight.group
    codes = layout.codes(weight.codes)[: weight.rows, : weight.columns]
    scales, zeros = layout.scales_and_zeros(weight.groups, weight.dtype)
    return codes, scales[: weight.rows, :count], zeros[: weight.rows, :count]


def dequantized(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weights ``[N, K]``: ``(code - zero) * scale``, which is exact in fp32, rounded once to `dtype`."""
    half = weight.dtype == torch.float16
    sizes = weight.rows, weight.columns, weight.group
    by_kernel = product_kernels.dequantize_by_kernel(weight.codes, weight.groups, *sizes, half, dtype)
    if by_kernel is not None:
        return by_kernel
    out = weight.codes.new_empty(weight.rows, weight.columns, dtype=dtype)
    tiles = SLICE // layout.ROWS
    for first in range(0, len(weight.codes), tiles):
        last, start = first + tiles, first * layout.ROWS
        count = min(SLICE, weight.rows - start)
        part = Int4Weight(
            weight.codes[first:last], weight.groups[first:last], count, weight.columns, weight.group, weight.dtype
        )
        codes, scales, zeros = unpacked(part)
        values = codes.reshape(count, -1, weight.group).float()
        out[start : start + count] = values.sub_(zeros.float()[..., None]).mul_(scales.float()[..., None]).flatten(1)
    return out


def stacked(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Stack matrices along their output channels and return the result; all must have the same input channels.

    Raises:
        ValueError: the matrices differ in the number of input channels, the group size or the dtype of scales.
    """
    kinds = {(weight.columns, weight.group, weight.dtype) for weight in weights}
    if len(kinds) != 1:
        raise ValueError(
            f"matrices to stack must agree in (input channels, group, dtype of scales): {sorted(kinds, key=str)}"
        )
    first = weights[0]
    if any(weight.rows % layout.ROWS for weight in weights[:-1]):  # tiles that hold two matrices
        return pack(*(torch.cat(parts) for parts in zip(*map(unpacked, weights), strict=True)))
    codes, groups = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "groups"))
    rows = sum(weight.rows for weight in weights)
    return Int4Weight(codes, groups, rows, first.columns, first.group, first.dtype)


def product(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer with 4-bit weights, ``x @ w.T + bias``, without gradients.

    x is ``[..., K]``, the weights ``[N, K]``, the bias ``[N]`` or None, and the output ``[..., N]``.
    """
    half = weight.dtype == torch.float16
    return int4_product(x, weight.codes, weight.groups, weight.rows, weight.columns, weight.group, half, bias)


@library.custom_op("kvbench::int4_product", mutates_args=())
def int4_product(
    x: Tensor,
    codes: Tensor,
    groups: Tensor,
    rows: int,
    columns: int,
    group: int,
    half: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute :func:`product` from the fields of :class:`Int4Weight`; `half` is True if scales are fp16, not bf16."""
    if product_kernels.serves(x, columns, bias):
        out = product_kernels.int4(x, codes, groups, rows, group, half, bias)
        if out is not None:
            return out
    return dequantized_product(
        x, Int4Weight(codes, groups, rows, columns, group, torch.float16 if half else torch.bfloat16), bias
    )


@int4_product.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    groups: Tensor,
    rows: int,
    columns: int,
    group: int,
    half: bool,
    bias: Tensor | None = None,
) -> Tensor:
    torch._check(x.shape[-1] == columns, lambda: f"the input has {x.shape[-1]} columns, but the matrix has {columns}")
    return x.new_empty(*x.shape[:-1], rows)


def dequantized_product(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`product` by dequantizing the weights, without kvbench's kernel."""
    return nn.functional.linear(x, dequantized(weight, x.dtype), bias)
