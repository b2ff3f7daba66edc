"""Rotation of a decode step's queries, keys and values by one launch on a GPU, which can also store keys and values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvbench.rotation.basis import Transform, per_program, transform_parts, warps, width


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
    transforms = [basis for basis in (key_transform, value_transform) if basis is not None]
    tokens = per_program(programs * lines, any(transform.butterfly is None for transform in transforms))
    matrix, key_signs, key_scale, key_levels = _transform_or_copy(key_transform, "forward", key)
    dual, _, dual_scale, _ = _transform_or_copy(key_transform, "dual", key)
    other, value_signs, value_scale, value_levels = _transform_or_copy(value_transform, "forward", value)
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


def _transform_or_copy(
    transform: Transform | None, use: Literal["forward", "dual"], unused: Tensor
) -> tuple[Tensor, Tensor, float, int]:
    """Return a transform's matrix, signs, factor and levels; for None, placeholders, because the kernel only copies."""
    if transform is None:
        # one level: with none it would count as a dense matrix, for which a program has more warps
        return unused[0, 0], unused[0, 0], 1.0, 1
    matrix = transform.forward if use == "forward" else transform.dual
    return matrix, *transform_parts(matrix, transform.butterfly, use)
