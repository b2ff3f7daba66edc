"""Codes, scales and zero points of 4-bit weights: read from AWQ and GPTQ checkpoints, or rounded to the nearest code.

Rounding needs no data.

Both formats store eight codes in each int32. A weight of input channel k in group g of output channel n is
``(code[n, k] - zero[n, g]) * scale[n, g]``.

Each group of consecutive input channels has a scale in 16 bits and an integer zero point, as in the checkpoints of AWQ
and GPTQ. The range of a group is extended to contain 0, so that the zero point is a code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.errors import ModelError
from kvbench.models.quantized.formats import Format

#: codes in an int32
COUNT = 8
#: the output channel, of eight consecutive ones, whose code AWQ stores in each nibble, the lowest one first
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: numbers of input channels per group that the product supports, the largest first
GROUPS = (128, 64, 32)


class Codes(NamedTuple):
    """The 4-bit weights of a linear layer.

    Args:
        codes: the codes, 0 to 15, uint8 ``[out, in]``.
        scales: fp16 or bf16 ``[out, in / group]``.
        zeros: code of the weight 0, 0 to 16, uint8 ``[out, in / group]``.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor


def unpacked(tensors: dict[str, Tensor], layout: Format, layer: str) -> Codes:
    """Unpack the weights of a linear layer; the dequantized weights are those of the checkpoint, bit for bit.

    In the checkpoint, ``qweight`` is int32, ``[in, out / 8]`` for AWQ and ``[in / 8, out]`` for GPTQ. ``qzeros`` is
    int32 ``[in / group, out / 8]``, and ``scales`` are ``[in / group, out]``. GPTQ may have ``g_idx``, the group of
    each input channel, ``[in]``.

    Raises:
        ModelError: the tensors are missing or have impossible dtypes or shapes, the group size is not supported,
            channels of a group are not consecutive, or the scales do not fit into 16 bits.
    """
    missing = [name for name in ("qweight", "qzeros", "scales") if name not in tensors]
    if missing:
        raise ModelError(
            f"layer {layer}: the checkpoint lacks its {', '.join(missing)}.\n  hint: copy or download it again"
        )
    weight, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    for name, packed in (("qweight", weight), ("qzeros", zeros)):
        if packed.dtype != torch.int32 or packed.ndim != 2:
            raise ModelError(
                f"layer {layer}: its {name} is {str(packed.dtype).removeprefix('torch.')} {list(packed.shape)}, but "
                "codes of 4 bits are packed in a matrix of int32.\n  hint: copy or download the checkpoint again"
            )
    order = AWQ_ORDER if layout.method == "awq" else tuple(range(COUNT))
    if layout.method == "awq":  # eight codes of an int32 are eight outputs of a channel; GPTQ's are eight inputs
        codes = _nibbles(weight, order).T
    else:
        codes = _nibbles(weight.T, order)
    points = (_nibbles(zeros, order) + layout.shift).T
    rows, columns = codes.shape
    group = layout.group or columns
    blocks = -(-columns // group)
    if points.shape != (rows, blocks) or scales.shape != (blocks, rows) or columns % group:
        raise ModelError(
            f"layer {layer}: the shapes of qweight {list(weight.shape)}, qzeros {list(zeros.shape)} and scales "
            f"{list(scales.shape)} do not belong to groups of {group} input channels.\n"
            "  hint: use the config.json that belongs to these weights"
        )
    if "g_idx" in tensors:
        index = tensors["g_idx"].to(torch.long)
        if not torch.equal(index, torch.arange(columns, device=index.device) // group):
            raise ModelError(
                f"layer {layer}: its input channels are in act-order (g_idx), which kvbench does not read.\n"
                "  hint: choose a checkpoint with desc_act=false, or the unquantized one with model.weights=int4"
            )
    return regrouped(Codes(codes.contiguous(), _sixteen(scales.T, layer), points.contiguous()), layer)


def regrouped(weights: Codes, layer: str) -> Codes:
    """Return the same weights in smaller groups, of a size in :data:`GROUPS`; scales and zero points are repeated.

    Raises:
        ModelError: 32 does not divide the group size.
    """
    columns, blocks = weights.codes.shape[1], weights.scales.shape[1]
    group = columns // blocks
    size = next((size for size in GROUPS if group % size == 0), None)
    if size is None:
        raise ModelError(
            f"layer {layer}: groups of {group} input channels are not supported; the group size must be divisible by "
            f"{min(GROUPS)}.\n  hint: use the unquantized checkpoint with model.weights=int4"
        )
    times = group // size
    return Codes(weights.codes, *(x.repeat_interleave(times, 1).contiguous() for x in weights[1:]))


def _nibbles(packed: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the codes of int32 ``[rows, columns / 8]`` as uint8 ``[rows, columns]``.

    `order` lists the column (0 to 7) of each nibble's code among eight consecutive ones, lowest nibble first.
    """
    out = packed.new_empty((*packed.shape, COUNT), dtype=torch.uint8)
    for nibble, column in enumerate(order):
        out[..., column] = ((packed >> (4 * nibble)) & 15).to(torch.uint8)
    return out.flatten(-2)


def _sixteen(scales: Tensor, layer: str) -> Tensor:
    """Return scales as fp16 or bf16, without rounding; raises ModelError if neither holds all of them exactly."""
    if scales.dtype in (torch.float16, torch.bfloat16):
        return scales.contiguous()
    for dtype in (torch.float16, torch.bfloat16):
        short = scales.to(dtype)
        if torch.equal(short.to(scales.dtype), scales):
            return short.contiguous()
    raise ModelError(
        f"layer {layer}: its scales are {str(scales.dtype).removeprefix('torch.')} and would lose precision in 16 bits."
        "\n  hint: use the unquantized checkpoint with model.weights=int4"
    )


#: output channels that are rounded at a time, so that copies in fp32 stay small
SLICE = 4096
#: largest code
TOP = 15


def group_for(rows: int, columns: int, layer: str, remedy: str) -> int:
    """Return the group size for a matrix: the largest of those supported that divides the number of columns.

    Columns are input channels. The other arguments are for the error message: the rows (output channels), the layer's
    name, and `remedy`, which says what to set instead.

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
    """Return the step and the smallest value of each group, fp32 ``[out, in / group]``; the range includes 0."""
    low, high = torch.aminmax(grouped, dim=-1)
    low, high = low.float().clamp(max=0.0), high.float().clamp(min=0.0)
    step = (high - low) / TOP
    return torch.where(step > 0, step, 1.0), low


def _dtype(steps: Tensor) -> torch.dtype:
    """Return the dtype for scales: fp16 if it represents all of them with full precision, else bf16."""
    limits = torch.finfo(torch.float16)
    low, high = steps.min(), steps.max()
    return torch.float16 if limits.tiny <= float(low) and float(high) <= limits.max else torch.bfloat16
