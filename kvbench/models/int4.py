"""Linear layers with 4-bit weights, as a model's own weights or as additional ones for drafting.

A model's own weights have 4 bits if its checkpoint is in 4 bits, or if ``model.weights`` asks for it
(:mod:`kvbench.models.quantized.codes`). QuantSpec drafts with 4-bit weights and verifies with the model's own, so both
stay in memory (Tiwari et al. 2025, sec. 4; the authors' code has 4-bit weights in the feed-forward layers only). All of
them are multiplied by :mod:`kvbench.linear.int4`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvbench.errors import ModelError
from kvbench.linear.int4 import Int4Weight, pack, product
from kvbench.models.quantized.codes import round_weights
from kvbench.util.attachment import attached, attachment

Which = Literal["ffn", "all"]
#: the hint of messages about 4-bit weights for drafting
REMEDY = "set method.draft_weights=same"


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights, which :attr:`int4` describes; it has no attribute ``weight``.

    Args:
        rows: number of output channels.
        columns: number of input channels.
        bias: bias ``[out]``, in full precision; None: no bias.
        weight: the weights; None: :meth:`fill` sets them later.
    """

    codes: Tensor | None
    groups: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, rows: int, columns: int, bias: nn.Parameter | None, weight: Int4Weight | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features, self.group, self.dtype = rows, columns, 0, torch.float16
        self.register_parameter("bias", bias)
        for name in ("codes", "groups"):
            self.register_buffer(name, None, persistent=False)
        self.source = "rounded"  #: origin of the weights: ``awq`` and ``gptq`` are kinds of checkpoints
        if weight is not None:
            self.fill(weight)

    @classmethod
    def rounded(cls, linear: nn.Linear, layer: str = "", remedy: str = REMEDY) -> Int4Linear:
        """Return a layer with the weights of `linear`, rounded to 4 bits; both layers share the bias.

        Errors and arguments are those of :func:`kvbench.models.quantized.codes.round_weights`.
        """
        rows, columns = linear.weight.shape
        return cls(
            rows, columns, linear.bias, pack(*round_weights(linear.weight, layer or type(linear).__name__, remedy))
        )

    def fill(self, weight: Int4Weight) -> None:
        """Set the weights, which must have the layer's numbers of output and input channels."""
        assert (weight.rows, weight.columns) == (self.out_features, self.in_features)
        self.codes, self.groups = weight.codes, weight.groups
        self.group, self.dtype = weight.group, weight.dtype

    @property
    def int4(self) -> Int4Weight:
        """The packed weights; :meth:`fill` must have set them."""
        assert self.codes is not None and self.groups is not None
        return Int4Weight(self.codes, self.groups, self.out_features, self.in_features, self.group, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output ``[..., out]`` for inputs `x` ``[..., in]``, in the dtype of `x`."""
        return product(x, self.int4, self.bias)

    @property
    def nbytes(self) -> int:
        """Size of codes, scales and zero points in bytes."""
        return self.int4.nbytes

    def extra_repr(self) -> str:
        """Return the part of the layer's description that is in brackets."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}, bias={bias}"


class DraftLinear(nn.Module):
    """A linear layer with two sets of weights, one in full precision and one in 4 bits for drafting.

    The switch selects the set that :meth:`forward` uses; one switch serves all layers of the model.
    """

    def __init__(self, exact: nn.Linear, switch: Switch, layer: str = "") -> None:
        super().__init__()
        self.exact, self.draft, self.switch = exact, Int4Linear.rounded(exact, layer), switch

    @property
    def weight(self) -> Tensor:
        """The full-precision weights. Some models read ``layer.weight.dtype``, so the attribute must exist."""
        return self.exact.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output ``[..., out]`` for inputs ``[..., in]``, with 4 bits inside :meth:`Switch.drafting`."""
        return self.draft(x) if self.switch.on else self.exact(x)


class Switch:
    """Switch of a model between full-precision and 4-bit weights; full precision outside of :meth:`drafting`.

    Args:
        which: kind of linear layers that have 4-bit weights in addition: ``ffn`` for those outside attention, ``all``
            for those in attention and the output head too.
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

    Layers whose own weights have 4 bits are left as they are: the draft shares them. A head that shares its weights
    with the embedding gets 4-bit weights of its own. The decoder layers must be in ``model.model.layers``.

    Raises:
        ModelError: the model has no decoder layers, or these layers have no weights in full precision (because the
            checkpoint is in 4 bits, or ``model.weights`` asks for 4 bits), or a linear layer has a number of input
            channels that is not divisible by 32.
    """
    switch: Switch | None = attachment(model).int4
    if switch is not None:
        if switch.which == which:
            return switch
        detach(model)
    switch = Switch(which)
    linears = [
        (parent, name, f"model.layers.{index}.{path}.{name}", child)
        for index, layer in enumerate(decoder_layers(model))
        for path, parent in layer.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and (which == "all" or ("attn" not in path and "attention" not in path))
    ]
    linears += head(model) if which == "all" else []
    if not linears:
        own = any(isinstance(module, Int4Linear) for module in model.modules())
        problem = (
            "already has 4-bit weights in all layers that the draft would use"
            if own
            else "has no linear layers in full precision that could be quantized to 4 bits"
        )
        raise ModelError(f"{type(model).__name__} {problem}.\n  hint: {REMEDY}")
    drafts = [(parent, name, DraftLinear(child, switch, layer)) for parent, name, layer, child in linears]
    for parent, name, module in drafts:
        replace_submodule(parent, name, module)
    attachment(model).int4 = switch
    return switch


def replace_submodule(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule, and give the new module the hooks that move its inputs to the right device.

    The new module must have no hooks of its own.
    """
    old = getattr(parent, name)
    for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        getattr(module, hooks).update(getattr(old, hooks))
    setattr(parent, name, module)


def detach(model: nn.Module) -> None:
    """Remove the 4-bit weights that :func:`attach` added."""
    known = attached(model)
    if known is None or known.int4 is None:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, DraftLinear):
                setattr(parent, name, child.exact)
    known.int4 = None


