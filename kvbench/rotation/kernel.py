"""Rotation of the few tokens of a decode step on a GPU.

A captured step and an eager one use the same kernels, so that both store the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

#: tokens per row up to which tokens count as those of a decode step (drafts and their verification included)
STEP = 66
#: programs above which each program rotates several tokens, so that a matrix is read less often
PROGRAMS = 2048

Use = Literal["forward", "dual", "inverse"]


@dataclass(frozen=True, eq=False)
class Butterfly:
    """A transform whose matrix is a product of signs and Hadamard matrices, which kernels compute without the matrix.

    Args:
        block: length of the blocks, a power of two.
        scale: factor of the forward matrix: ``M = signs * H * scale``.
        signs: fp32 ``[D]``; None for no signs.
    """

    block: int
    scale: float
    signs: Tensor | None = None

    @property
    def dual_scale(self) -> float:
        """Factor of the dual matrix, and of the inverse."""
        return 1 / (self.block * self.scale)


def rotates_steps(x: Tensor) -> bool:
    """Return True if the kernels rotate a tensor ``[B, heads, n, D]``: that of a decode step, on a GPU."""
    return x.is_cuda and x.shape[-2] <= STEP and _triton()


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def rotated(x: Tensor, matrix: Tensor, butterfly: Butterfly | None, use: Use) -> Tensor:
    """Return a tensor of a step times a matrix of a transform, with the order of the input's strides.

    Args:
        x: ``[B, heads, n, D]``.
        matrix: ``[D, D]`` or ``[H, D, D]``.
        butterfly: the transform as signs and Hadamard matrices; None if it is not of that kind.
        use: which of the transform's matrices `matrix` is.
    """
    from kvbench.rotation.rotate_kernel import rotate_one

    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)
    batch, heads, count, channels = x.shape
    lines = batch * count
    tokens = per_program(heads * lines, butterfly is None)
    signs, scale, levels = transform_parts(matrix, butterfly, use)
    group = 1 if matrix.ndim == 2 else heads // len(matrix)
    with torch.cuda.device_of(x):
        rotate_one[(heads, -(-lines // tokens))](
            x, out, matrix, matrix.stride(0) if matrix.ndim == 3 else 0, signs, scale,
            lines, count, group, *x.stride()[:3], *out.stride()[:3],
            channels, width(channels), levels, signs is not matrix, use == "inverse", tokens, num_warps=warps(levels),
        )  # fmt: skip
    return out


def transform_parts(matrix: Tensor, butterfly: Butterfly | None, use: Use) -> tuple[Tensor, float, int]:
    """Return the signs of a transform (`matrix` if there are none), its factor, and the levels of its butterfly.

    The arguments are those of :func:`rotated`. A transform without a butterfly has 0 levels.
    """
    if butterfly is None:
        return matrix, 1.0, 0
    scale = butterfly.scale if use == "forward" else butterfly.dual_scale
    return matrix if butterfly.signs is None else butterfly.signs, scale, butterfly.block.bit_length() - 1


def per_program(lines: int, dense: bool) -> int:
    """Return how many tokens of a head a program rotates: several if many programs would each read a matrix.

    `lines` is the number of tokens of all heads; `dense` is True if programs read a matrix.
    """
    return 16 if dense and lines > PROGRAMS else 1


def warps(levels: int) -> int:
    """Return the number of warps of a program: one for a butterfly, four for a matrix in registers."""
    return 4 if levels == 0 else 1


def width(channels: int) -> int:
    """Return the smallest power of two that is at least the number of channels."""
    return 1 << (channels - 1).bit_length()
