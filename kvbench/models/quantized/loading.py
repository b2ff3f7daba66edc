"""Loading of checkpoints into layers with 4-bit weights, one layer at a time.

Before transformers loads the checkpoint, these layers are replaced by layers without weights, so that it loads only
the other weights. The weights of these layers are then read from the safetensors files, and unpacked or rounded, layer
by layer. The peak of memory is therefore close to what the finished model takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvbench.errors import ModelError
from kvbench.linear.int4 import pack
from kvbench.models import int4
from kvbench.models.int4 import Int4Linear
from kvbench.models.quantized.codes import group_for, round_weights, unpacked
from kvbench.models.quantized.files import Tensors
from kvbench.models.quantized.formats import Format
from kvbench.parallel.spread import device_of_module

#: name under which transformers knows :class:`Replacer`
NAME = "kvbench_int4"
#: tensors of a layer in a checkpoint with 4-bit weights
PARTS = ("qweight", "qzeros", "scales", "g_idx")
#: layers that ``model.weights`` rounds to 4 bits: all linear layers, without or with the output head
Which = Literal["int4", "int4_all"]
#: the hint of messages about weights that cannot be rounded
REMEDY = "set model.weights=pretrained"


class Plan:
    """The layers of a checkpoint that get 4-bit weights, and where these weights come from.

    Args:
        tensors: the tensors of the checkpoint; None if they are not in safetensors files. transformers then loads all
            weights in full precision before they are rounded.
        layout: format of the checkpoint's 4-bit weights; None if its weights are in full precision.
        which: layers whose weights are rounded to 4 bits; None to round none.
    """

    def __init__(self, tensors: Tensors | None, layout: Format | None, which: Which | None) -> None:
        self.tensors, self.layout, self.which = tensors, layout, which
        self._layers: dict[str, Int4Linear] = {}

    def arguments(self, config: Any) -> dict[str, Any]:
        """Return arguments of ``from_pretrained`` that keep transformers from loading the weights of these layers.

        The description of the quantization is removed from `config`.
        """
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return {"config": config, "quantization_config": _Settings(self.replace)}

    def replace(self, model: Any) -> None:
        """Before the weights are loaded, replace the layers that will have 4-bit weights by layers without weights.

        Raises:
            ModelError: the checkpoint has 4-bit weights for other layers than linear ones, or the weights cannot be
                rounded (:func:`roundable`).
        """
        names = set(self.tensors.names) if self.tensors is not None else set()
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if self.layout is not None:
            packed = {name.removesuffix(".qweight") for name in names if name.endswith(".qweight")}
            scaled = {name.removesuffix(".scales") for name in names if name.endswith(".scales")}
            beyond, lacking = sorted((packed | scaled) - linears.keys()), sorted(scaled - packed)
            if beyond or lacking or not packed:
                problem = (
                    f"{type(model).__name__} has no linear layer {beyond[0]}"
                    if beyond
                    else f"it lacks the packed weights {lacking[0] + '.' if lacking else ''}qweight"
                )
                raise ModelError(
                    f"the checkpoint's config.json describes {self.layout.method.upper()} weights in 4 bits, but "
                    f"{problem}.\n  hint: use the unquantized checkpoint with model.weights=int4"
                )
            chosen = sorted(packed)
        else:
            chosen = [name for name in roundable(model) if f"{name}.weight" in names]
        for name in chosen:
            linear = linears[name]
            layer = Int4Linear(linear.out_features, linear.in_features, linear.bias)
            layer.source = "rounded" if self.layout is None else self.layout.method
            _set(model, name, layer)
            self._layers[name] = layer

    def settle(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return transformers' loading report without the ``unexpected_keys`` that this plan reads itself."""
        own = ("bias", *PARTS) if self.layout is not None else ("weight",)
        read = {f"{name}.{part}" for name in self._layers for part in own}
        return {**report, "unexpected_keys": [key for key in report.get("unexpected_keys") or () if key not in read]}

    def fill(self, model: Any, device: torch.device) -> None:
        """Read, unpack or round the weights of the layers, one after another, in a model from ``from_pretrained``.

        The layers are put on `device`, or where they belong in a model that is spread over devices.

        Raises:
            ModelError: the weights of a layer cannot be unpacked or rounded.
        """
        where = {name: torch.device(text) for name, text in (getattr(model, "hf_device_map", None) or {}).items()}
        for name, layer in self._layers.items():
            assert self.tensors is not None
            at = device_of_module(name, where) if where else device
            if self.layout is None:
                weight = self.tensors.read(f"{name}.weight", at)
                layer.fill(pack(*round_weights(weight, name, REMEDY)))
                continue
            names = {part: f"{name}.{part}" for part in (*PARTS, "bias")}
            parts = {part: self.tensors.read(key, at) for part, key in names.items() if key in self.tensors.names}
            bias = parts.pop("bias", None)
            codes = unpacked(parts, self.layout, name)
            if codes.codes.shape != (layer.out_features, layer.in_features):
                raise ModelError(
                    f"layer {name}: its packed weights are {list(codes.codes.shape)}, but the config.json requires "
                    f"{[layer.out_features, layer.in_features]}.\n  hint: use the config.json that belongs to it"
                )
            layer.fill(pack(*codes))
            if layer.bias is None and bias is not None and bool(bias.any()):  # some packers add a bias of zeros
                layer.bias = nn.Parameter(bias.to(model.dtype), requires_grad=False)
        if self.which is not None:
            round_model(model, self.which)


