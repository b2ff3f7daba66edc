"""Keys before RoPE, for methods that store them (KVQuant; Atom in its authors' version).

``Cache.update`` gets keys after RoPE. A hook on the projection (:mod:`kvbench.models.projections`) leaves the keys
before RoPE on the attention module, where kvbench's attention finds them in the same call, along with the position ids.
When the hooks are installed, and again for the first tokens of each layer, these keys are rotated and compared with
those that the cache received. A model that does anything else to its keys is refused rather than served wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.attention.rope.rotary import PROBED, alike, probed, rotary
from kvbench.cache.layer import KVLayer
from kvbench.errors import CacheError, ModelError
from kvbench.models.projections import ProjectionSource, attentions, head_dim, key_source
from kvbench.util.attachment import attached, attachment

#: attribute of an attention module that holds its :class:`Hooked`
HOOKED = "_kvbench"
OTHERWISE = (
    "{}: rotating the keys before RoPE does not give the keys that attention receives, because this architecture "
    "changes them in ways that kvbench cannot reproduce.\n  hint: choose a method that stores keys "
    "after RoPE, such as method=kivi"
)


def attach_pre_rope(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Install hooks on a model that capture the keys before RoPE in each layer; repeated calls are harmless.

    Returns:
        The function that applies the model's RoPE to keys (:meth:`Rotary.rotate`).

    Raises:
        ModelError: the pre-RoPE keys cannot be observed, or rotating them does not give the keys that the model uses.
    """
    rotation = rotary(model, "keys before RoPE", "choose a method that stores keys after RoPE, such as method=kivi")
    if not attachment(model).key_hooks:
        size, layers = head_dim(model), attentions(model)
        sources = [key_source(model, module) for module in layers]  # may raise, before any hook is installed
        attachment(model).key_hooks = [Hooked(*pair, size) for pair in zip(layers, sources, strict=True)]
        positions = torch.tensor([[0], [PROBED]])
        for index, (keys, before) in probed(model, lambda index: take(layers[index])).items():
            if before is None or before.shape != keys.shape or not alike(rotation.rotate(before, positions), keys):
                detach_pre_rope(model)
                raise ModelError(OTHERWISE.format(f"{type(layers[index]).__name__} of layer {index}"))
    return rotation.rotate


def detach_pre_rope(model: PreTrainedModel) -> None:
    """Remove the hooks of :func:`attach_pre_rope` from a model, if it has any."""
    known = attached(model)
    for hooked in known.key_hooks if known is not None else ():
        hooked.remove()
    if known is not None:
        known.key_hooks = []


class Hooked:
    """A hook on an attention module that captures its pre-RoPE keys on every call and keeps those of the latest call.

    Args:
        attention: the attention module. This object is stored in an attribute of it until :meth:`remove`.
        source: the projection that computes the keys; the hook is installed on it.

    Attributes:
        keys: pre-RoPE keys, ``[B, H, q, D]``; None before the first call and after :func:`take`.
        stored: False if a captured step's layer stores keys after RoPE, although others do not.
    """

    def __init__(self, attention: nn.Module, source: ProjectionSource, channels: int) -> None:
        self.keys: Tensor | None = None
        self.stored = True
        self._attention, self._source, self._channels = attention, source, channels
        self._handle = source.module.register_forward_hook(self._keep)
        setattr(attention, HOOKED, self)

    def _keep(self, module: nn.Module, inputs: Any, out: Tensor) -> None:
        self.keys = self._source.cut(out, self._channels)

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()
        delattr(self._attention, HOOKED)


def take(module: nn.Module) -> Tensor | None:
    """Return the pre-RoPE keys that an attention module has just computed, and forget them.

    Returns:
        ``[B, H, q, D]``; None if the module has no hook, or if its keys have already been taken.
    """
    hooked: Hooked | None = vars(module).get(HOOKED)  # nn.Module is slow to look up a missing attribute
    if hooked is None:
        return None
    keys, hooked.keys = hooked.keys, None
    return keys


def stored(
    layer: KVLayer, keys: Tensor, before: Tensor | None, module: nn.Module, position_ids: Tensor | None
) -> Tensor:
    """Choose the keys that a layer stores, those before or those after RoPE, and record their positions if needed.

    Positions are needed only if the layer or its :attr:`follower` (the same layer of a draft model's cache) holds
    pre-RoPE keys.

    Args:
        before: new pre-RoPE keys, as :func:`take` returned them.
        position_ids: ``[B or 1, q]``; needed only for layers that hold pre-RoPE keys.

    Returns:
        ``[B, H, q, D]``: `before` if the layer holds pre-RoPE keys, else `keys`.

    Raises:
        CacheError: the layer holds pre-RoPE keys, but no hook provided them.
        ModelError: the model passes no position ids to attention, or does more to its keys than RoPE.
    """
    if all(member.rope is None for member in layer.chain()):
        return keys
    count, name = keys.shape[2], type(module).__name__
    if position_ids is None or position_ids.ndim != 2:
        raise ModelError(
            f"{name} does not pass plain position ids to its attention, so the cache cannot hold pre-RoPE keys.\n"
            "  hint: choose a method that stores keys after RoPE, such as method=kivi"
        )
    if layer.index == min(member.progress.rope_from for member in layer.chain() if member.rope is not None):
        starts = layer.progress.padding.starts or [0] * layer.batch
        layer.progress.positions.see(position_ids, layer.seen - count, starts)
    if layer.rope is None:
        return keys
    if before is None or before.shape != keys.shape:
        raise CacheError(
            f"{name}: the keys before RoPE were not captured. Create the cache with "
            "method.new_cache(model), which hooks the "
            "model, and do not detach a method while its cache is in use"
        )
    if layer.seen == count:
        newest = position_ids[:, -1:].expand(layer.batch, 1)
        expected = keys[:, :, -1:]
        if not alike(layer.rope(before[:, :, -1:], newest), expected) and bool(torch.isfinite(expected).all()):
            raise ModelError(OTHERWISE.format(name))
    return before.to(layer.dtype)
