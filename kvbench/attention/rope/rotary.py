"""Rotary position embedding as a model applies it, to move keys on that were rotated already.

A rotation by a position is the composition of rotations, so a key that was rotated for position s and is turned by d is
the key rotated for s + d: keys before RoPE are not needed. The turning is done in fp32 by the model's own cosines,
sines and layout (halves, interleaved pairs, a part of the channels), and rounded to the cache's dtype once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvbench.cache.kernels.tables import upload
from kvbench.errors import ModelError
from kvbench.util.attachment import attachment

#: largest difference, relative to the largest key, that arithmetic in a dtype explains
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: position of the second token by which a model's layers are looked at
PROBED = 7


class Rotary:
    """The rotation of one model.

    Args:
        module: computes cosines and sines (``LlamaRotaryEmbedding`` or alike).
        apply: ``apply(q, k, cos, sin)`` of the model's own file.
        channels: first channels of a head that are rotated, where `apply` takes these alone (Phi); None: `apply` takes
            a whole head.
    """

    def __init__(
        self, module: nn.Module, apply: Callable[..., tuple[Tensor, Tensor]], channels: int | None = None
    ) -> None:
        self.module: Any = module
        self.apply = apply
        self.channels = channels
        # The undecorated forward: the decorated one of long-context variants looks at the positions it is given and
        # would switch the model's frequencies to those of short texts.
        self._forward = inspect.unwrap(type(module).forward)
        self._last: tuple[Any, Tensor, Tensor] | None = None

    @torch.no_grad()
    def rotate(self, keys: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate keys ``[B, H, n, D]`` for ``positions`` ``[B, n]`` in their dtype, as the model does it.

        Args:
            inverse: from after RoPE to before it.
        """
        cos, sin = self._forward(self.module, keys, positions.to(keys.device))
        if inverse:  # YaRN and its like scale keys through cosine and sine
            scale = float(getattr(self.module, "attention_scaling", 1.0)) ** 2
            cos, sin = cos / scale, -sin / scale
        return self._applied(keys, cos, sin)

    def turn(self, keys: Tensor, by: int | Sequence[int]) -> Tensor:
        """Move keys ``[B, H, n, D]`` on by `by` positions (or each row by its own number), in their dtype."""
        cos, sin = self._angles(by if isinstance(by, int) else tuple(by), keys.device)
        return self._applied(keys.float(), cos, sin).to(keys.dtype)

    def _applied(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate keys ``[B, H, n, D]`` by cosines and sines."""
        if self.channels is None:
            return self.apply(x[:, :0], x, cos, sin)[1]
        part = x[..., : self.channels]
        return torch.cat([self.apply(part[:, :0], part, cos, sin)[1], x[..., self.channels :]], -1)

    @torch.no_grad()
    def _angles(self, by: int | tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return fp32 cosines and sines ``[1, 1, R]`` of one position, or ``[B, 1, R]``; the last ones are kept."""
        # longrope switches frequencies in place: what was computed before may be of the other ones
        key = (by, device, self.module.inv_freq.data_ptr())
        if self._last is None or self._last[0] != key or getattr(self.module, "rope_type", "") == "longrope":
            if isinstance(by, int):
                position = torch.full((1, 1), by, device=device)  # filled, not sent: the host does not wait
            else:
                position = upload([[turn] for turn in by], torch.int64, device)
            cos, sin = self._forward(self.module, torch.empty(1, device=device), position)
            # YaRN and its like scale q and k through cosine and sine; a key that is turned has been scaled already
            scale = float(getattr(self.module, "attention_scaling", 1.0))
            self._last = (key, cos, sin) if scale == 1.0 else (key, cos / scale, sin / scale)
        return self._last[1], self._last[2]


def rotary(model: PreTrainedModel, what: str = "position=cache", instead: str = "method.position=original") -> Rotary:
    """Return the rotation of `model`, made once and checked to compose.

    Args:
        what, instead: who asks and what could be done without it, for the message.

    Raises:
        ModelError: the model has no rotary embedding, several, one whose frequencies change with the length, or layers
            that do something else to their keys (the model is run on two tokens to see it).
    """
    known: Rotary | None = attachment(model).rotary
    if known is None:
        known = _find(model, what, instead)
        attachment(model).rotary = known
    return known


def _find(model: PreTrainedModel, what: str, instead: str) -> Rotary:
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    hint = f"\n  hint: {instead}"
    modules = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if len({type(module) for module in modules}) != 1:
        raise ModelError(f"{what}: {name} has no rotary embedding, or several kinds of it.{hint}")
    module = modules[0]
    if "dynamic" in str(getattr(module, "rope_type", "")):
        raise ModelError(f"{what}: {name}'s rotary frequencies change with the length (dynamic).{hint}")
    if not all(getattr(config, "no_rope_layers", None) or [1]):
        raise ModelError(f"{what}: {name} has layers without rotary embedding.{hint}")
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise ModelError(f"{what}: {type(module).__module__} has no apply_rotary_pos_emb.{hint}")
    rotation = Rotary(module, apply)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    probe = torch.randn(1, 1, 1, size, generator=torch.Generator().manual_seed(0)).to(module.inv_freq.device)
    rotated = rotation._angles(0, probe.device)[0].shape[-1]
    if rotated < size and not _takes(rotation, probe):
        rotation = Rotary(module, apply, rotated)  # attention itself cuts a head where only a part of it is rotated
    if not _takes(rotation, probe):
        raise ModelError(f"{what}: {name}'s rotary embedding takes no heads of {size} channels.{hint}")
    if not torch.allclose(rotation.turn(rotation.turn(probe, 3), 4), rotation.turn(probe, 7), atol=1e-4):
        raise ModelError(f"{what}: {name}'s rotary embedding does not compose: it is not a rotation.{hint}")
    others = [
        layer for layer, (keys, _) in probed(model).items() if not alike(rotation.turn(keys[:1], PROBED), keys[1:])
    ]
    if others:
        raise ModelError(
            f"{what}: {name}'s layers {', '.join(map(str, others))} do not rotate their keys as its rotary embedding "
            f"says: they have none, or another one.{hint}"
        )
    return rotation


def _takes(rotation: Rotary, keys: Tensor) -> bool:
    """Return True if keys ``[1, 1, 1, D]`` can be turned, all of their channels."""
    try:
        return rotation.turn(keys, 1).shape == keys.shape
    except RuntimeError:  # of a shape
        return False


class _Spy(DynamicCache):
    """A cache that notes each layer's first keys, and what a hook left of them before RoPE."""

    def __init__(self, before: Callable[[int], Tensor | None]) -> None:
        super().__init__()
        self.seen: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._before = before

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen.setdefault(layer_idx, (key_states.detach(), self._before(layer_idx)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def probed(
    model: PreTrainedModel, before: Callable[[int], Tensor | None] = lambda layer: None
) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Return keys ``[2, H, 1, D]`` that each layer of `model` makes of one token at positions 0 and :data:`PROBED`.

    A token alone attends to itself alone, so all that its position changes is the rotation.

    Args:
        before: what stands for the keys before RoPE of a layer while its attention is under way.
    """
    training, spy = model.training, _Spy(before)
    ids = torch.full((2, 1), min(7, model.config.get_text_config(decoder=True).vocab_size - 1), device=model.device)
    model.eval()
    try:
        positions = torch.tensor([[0], [PROBED]], device=model.device)
        model(input_ids=ids, position_ids=positions, past_key_values=spy, use_cache=True)
    finally:
        model.train(training)
    return spy.seen


def alike(keys: Tensor, expected: Tensor) -> bool:
    """Return True if keys are equal but for the arithmetic of their dtype."""
    allowed = TOLERANCE.get(expected.dtype, 1e-4) * float(expected.float().abs().amax())
    return keys.shape == expected.shape and bool(((keys.float() - expected.float()).abs() <= allowed).all())
