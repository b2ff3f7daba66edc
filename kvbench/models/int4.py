"""4-bit weights for drafting, computed by rounding to nearest and kept in addition to the full-precision weights.

QuantSpec drafts with 4-bit weights and verifies with the full-precision ones, so both stay in memory (Tiwari et al.
2025, sec. 4; the authors' code has 4-bit weights in the feed-forward layers only). Products use torch's own
``_weight_int4pack_mm``, without another library. Quantization is asymmetric, in groups of 128 input channels (64 or 32
if 128 does not divide their number): ``w^ = (q - 8) s + z``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from kvbench.errors import ModelError
from kvbench.util.attachment import attached, attachment

Which = Literal["ffn", "all"]

#: input channels that share a scale: the first that divides their number is used
GROUPS = (128, 64, 32)
#: tiles of 16 input channels that a CUDA lane reads at once: the first possible number is used
INNER_K_TILES = (8, 4, 2)


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights.

    Args:
        linear: the layer in full precision. Its weights ``[out, in]`` are quantized to 4 bits. Its bias is not copied:
            both layers use the same tensor.

    Raises:
        ModelError: `in` is not divisible by 32, or `out` is not divisible by 16.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        group = next((g for g in GROUPS if columns % g == 0), None)
        if group is None or rows % 16:
            raise ModelError(
                f"a linear layer with {columns} input and {rows} output channels cannot have 4-bit weights: torch's "
                f"int4 product needs input channels divisible by {min(GROUPS)} and output channels divisible by 16.\n"
                "  hint: set method.draft_weights=same"
            )
        self.group, self.bias, self.on_cuda = group, linear.bias, linear.weight.is_cuda
        # The product on CUDA accepts only bf16; on a CPU it accepts the model's dtype.
        self.dtype = torch.bfloat16 if self.on_cuda else linear.weight.dtype
        codes, scales = quantize(linear.weight.detach(), group, self.dtype)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("packed", self._pack(codes, columns), persistent=False)

    def _pack(self, codes: Tensor, columns: int) -> Tensor:
        if not self.on_cuda:
            return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        tiles = next(t for t in INNER_K_TILES if columns % (16 * t) == 0)
        nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        return torch.ops.aten._convert_weight_to_int4pack(nibbles, tiles)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output ``[..., out]`` for inputs `x` ``[..., in]``, in the dtype of `x`."""
        product = torch.ops.aten._weight_int4pack_mm if self.on_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        flat = x.reshape(-1, x.shape[-1]).to(self.dtype).contiguous()
        out = product(flat, self.packed, self.group, self.scales).to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    @property
    def nbytes(self) -> int:
        """Size of the codes and scales in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.scales))


def quantize(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize a weight matrix asymmetrically to 4 bits: weight = (code - 8) * scale + zero.

    Args:
        weight: weights ``[out, in]``.
        group: number of consecutive input channels that share a scale and a zero; it must divide `in`.
        dtype: dtype of scales and zeros. Codes are computed after scales and zeros have been rounded to it.

    Returns:
        A pair: the codes, 0 to 15, uint8 ``[out, in]``; and the scales and zeros, ``[in / group, out, 2]``. A zero is
        the weight that code 8 stands for, as torch's int4 product defines it, not the code of weight 0.
    """
    grouped = weight.float().unflatten(-1, (-1, group))
    low, high = torch.aminmax(grouped, dim=-1)
    scale = ((high - low) / 15).clamp(min=1e-8).to(dtype)
    zero = (low + 8 * scale.float()).to(dtype)
    codes = ((grouped - zero.float()[..., None]) / scale.float()[..., None] + 8).round_().clamp_(0, 15)
    return codes.flatten(-2).to(torch.uint8), torch.stack([scale, zero], -1).transpose(0, 1).contiguous()


class DraftLinear(nn.Module):
    """A linear layer with two sets of weights, one in full precision and one in 4 bits for drafting.

    Args:
        exact: the linear layer in full precision.
        switch: selects the set that :meth:`forward` uses; one switch serves all layers of the model.
    """

    def __init__(self, exact: nn.Linear, switch: Switch) -> None:
        super().__init__()
        self.exact, self.draft, self.switch = exact, Int4Linear(exact), switch

    @property
    def weight(self) -> Tensor:
        """The full-precision weights. Some models read ``layer.weight.dtype``, so the attribute must exist."""
        return self.exact.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output ``[..., out]`` for inputs `x` ``[..., in]``.

        Inside :meth:`Switch.drafting` the 4-bit weights are used, otherwise those in full precision.
        """
        return self.draft(x) if self.switch.on else self.exact(x)


class Switch:
    """Switch of a model between full-precision and 4-bit weights; full precision outside of :meth:`drafting`.

    Args:
        which: kind of linear layers that have 4-bit weights in addition: ``ffn`` for those outside attention, ``all``
            for those in attention too.
    """

    def __init__(self, which: Which) -> None:
        self.which, self.on = which, False

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Make the layers use their 4-bit weights inside a ``with`` block."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


def attach(model: nn.Module, which: Which) -> Switch:
    """Add 4-bit weights to the linear layers of a model, unless it already has them, and return their switch.

    Args:
        model: causal language model with its decoder layers in ``model.model.layers``.
        which: ``ffn`` for the linear layers outside attention, ``all`` for those in attention too. The output head is
            never quantized.

    Raises:
        ModelError: the model has no decoder layers, or they contain no linear layers in full precision (because the
            checkpoint is already quantized), or a linear layer has a number of channels that int4 does not support.
    """
    switch: Switch | None = attachment(model).int4
    if switch is not None:
        if switch.which == which:
            return switch
        detach(model)
    switch = Switch(which)
    linears = [
        (parent, name, child)
        for layer in decoder_layers(model)
        for path, parent in layer.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and (which == "all" or ("attn" not in path and "attention" not in path))
    ]
    if not linears:
        raise ModelError(
            f"{type(model).__name__} has no linear layers in full precision that could be quantized to 4 bits.\n"
            "  hint: set method.draft_weights=same"
        )
    drafts = [(parent, name, DraftLinear(child, switch)) for parent, name, child in linears]
    for parent, name, module in drafts:
        setattr(parent, name, module)
    attachment(model).int4 = switch
    return switch


def detach(model: nn.Module) -> None:
    """Remove the 4-bit weights that :func:`attach` added."""
    known = attached(model)
    if known is None or known.int4 is None:
        return
    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, DraftLinear):
                    setattr(parent, name, child.exact)
    known.int4 = None


def nbytes(model: nn.Module) -> int:
    """Return the size of a model's 4-bit weights in bytes."""
    return sum(module.nbytes for module in model.modules() if isinstance(module, Int4Linear))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a causal language model. Raises ModelError if it has no ``model.layers``."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} has no decoder layers in model.layers whose weights could be "
            "quantized to 4 bits.\n"
            "  hint: set method.draft_weights=same"
        )
    return layers