def head(model: nn.Module) -> list[tuple[nn.Module, str, str, nn.Linear]]:
    """Return the linear layer of a model's output head as a list of one; empty if it lacks full-precision weights.

    Returns:
        The module that contains the layer, the layer's name in that module, its name in the model, and the layer. The
        layer is inside the head if the head is split over processes (:class:`kvbench.parallel.shard.Gathered`).
    """
    outer = output_head(model)
    inner = set() if outer is None else {id(module) for module in outer.modules()}
    return [
        (parent, name, f"{path}.{name}" if path else name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if id(child) in inner and isinstance(child, nn.Linear)
    ]


def output_head(model: Any) -> nn.Module | None:
    """Return the module that computes a model's logits; None if the model has none."""
    outer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return outer if isinstance(outer, nn.Module) else None


def nbytes(model: nn.Module) -> int:
    """Return the size of all 4-bit weights of a model in bytes, its own and those for drafting."""
    return sum(module.nbytes for module in model.modules() if isinstance(module, Int4Linear))


def own_layers(model: nn.Module) -> dict[str, Int4Linear]:
    """Return by name the layers whose own weights have 4 bits; 4-bit weights only for drafting do not count."""
    drafts = {id(module.draft) for module in model.modules() if isinstance(module, DraftLinear)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Int4Linear) and id(module) not in drafts
    }


def own_head(model: nn.Module) -> bool:
    """Return True if the weights of a model's output head have 4 bits."""
    return isinstance(output_head(model), Int4Linear)


def int4_description(model: nn.Module) -> dict[str, Any] | None:
    """Return the fields of :class:`kvbench.results.record_machine.Weights`; None if the model has no 4-bit weights."""
    layers = own_layers(model).values()
    if not layers:
        return None
    return {
        "source": next((layer.source for layer in layers if layer.source != "rounded"), "rounded"),
        "bits": 4,
        "groups": sorted({layer.group for layer in layers}, reverse=True),
        "head": own_head(model),
        "bytes": own_bytes(model),
    }


def own_bytes(model: nn.Module) -> int:
    """Return the size of a model's own weights in bytes, without additional 4-bit weights for drafting."""
    own = sum(layer.nbytes for layer in own_layers(model).values())
    return own + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def own_parameters(model: nn.Module) -> int:
    """Return the number of a model's own weights.

    Additional 4-bit weights for drafting do not count, nor does a 4-bit copy of an embedding that is also the head.
    """
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    head = output_head(model) if own_head(model) and tied else None
    layers = [layer for layer in own_layers(model).values() if layer is not head]
    own = sum(layer.in_features * layer.out_features for layer in layers)
    return own + sum(parameter.numel() for parameter in model.parameters())


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
