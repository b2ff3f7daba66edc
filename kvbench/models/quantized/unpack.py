"""Codes, scales and zero points of 4-bit weights, read from the packed tensors of AWQ and GPTQ checkpoints.

Both formats store eight codes in each int32. A weight of input channel k in group g of output channel n is
``(code[n, k] - zero[n, g]) * scale[n, g]``.
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
    """Return the same weights in groups of a size that the product supports, by repeating scales and zero points.

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

    `order` has, for each nibble, the lowest first, the column of its code among eight consecutive ones.
    """
    out = packed.new_empty((*packed.shape, COUNT), dtype=torch.uint8)
    for nibble, column in enumerate(order):
        out[..., column] = ((packed >> (4 * nibble)) & 15).to(torch.uint8)
    return out.flatten(-2)


def _sixteen(scales: Tensor, layer: str) -> Tensor:
    """Return scales as fp16 or bf16, without rounding them. Raises ModelError if they have more bits."""
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
