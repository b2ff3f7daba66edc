"""Rotary position embedding as a model applies it: keys moved to other positions, and keys before RoPE.

Methods that store keys before RoPE are KVQuant, and Atom in its authors' version.

Rotations compose: a key rotated for position s and then turned by d equals the key rotated for s + d, so keys can be
moved without the keys before RoPE. Turning is done in fp32 with the model's own cosines, sines and channel layout
(halves, interleaved pairs, a part of the channels), and rounded to the cache's dtype once.

``Cache.update`` gets keys after RoPE. A hook on the projection (:mod:`kvbench.models.projections`) leaves the keys
before RoPE on the attention module, where kvbench's attention finds them in the same call, along with the position ids.
When the hooks are installed, and again for the first tokens of each layer, these keys are rotated and compared with
those that the cache received. A model that does anything else to its keys is refused rather than served wrongly.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvbench.cache.kernels.jobs import upload
from kvbench.cache.layer import KVLayer
from kvbench.errors import CacheError, ModelError
from kvbench.models.layers import attending
from kvbench.models.projections import ProjectionSource, attentions, head_dim, key_source
from kvbench.util.attachment import attached, attachment

#: largest difference, relative to the largest key, that rounding in a dtype can explain
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: second position at which :func:`probed` computes keys; the first is 0
PROBED = 7


class Rotary:
    """The rotary position embedding of one model, applied as the model applies it.

    Args:
        module: module that computes cosines and sines (``LlamaRotaryEmbedding`` or the like).
        apply: the function ``apply_rotary_pos_emb(q, k, cos, sin)`` from the model's source file.
        channels: number of channels that `apply` expects, if it takes only the first channels of a head (Phi); None if
            it takes whole heads.
    """

    def __init__(
        self, module: nn.Module, apply: Callable[..., tuple[Tensor, Tensor]], channels: int | None = None
    ) -> None:
        self.module: Any = module
        self.apply = apply
        self.channels = channels
        # The undecorated forward: long-context variants decorate it to choose frequencies by the positions passed, and
        # a call with small positions would switch the model to those for short texts.
        self._forward = inspect.unwrap(type(module).forward)
        self._last: tuple[Any, Tensor, Tensor] | None = None

    @torch.no_grad()
    def rotate(self, keys: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Apply the model's RoPE to keys, or undo it.

        Args:
            keys: keys before RoPE (after RoPE if `inverse`), ``[B, H, n, D]``.
            inverse: True to undo the rotation, which returns the keys before RoPE.
        """
        cos, sin = self._forward(self.module, keys, positions.to(keys.device))
        if inverse:  # YaRN and similar variants scale keys through the cosines and sines
            scale = float(getattr(self.module, "attention_scaling", 1.0)) ** 2
            cos, sin = cos / scale, -sin / scale
        return self._applied(keys, cos, sin)

    def turn(self, keys: Tensor, by: int | Sequence[int]) -> Tensor:
        """Rotate keys to later positions: the key of a token at position s becomes its key at position s + by.

        Args:
            by: number of positions, or one number per row.
        """
        cos, sin = self._angles(by if isinstance(by, int) else tuple(by), keys.device)
        return self._applied(keys.float(), cos, sin).to(keys.dtype)

    def _applied(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return keys ``[B, H, n, D]`` rotated by the given cosines and sines."""
        if self.channels is None:
            return self.apply(x[:, :0], x, cos, sin)[1]
        part = x[..., : self.channels]
        return torch.cat([self.apply(part[:, :0], part, cos, sin)[1], x[..., self.channels :]], -1)

    @torch.no_grad()
    def _angles(self, by: int | tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the position `by`, fp32 ``[1, 1, R]``, or ``[B, 1, R]`` for one per row.

        The result is remembered for repeated calls with the same `by`.
        """
        # longrope switches its frequencies in place, so a remembered result may belong to the other set
        key = (by, device, self.module.inv_freq.data_ptr())
        if self._last is None or self._last[0] != key or getattr(self.module, "rope_type", "") == "longrope":
            if isinstance(by, int):
                position = torch.full((1, 1), by, device=device)  # filled on the device, so the host does not wait
            else:
                position = upload([[turn] for turn in by], torch.int64, device)
            cos, sin = self._forward(self.module, torch.empty(1, device=device), position)
            # YaRN and similar variants scale q and k through cosine and sine; a key to be turned is scaled already
            scale = float(getattr(self.module, "attention_scaling", 1.0))
            self._last = (key, cos, sin) if scale == 1.0 else (key, cos / scale, sin / scale)
        return self._last[1], self._last[2]


def rotary(model: PreTrainedModel, what: str = "position=cache", instead: str = "method.position=original") -> Rotary:
    """Return the rotary position embedding of a model, after checking that kvbench can use it to move keys.

    The checks are that two rotations in succession equal one by the sum of their distances, and that every layer uses
    this embedding, for which the model is run on two tokens. The result is cached on the model.

    Args:
        what: name of the setting that needs the rotation, with which the error message begins.
        instead: advice at the end of the error message, such as a setting that works without the rotation.

    Raises:
        ModelError: the model has no rotary embedding, has several kinds of it, changes its frequencies with the length,
            or has layers that do something else to their keys.
    """
    known: Rotary | None = attachment(model).rotary
    if known is None:
        known = _find_rotary(model, what, instead)
        attachment(model).rotary = known
    return known


def _find_rotary(model: PreTrainedModel, what: str, instead: str) -> Rotary:
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    hint = f"\n  hint: {instead}"
    modules = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if len({type(module) for module in modules}) != 1:
        raise ModelError(f"{what}: {name} has no rotary embedding, or more than one.{hint}")
    module = modules[0]
    if "dynamic" in str(getattr(module, "rope_type", "")):
        raise ModelError(f"{what}: {name}'s rotary frequencies change with the length (dynamic).{hint}")
    if not all(getattr(config, "no_rope_layers", None) or [1]):
        raise ModelError(f"{what}: {name} has layers without a rotary embedding.{hint}")
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise ModelError(f"{what}: {type(module).__module__} does not define apply_rotary_pos_emb.{hint}")
    rotation = Rotary(module, apply)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    probe = torch.randn(1, 1, 1, size, generator=torch.Generator().manual_seed(0)).to(module.inv_freq.device)
    rotated = rotation._angles(0, probe.device)[0].shape[-1]
    if rotated < size and not _takes(rotation, probe):
        rotation = Rotary(module, apply, rotated)  # such models split each head themselves and rotate one part of it
    if not _takes(rotation, probe):
        raise ModelError(f"{what}: {name}'s rotary embedding does not fit heads of {size} channels.{hint}")
    if not torch.allclose(rotation.turn(rotation.turn(probe, 3), 4), rotation.turn(probe, 7), atol=1e-4):
        raise ModelError(f"{what}: {name}'s rotary embedding is not a rotation.{hint}")
    others = [
        layer for layer, (keys, _) in probed(model).items() if not alike(rotation.turn(keys[:1], PROBED), keys[1:])
    ]
    if others:
        raise ModelError(
            f"{what}: layers {', '.join(map(str, others))} of {name} do not rotate their keys with the model's rotary "
            f"embedding: they use none, or a different one.{hint}"
        )
    return rotation


def _takes(rotation: Rotary, keys: Tensor) -> bool:
    """Return True if `rotation` accepts keys ``[1, 1, 1, D]`` and returns them with all their channels."""
    try:
        return rotation.turn(keys, 1).shape == keys.shape
    except RuntimeError:  # shapes that do not match
        return False


class _Spy(DynamicCache):
    """A cache that records each attention layer's first keys, after RoPE and (from a hook) before it."""

    def __init__(self, config: Any, before: Callable[[int], Tensor | None]) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._places, self._before = attending(config), before

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        number = self._places.index(layer_idx)
        self.seen.setdefault(number, (key_states.detach(), self._before(number)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def probed(
    model: PreTrainedModel, before: Callable[[int], Tensor | None] = lambda layer: None
) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Run a model on the same token at positions 0 and :data:`PROBED`, and return the keys that each layer computes.

    The two tokens are separate rows of the batch, so each attends only to itself. Its hidden states therefore do not
    depend on its position, and the two keys of a layer differ only by the rotation.

    Args:
        before: function called with a layer's number while its attention runs; returns the keys before RoPE, or None.

    Returns:
        A dict from the number of each attention layer to a pair: its keys after RoPE, ``[2, H, 1, D]``, and the
        result of `before`.
    """
    training, spy = model.training, _Spy(model.config, before)
    ids = torch.full((2, 1), min(7, model.config.get_text_config(decoder=True).vocab_size - 1), device=model.device)
    model.eval()
    try:
        positions = torch.tensor([[0], [PROBED]], device=model.device)
        model(input_ids=ids, position_ids=positions, past_key_values=spy, use_cache=True)
    finally:
        model.train(training)
    return spy.seen


def alike(keys: Tensor, expected: Tensor) -> bool:
    """Return True if two tensors of keys are equal up to rounding in their dtype (:data:`TOLERANCE`).

    Args:
        expected: expected keys; their dtype and largest magnitude determine the allowed difference.
    """
    allowed = TOLERANCE.get(expected.dtype, 1e-4) * float(expected.float().abs().amax())
    return keys.shape == expected.shape and bool(((keys.float() - expected.float()).abs() <= allowed).all())


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
        stored: during a captured step, True if this layer of the cache stores keys before RoPE.
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
