"""Implementations of a product of a few rows with a weight matrix: kvbench's kernels and torch's, for 4 and 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.linear import int4, layout, matvec, product_kernels

#: largest acceptable error, root mean square relative to the output: a few roundings of bf16
TOLERANCE = 2e-2
#: the same for kvbench's kernels: little more than the rounding of the output, 1.7e-3
OURS = 3e-3
#: tiles of 16 input channels that torch's 4-bit product reads at a time
TORCH_TILES = 8


@dataclass(frozen=True)
class Way:
    """An implementation with the matrices to multiply by.

    Args:
        call: function of an input ``[rows, columns]`` and one of `matrices`.
        matrices: matrices in the form that the implementation reads, one per call in the CUDA graph that is timed.
        size: bytes of a matrix, with its scales and zeros.
        tolerance: largest acceptable error, root mean square relative to the output.
    """

    by: str
    bits: int
    call: Callable[[Tensor, Any], Tensor]
    matrices: list[Any] = field(repr=False)
    size: int
    tolerance: float = TOLERANCE


def half_precision(weights: list[Tensor], compiled: bool = False) -> Iterator[Way]:
    """Yield the implementations for 16-bit weights ``[channels, columns]``, if `compiled` torch.compile's too."""
    size = weights[0].numel() * weights[0].element_size()
    yield Way("kvbench", 16, matvec.launch_matvec, weights, size, OURS)
    yield Way("torch (library)", 16, nn.functional.linear, weights, size)
    if compiled:
        tuned = torch.compile(
            lambda x, weight: nn.functional.linear(x, weight),
            dynamic=False,
            options={"coordinate_descent_tuning": True},
        )
        yield Way("torch.compile, tuned", 16, tuned, weights, size)


def four_bits(weights: list[int4.Int4Weight]) -> Iterator[Way]:
    """Yield the implementations for 4-bit weights; torch's has the same weights, rounded to its own bf16 zeros."""
    yield Way("kvbench", 4, kernel_product, weights, weights[0].nbytes, OURS)
    group = weights[0].group
    packed = [torch_weight(weight) for weight in weights]
    size = sum(part.numel() * part.element_size() for part in packed[0])

    def call(x: Tensor, matrix: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, matrix[0], group, matrix[1])

    yield Way("torch (int4)", 4, call, packed, size)


def kernel_product(x: Tensor, weight: int4.Int4Weight) -> Tensor:
    """Return the product by kvbench's kernel.

    Raises:
        RuntimeError: the kernel cannot compute it.
    """
    half = weight.dtype == torch.float16
    able = product_kernels.serves(x, weight.columns)
    out = product_kernels.int4(x, weight.codes, weight.groups, weight.rows, weight.group, half, None) if able else None
    if out is None:
        raise RuntimeError(f"kvbench's kernel does not serve {len(x)} rows of {x.dtype} on {x.device}")
    return out


def torch_weight(weight: int4.Int4Weight) -> tuple[Tensor, Tensor]:
    """Return a 4-bit matrix as torch's product reads it: codes, and scales and zeros in bf16.

    A zero of torch's is the weight that code 8 stands for: ``(code - zero) * scale = (code - 8) * scale + (8 - zero) *
    scale``.
    """
    codes, scales, zeros = int4.unpacked(weight)
    nibbles = codes[:, ::2] << 4 | codes[:, 1::2]
    offsets = (8 - zeros.float()) * scales.float()
    params = torch.stack([scales.bfloat16(), offsets.bfloat16()], -1).transpose(0, 1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(nibbles, TORCH_TILES), params


def random_int4(channels: int, columns: int, group: int, seed: int, device: str = "cuda") -> int4.Int4Weight:
    """Return a random 4-bit matrix with bf16 scales; codes, scales and zeros are uniformly distributed."""
    rng = torch.Generator(device).manual_seed(seed)
    tiles = -(-channels // layout.ROWS)
    shape = tiles, columns // layout.COLUMNS, 32, 4
    codes = torch.randint(-(1 << 31), 1 << 31, shape, generator=rng, device=device, dtype=torch.int64).to(torch.int32)
    padded = tiles * layout.ROWS, columns // group
    scales = torch.rand(padded, generator=rng, device=device) * 0.004 + 0.001
    zeros = torch.randint(0, 17, padded, generator=rng, device=device)
    groups = layout.group_words(scales.bfloat16(), zeros)
    return int4.Int4Weight(codes, groups, channels, columns, group, torch.bfloat16)


def random_matrix(channels: int, columns: int, dtype: torch.dtype, seed: int, scale: float = 0.02) -> Tensor:
    """Return a random matrix ``[channels, columns]`` with standard deviation `scale`, on the GPU."""
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(channels, columns, generator=rng, device="cuda") * scale).to(dtype)
