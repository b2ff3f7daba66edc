"""Rotation of the few tokens of a decode step on a GPU, by one launch for queries, keys and values.

A captured step and an eager one use the same kernels, so that both store the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvbench.rotation.basis import Transform

#: tokens per row up to which tokens count as those of a decode step (drafts and their verification included)
STEP = 66
#: programs above which each program rotates several tokens, so that a matrix is read less often
PROGRAMS = 2048

Use = Literal["forward", "dual", "inverse"]


def steps(x: Tensor) -> bool:
    """Return True if the kernels rotate a tensor ``[B, heads, n, D]``: that of a decode step, on a GPU."""
    return x.is_cuda and x.shape[-2] <= STEP


def rotated(x: Tensor, transform: Transform, use: Use) -> Tensor:
    """Return a tensor of a step times a matrix of a transform, with the order of the input's strides.

    Args:
        x: ``[B, heads, n, D]``.
        transform: the transform.
        use: which of its matrices.
    """
    from kvbench.rotation.rotate_kernel import rotate_one

    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)
    batch, heads, count, channels = x.shape
    lines = batch * count
    tokens = per_program(heads * lines, transform)
    matrix, signs, scale, levels = parts(transform, use)
    with torch.cuda.device_of(x):
        rotate_one[(heads, -(-lines // tokens))](
            x, out, matrix, matrix.stride(0) if matrix.ndim == 3 else 0, signs, scale,
            lines, count, heads // (transform.heads or 1), *x.stride()[:3], *out.stride()[:3],
            channels, width(channels), levels, signs is not matrix, use == "inverse", tokens, num_warps=warps(levels),
        )  # fmt: skip
    return out


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_transform: Transform | None,
    value_transform: Transform | None,
    key_target: Tensor | None = None,
    value_target: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries, keys and values of a step in one launch.

    Args:
        query: ``[B, Hq, q, D]``.
        key: ``[B, H, q, D]``.
        value: ``[B, H, q, Dv]``.
        key_transform: basis of the stored keys; None for that of the model.
        value_transform: basis of the stored values; None for that of the model.
        key_target: buffer ``[B, H, room, D]``, contiguous, into which to write the keys; None for a new tensor.
        value_target: the same for the values.
        places: for each row, the index along the room of its first key and of its first value, int32 ``[B, 2]``, read
            on the device; None if new tensors are returned.

    Returns:
        The queries ``[B, Hq, q, D]``, and the tensors that hold the keys and the values.
    """
    from kvbench.rotation.rotate_kernel import rotate_step

    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, query_heads, count, _ = query.shape
    heads, lines = key.shape[1], batch * count
    turned = query if key_transform is None else torch.empty_like(query, memory_format=torch.contiguous_format)
    keys, values = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if target is None else target
        for x, target in ((key, key_target), (value, value_target))
    )
    programs = (query_heads if key_transform is not None else 0) + 2 * heads
    tokens = per_program(programs * lines, key_transform, value_transform)
    matrix, key_signs, key_scale, key_levels = parts(key_transform, "forward", key)
    dual, _, dual_scale, _ = parts(key_transform, "dual", key)
    other, value_signs, value_scale, value_levels = parts(value_transform, "forward", value)
    with torch.cuda.device_of(query):
        rotate_step[(programs, -(-lines // tokens))](
            query, turned, key, keys, value, values, key if places is None else places,
            matrix, dual, key_signs, key_scale, dual_scale, matrix.stride(0) if matrix.ndim == 3 else 0,
            other, value_signs, value_scale, other.stride(0) if other.ndim == 3 else 0,
            lines, count, query_heads, heads, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            keys.shape[2], values.shape[2],
            key.shape[3], width(key.shape[3]), key_levels, key_signs is not matrix,
            value.shape[3], width(value.shape[3]), value_levels, value_signs is not other,
            key_transform is not None, value_transform is not None, tokens, places is not None,
            num_warps=max(warps(key_levels), warps(value_levels)),
        )  # fmt: skip
    return turned, keys, values


def parts(transform: Transform | None, use: Use, unused: Tensor | None = None) -> tuple[Tensor, Tensor, float, int]:
    """Return what the kernels need of a transform: matrix, signs (the matrix if there are none), factor and levels.

    Args:
        transform: the transform; None where a tensor is only copied.
        use: which of its matrices.
        unused: tensor to return as matrix and signs if `transform` is None.
    """
    if transform is None:
        assert unused is not None
        return unused[0, 0], unused[0, 0], 1.0, 1
    matrix: Tensor = getattr(transform, use)
    fly = transform.butterfly
    if fly is None:
        return matrix, matrix, 1.0, 0
    scale = fly.scale if use == "forward" else fly.dual_scale
    return matrix, matrix if fly.signs is None else fly.signs, scale, fly.block.bit_length() - 1


def per_program(lines: int, *transforms: Transform | None) -> int:
    """Return how many tokens of a head a program rotates: several if many programs would each read a matrix."""
    dense = any(transform is not None and transform.butterfly is None for transform in transforms)
    return 16 if dense and lines > PROGRAMS else 1


def warps(levels: int) -> int:
    """Return the number of warps of a program: one for a butterfly, four for a matrix in registers."""
    return 4 if levels == 0 else 1


def width(channels: int) -> int:
    """Return the smallest power of two that is at least the number of channels."""
    return 1 << (channels - 1).bit_length()
