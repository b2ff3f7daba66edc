"""Rounding of weights to 4 bits, to the nearest code, without data.

Each group of consecutive input channels has a scale in 16 bits and an integer zero point, as in the checkpoints of AWQ
and GPTQ. The range of a group is extended to contain 0, so that the zero point is a code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.errors import ModelError
from kvbench.models.quantized.unpack import GROUPS, Codes

#: output channels that are rounded at a time, so that copies in fp32 stay small
SLICE = 4096
#: largest code
TOP = 15


def group_for(rows: int, columns: int, layer: str, remedy: str) -> int:
    """Return the group size for a matrix: the largest of those supported that divides the number of columns.

    Columns are input channels. Rows (output channels), layer and remedy, what to set instead, are for the message.

    Raises:
        ModelError: 32 does not divide the number of input channels.
    """
    group = next((size for size in GROUPS if columns % size == 0), None)
    if group is None:
        raise ModelError(
            f"layer {layer} has {columns} input and {rows} output channels and cannot have 4-bit weights: the number "
            f"of input channels must be divisible by {min(GROUPS)}.\n  hint: {remedy}"
        )
    return group


def round_weights(weight: Tensor, layer: str, remedy: str) -> Codes:
    """Round weights ``[out, in]`` of any floating-point dtype to 4 bits.

    Scales are fp16, which is more precise than bf16; only a matrix whose scales fp16 cannot represent has scales in
    bf16. Codes are computed after the scales have been rounded to 16 bits. The message of an error ends with `remedy`,
    which says what to set instead.

    Raises:
        ModelError: 32 does not divide the number of input channels, or a weight is NaN or Inf.
    """
    rows, columns = weight.shape
    group = group_for(rows, columns, layer, remedy)
    parts = [weight.detach()[start : start + SLICE].unflatten(-1, (-1, group)) for start in range(0, rows, SLICE)]
    steps = [_group_steps(part) for part in parts]
    if not all(bool((step.isfinite() & low.isfinite()).all()) for step, low in steps):
        raise ModelError(
            f"layer {layer}: its weights contain NaN or Inf and cannot be rounded to 4 bits.\n"
            "  hint: copy or download the checkpoint again"
        )
    steps16 = torch.cat([step for step, _ in steps])
    dtype = _dtype(steps16)
    scales = steps16.to(dtype)
    codes, zeros, start = [], [], 0
    for part, (_, low) in zip(parts, steps, strict=True):
        scale = scales[start : start + len(part)].float()
        zero = (-low / scale).round_().clamp_(0, TOP)
        # clamped, because a scale that was rounded down puts the ends of the range beyond the codes
        code = (part.float() / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, TOP)
        codes.append(code.flatten(-2).to(torch.uint8))
        zeros.append(zero.to(torch.uint8))
        start += len(part)
    return Codes(torch.cat(codes), scales, torch.cat(zeros))


def _group_steps(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step and the smallest value of each group, in fp32 ``[out, in / group]``; 0 is in the range."""
    low, high = torch.aminmax(grouped, dim=-1)
    low, high = low.float().clamp(max=0.0), high.float().clamp(min=0.0)
    step = (high - low) / TOP
    return torch.where(step > 0, step, 1.0), low


def _dtype(steps: Tensor) -> torch.dtype:
    """Return the dtype for scales: fp16 if it represents all of them with full precision, else bf16."""
    limits = torch.finfo(torch.float16)
    low, high = steps.min(), steps.max()
    return torch.float16 if limits.tiny <= float(low) and float(high) <= limits.max else torch.bfloat16
