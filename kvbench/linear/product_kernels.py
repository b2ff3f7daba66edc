"""kvbench's CUDA kernels for products of 1 to 16 rows: which products they can compute, and their configurations.

The kernels (``cuda/int4.cu`` and ``cuda/product.cu``, :mod:`kvbench.linear.build`) read a matrix once, whatever the
number of rows. Their sums do not depend on the order in which CTAs run: equal inputs give equal outputs.

`channels` are the output channels of a matrix, `columns` its input channels. `group`, `half` and `bf16` are as for
:class:`~kvbench.linear.build.Build`; `device` is the index of the GPU.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from kvbench.linear import build, layout
from kvbench.linear.build import Build
from kvbench.util import nvrtc

#: multiprocessors of the GPU on which candidates were compared
PROCESSORS = 132
#: bytes of shared memory that a CTA may have if the device does not say (sm_90)
SHARED = 227 * 1024


def serves(x: Tensor, columns: int, bias: Tensor | None = None) -> bool:
    """Return True if the kernel can take the input and the bias of a product; the matrix is not checked.

    The input, ``[..., columns]``, must have 1 to 16 rows in bf16 or fp16, on a GPU of compute capability 8.0 or higher,
    and CUDA source must be compilable. The number of columns must be a multiple of 128, and a bias must have the dtype
    of the input.
    """
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[-1] == columns
        and not columns % 128
        and 0 < x.numel() <= build.ROWS * columns
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        and compilable()
    )


@lru_cache(maxsize=1)
def compilable() -> bool:
    """Return True if CUDA source can be compiled here; otherwise warn once, and return False."""
    reason = nvrtc.missing()
    if reason is not None:
        warnings.warn(
            f"products of few rows do not use kvbench's CUDA kernel, because {reason}: 4-bit weights are dequantized "
            "for each product, which takes longer than 16-bit weights. hint: pip install cuda-bindings",
            stacklevel=3,
        )
    return reason is None


def int4(
    x: Tensor, codes: Tensor, groups: Tensor, channels: int, group: int, half: bool, bias: Tensor | None
) -> Tensor | None:
    """Return the product with a 4-bit matrix, or None if the kernel cannot be compiled for it.

    Args:
        x: input ``[..., columns]``, for which :func:`serves` is True.
        codes: codes (:mod:`kvbench.linear.layout`).
        groups: scales and zeros.
        bias: ``[channels]``; None: no bias.
    """
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    chosen = configuration(rows, channels, columns, group, half, x.dtype == torch.bfloat16, x.device.index or 0)
    return None if chosen is None else _launched(chosen, x, codes, groups, channels, bias)


def half_precision(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with a 16-bit matrix.

    Args:
        x: input ``[..., columns]``, for which :func:`serves` is True.
        weight: matrix ``[channels, columns]`` in the dtype of x, whose rows begin at multiples of 16 bytes.
        bias: ``[channels]``; None: no bias.

    Raises:
        RuntimeError: the kernel cannot be compiled for this product.
    """
    channels, columns = weight.shape
    rows, bf16 = x.numel() // columns, x.dtype == torch.bfloat16
    chosen = configuration(rows, channels, columns, 0, False, bf16, x.device.index or 0)
    if chosen is None:
        raise RuntimeError(f"no kernel for {rows} rows and {channels} x {columns} weights on {x.device}")
    return _launched(chosen, x, weight, None, channels, bias)


def dequantize_by_kernel(
    codes: Tensor, groups: Tensor, channels: int, columns: int, group: int, half: bool, dtype: torch.dtype
) -> Tensor | None:
    """Return a 4-bit matrix ``[channels, columns]`` in 16 bits, or None if there is no kernel for it.

    Codes, scales and zeros are as for :func:`int4`; the kernel writes bf16 and fp16.
    """
    if not codes.is_cuda or dtype not in (torch.bfloat16, torch.float16) or columns % layout.COLUMNS or nvrtc.missing():
        return None
    if not dequantizes(group, half, dtype == torch.bfloat16, codes.device.index or 0):
        return None
    out = codes.new_empty(channels, columns, dtype=dtype)
    with torch.cuda.device_of(codes):
        build.dequantize(codes, groups, group, half, out)
    return out


@lru_cache(maxsize=64)
def dequantizes(group: int, half: bool, bf16: bool, device: int) -> bool:
    """Return True if the kernel that dequantizes compiles for a GPU; otherwise warn and return False."""
    try:
        build.dequantizer(group, half, bf16, device)
    except RuntimeError as error:
        message = " ".join(str(error).split())[:200]
        warnings.warn(f"4-bit weights are dequantized without kvbench's kernel: {message}", stacklevel=2)
        return False
    return True


