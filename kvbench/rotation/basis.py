"""Transforms of keys or values to another basis, and of queries or outputs to match, so that attention stays the same.

On a GPU, a kernel rotates the few tokens of a decode step.

A captured step and an eager one use the same kernels, so that both store the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
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
        """Factor of the dual matrix and of the inverse (:class:`Transform`)."""
        return 1 / (self.block * self.scale)


def rotates_steps(x: Tensor) -> bool:
    """Return True if kernels rotate `x` ``[B, heads, n, D]``: with Triton, on a GPU, n being at most :data:`STEP`."""
    return x.is_cuda and x.shape[-2] <= STEP and _triton()


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def rotated(x: Tensor, matrix: Tensor, butterfly: Butterfly | None, use: Use) -> Tensor:
    """Return the tensor of a decode step multiplied by a matrix of a transform, in the memory layout of the input.

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
    """Return what a kernel needs of a transform: signs, factor, and levels of the butterfly (0 without one).

    The arguments are those of :func:`rotated`. For a transform without signs, `matrix` takes their place.
    """
    if butterfly is None:
        return matrix, 1.0, 0
    scale = butterfly.scale if use == "forward" else butterfly.dual_scale
    return matrix if butterfly.signs is None else butterfly.signs, scale, butterfly.block.bit_length() - 1


def per_program(lines: int, dense: bool) -> int:
    """Return how many tokens each program rotates: 16 if it reads a matrix and there are many lines, else 1.

    `lines` is the number of tokens of all heads, many if above :data:`PROGRAMS`; `dense` is True for a matrix.
    """
    return 16 if dense and lines > PROGRAMS else 1


def warps(levels: int) -> int:
    """Return the number of warps of a program: one for a butterfly, four for a matrix in registers."""
    return 4 if levels == 0 else 1


def width(channels: int) -> int:
    """Return the smallest power of two that is at least the number of channels."""
    return 1 << (channels - 1).bit_length()


#: elements that are converted to fp32 at a time: 64 MiB
ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Transform:
    """The basis in which a cache stores the keys, or the values, of a layer: a matrix per layer or per KV head.

    Keys k are stored as ``k M``; queries are multiplied by the dual matrix ``N = inverse(M) transposed``, so that
    ``(q N) (k M)^T = q k^T``. Values v are stored as ``v M``, and the output o of attention over them is multiplied by
    ``inverse(M)``. If M is orthogonal, M and N are the same. All products are computed in fp32, and the results have
    the dtype of the input: in bf16, rounding within the product would move the softmax of models with large keys.

    Args:
        forward: M, fp32 ``[D, D]``; or ``[H, D, D]``, with a matrix per KV head.
        dual: N, of the same shape.
        butterfly: the same transform as signs and Hadamard matrices; None if it is not of that kind.
    """

    forward: Tensor
    dual: Tensor
    butterfly: Butterfly | None = None
    inverse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inverse", self.dual.transpose(-1, -2).contiguous())

    @classmethod
    def of(cls, matrix: Tensor) -> Transform:
        """Return the transform by an invertible matrix, ``[D, D]`` or ``[H, D, D]``; it need not be orthogonal."""
        inverse = torch.linalg.inv(matrix.double())
        return cls(matrix.float().contiguous(), inverse.transpose(-1, -2).float().contiguous())

    def to(self, device: torch.device) -> Transform:
        """Return the same transform with its matrices on a device."""
        fly = self.butterfly
        if fly is not None and fly.signs is not None:
            fly = replace(fly, signs=fly.signs.to(device))
        return Transform(self.forward.to(device), self.dual.to(device), fly)

    @property
    def heads(self) -> int | None:
        """Number of KV heads with a matrix each; None if one matrix serves all heads."""
        return self.forward.shape[0] if self.forward.ndim == 3 else None

    def of_heads(self, first: int, count: int) -> Transform:
        """Return the transform of `count` KV heads from `first` on. Repeated calls return the same object."""
        return _of_heads(self, first, count)

    def keys(self, keys: Tensor) -> Tensor:
        """Return keys ``[B, H, n, D]`` as the cache stores them."""
        return self._product(keys, "forward")

    def queries(self, queries: Tensor) -> Tensor:
        """Return queries ``[B, Hq, n, D]`` for products with stored keys, by the dual matrix of their KV heads."""
        return self._product(queries, "dual")

    def values(self, values: Tensor) -> Tensor:
        """Return values ``[B, H, n, D]`` as the cache stores them."""
        return self._product(values, "forward")

    def back(self, outputs: Tensor) -> Tensor:
        """Undo the transform of outputs ``[B, Hq, n, D]`` over stored values, or of stored keys or values themselves.

        The number of heads may be any multiple of that of the KV heads.
        """
        return self._product(outputs, "inverse")

    def _product(self, x: Tensor, use: Use) -> Tensor:
        matrix: Tensor = getattr(self, use)
        if rotates_steps(x):
            return rotated(x, matrix, self.butterfly, use)
        if matrix.ndim == 2:
            return _product(x, matrix)
        batch, heads, count, channels = x.shape  # the query heads of a KV head are adjacent
        grouped = x.reshape(batch, len(matrix), heads // len(matrix) * count, channels)
        return _product(grouped, matrix).reshape(batch, heads, count, channels)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _of_heads(transform: Transform, first: int, count: int) -> Transform:
    own = slice(first, first + count)
    return Transform(transform.forward[own].contiguous(), transform.dual[own].contiguous())


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply `x` by a matrix in fp32, a few tokens at a time, so that a long prompt is not converted as a whole."""
    if x.dtype == torch.float32 or x.numel() <= ELEMENTS:
        return (x.float() @ matrix).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step = max(1, ELEMENTS * x.shape[-2] // x.numel())
    for first in range(0, x.shape[-2], step):
        out[..., first : first + step, :] = x[..., first : first + step, :].float() @ matrix
    return out