def round_model(model: Any, which: Which) -> None:
    """Round the weights of a model to 4 bits in place, one layer after another; layers in 4 bits stay as they are.

    ``int4`` rounds all linear layers but the output head, ``int4_all`` the head too. A head that shares the weights of
    the embedding gets weights of its own, and the embedding stays as it is.

    Raises:
        ModelError: the weights cannot be rounded (:func:`roundable`).
    """
    names = list(roundable(model))
    head = model.get_output_embeddings()
    if which == "int4_all":
        names += [name for name, module in model.named_modules() if module is head and isinstance(head, nn.Linear)]
    for name in names:
        _set(model, name, Int4Linear.rounded(model.get_submodule(name), name, REMEDY))


def roundable(model: Any) -> Iterator[str]:
    """Yield the names of the linear layers of a model, without the output head.

    Raises:
        ModelError: a layer has weights that are not those of a linear layer (mixtures of experts), there are no linear
            layers, or 32 does not divide the number of a layer's input channels.
    """
    head = model.get_output_embeddings()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    done = any(isinstance(module, Int4Linear) for module in model.modules())
    others = [name for name, parameter in model.named_parameters() if parameter.ndim > 2]
    if others or not (linears or done):
        problem = f"has weights outside linear layers ({others[0]})" if others else "has no linear layers"
        raise ModelError(f"{type(model).__name__} {problem}, which kvbench cannot round to 4 bits.\n  hint: {REMEDY}")
    for name, linear in linears.items():
        group_for(linear.out_features, linear.in_features, name, REMEDY)
        yield name


def _set(model: Any, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    int4.replace_submodule(model.get_submodule(parent), child, module)


@register_quantization_config(NAME)
class _Settings(QuantizationConfigMixin):  # type: ignore[misc]
    """Argument ``quantization_config`` of ``from_pretrained``; it carries the function that :class:`Replacer` calls."""

    def __init__(self, replace: Callable[[Any], None]) -> None:
        self.quant_method, self.replace = NAME, replace


@register_quantizer(NAME)
class Replacer(HfQuantizer):  # type: ignore[misc]
    """Hook that transformers calls after it has constructed a model and before it loads the weights."""

    def _process_model_before_weight_loading(self, model: Any, **arguments: Any) -> None:
        self.quantization_config.replace(model)

    def postprocess_model(self, model: Any, **arguments: Any) -> None:
        """Remove from a loaded model the attributes that transformers sets on quantized models."""
        self.remove_quantization_config(model)

    def is_serializable(self, *arguments: Any, **more: Any) -> bool:
        """Return False: transformers cannot save these layers."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: products with 4-bit weights have no gradients."""
        return False