def _launched(
    chosen: tuple[Build, int], x: Tensor, weight: Tensor, groups: Tensor | None, channels: int, bias: Tensor | None
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if flat.data_ptr() % 16 or not flat.is_contiguous():
        flat = flat.clone(memory_format=torch.contiguous_format)
    out = x.new_empty(*x.shape[:-1], channels)
    with torch.cuda.device_of(x):
        build.launch_build(chosen[0], flat, weight, groups, channels, bias, out, chosen[1])
    return out


@lru_cache(maxsize=1024)
def configuration(
    rows: int, channels: int, columns: int, group: int, half: bool, bf16: bool, device: int
) -> tuple[Build, int] | None:
    """Return the configuration for a product on a GPU, or None, with a warning, if it does not compile or run there.

    `group` is 0 for weights of 16 bits.

    Returns:
        The configuration, compiled, and the largest number of CTAs of a multiprocessor.
    """
    shared = int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED))
    chosen, ctas = choose(rows, channels, columns, group, half, bf16, shared)
    try:
        function = build.function(chosen, rows, columns, device)
        if not function.fit:
            raise RuntimeError(f"a CTA of {function.shared} bytes of shared memory does not fit a multiprocessor")
    except RuntimeError as error:
        message = " ".join(str(error).split())[:200]
        bits = 4 if group else 16
        warnings.warn(
            f"products of {rows} rows with {channels} x {columns} weights of {bits} bits do not use kvbench's kernel: "
            f"{message}",
            stacklevel=2,
        )
        return None
    return chosen, ctas


def choose(
    rows: int, channels: int, columns: int, group: int, half: bool, bf16: bool, shared: int = SHARED
) -> tuple[Build, int]:
    """Return the fastest configuration that fits into shared memory, and the number of CTAs per multiprocessor.

    Which candidates are faster was measured on an H200 (``python -m kvbench.bench products``; results/h200). If none
    fits, the last is returned, which has the smallest buffers. `shared` is the bytes of shared memory that the device
    allows a CTA; other arguments are as for :func:`configuration`.
    """
    if group:
        base = Build(4, bf16, rows > 8, group=group, half=half, chains=2)
    else:
        base = Build(16, bf16, rows > 8, unit=64, half=False, spread=True, hint=2)
    for chosen, ctas in candidates(base, channels):
        # the system takes 1 KiB for each CTA, which the limit for a single CTA already leaves out
        if ctas * (chosen.shared(rows, columns) + 1024) <= shared + 1024:
            break
    return chosen, ctas


def candidates(base: Build, channels: int) -> list[tuple[Build, int]]:
    """Return configurations to try for a product, the fastest first, each with its CTAs per multiprocessor.

    They are copies of `base` with other tiles, warps, stages, units and places of x (``keep``).
    """
    tiles = -(-channels // layout.ROWS)
    ring = replace(base, keep=False)
    last = [(replace(ring, warps=8, stages=3), 1), (replace(ring, warps=4, stages=2), 1)]
    few, some = tiles <= 2 * PROCESSORS, tiles <= 3 * PROCESSORS
    if base.bits == 16:
        if base.wide:
            with_input = [] if some else [(replace(base, stages=4), 1)]
            return [*with_input, (replace(ring, warps=16, stages=3), 1), *last]
        with_input = [] if tiles <= 8 * PROCESSORS else [(replace(base, stages=3, unit=128), 1)]
        return [*with_input, (replace(ring, stages=3, unit=128), 1), *last]
    if base.wide:
        with_input = [(replace(base, tiles=1, stages=6) if some else replace(base, tiles=2, stages=3), 1)]
        return [*([] if few else with_input), (replace(ring, tiles=2, stages=3), 1), *last]
    if few:  # a block for each multiprocessor, so that x is read once anyway
        return [(replace(ring, tiles=2, warps=16, stages=3), 1), (replace(ring, tiles=2, stages=4), 1), *last]
    if some:
        return [(replace(base, tiles=3, stages=4), 1), *last]
    most = [-(-tiles // (size * PROCESSORS)) * size for size in (4, 2)]  # tiles of the busiest multiprocessor
    narrow = most[0] > 1.05 * most[1]
    first = replace(base, tiles=2, warps=16, stages=3) if narrow else replace(base, tiles=4, stages=3)
    return [(first, 1), (replace(base, tiles=2, stages=3), 1), *last]
