"""Four-bit weights for drafting, rounded to nearest when they are attached and kept next to the exact weights.

QuantSpec drafts with 4-bit weights and verifies with the exact ones, so both stay in memory (Tiwari et al. 2025,
sec. 4; the authors' code has 4-bit weights in the feed-forward layers only). Products use torch's own
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
        linear: the layer whose weights ``[out, in]`` are rounded to nearest; its bias is shared, not copied.

    Raises:
        ModelError: `in` is not divisible by 32, or `out` not by 16.
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
        """Return the product ``[..., out]`` for `x` ``[..., in]``, in the dtype of `x`."""
        product = torch.ops.aten._weight_int4pack_mm if self.on_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        flat = x.reshape(-1, x.shape[-1]).to(self.dtype).contiguous()
        out = product(flat, self.packed, self.group, self.scales).to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    @property
    def nbytes(self) -> int:
        """Size of the codes and scales in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.scales))


def quantize(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes 0..15, uint8 ``[out, in]``, and scales with zeros (the value of code 8), ``[in / group, out, 2]``.

    Scales and zeros are in `dtype`; codes are computed from the rounded ones, which the product uses.
    """
    grouped = weight.float().unflatten(-1, (-1, group))
    low, high = torch.aminmax(grouped, dim=-1)
    scale = ((high - low) / 15).clamp(min=1e-8).to(dtype)
    zero = (low + 8 * scale.float()).to(dtype)
    codes = ((grouped - zero.float()[..., None]) / scale.float()[..., None] + 8).round_().clamp_(0, 15)
    return codes.flatten(-2).to(torch.uint8), torch.stack([scale, zero], -1).transpose(0, 1).contiguous()


class DraftLinear(nn.Module):
    """A linear layer with exact and 4-bit weights; `switch` selects which of them :meth:`forward` uses.

    Args:
        exact: linear layer whose weights are also stored in 4 bits.
        switch: switch of the model that selects the weights.
    """

    def __init__(self, exact: nn.Linear, switch: Switch) -> None:
        super().__init__()
        self.exact, self.draft, self.switch = exact, Int4Linear(exact), switch

    @property
    def weight(self) -> Tensor:
        """The exact weights, since some models read their dtype."""
        return self.exact.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the product ``[..., out]`` for `x` ``[..., in]``."""
        return self.draft(x) if self.switch.on else self.exact(x)


class Switch:
    """A switch, shared by all layers of a model, between exact and 4-bit weights.

    Args:
        which: linear layers of the decoder that have 4-bit weights as well.
    """

    def __init__(self, which: Which) -> None:
        self.which, self.on = which, False

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Use the 4-bit weights inside the block."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


def attach(model: nn.Module, which: Which) -> Switch:
    """Add 4-bit weights to `model`, unless it has the same ones already, and return their switch.

    Args:
        model: causal language model with its decoder layers in ``model.model.layers``.
        which: ``ffn`` for the linear layers outside attention, ``all`` for those in attention too. The output head is
            never quantized.

    Raises:
        ModelError: the model has no decoder layers, or no linear layers in them (if it is already quantized).
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
    """Return the decoder layers of a causal language model; raise ModelError if it has no ``model.layers``."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} has no decoder layers in model.layers whose weights could be "
            "quantized to 4 bits.\n"
            "  hint: set method.draft_weights=same"
        )
    return layers
