"""The one object that kvbench attaches to a model: ``model._kvbench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Placement:
    """The devices and processes that hold the weights of a model; recorded when the model is loaded.

    Args:
        team: the processes that hold a slice of the model each, for tensor parallelism
            (:class:`kvbench.parallel.team.Team`); None if the model is not sliced.
        parameters: number of parameters of the complete model if this process has only a slice of it; else None.
        devices: devices over which whole layers are distributed; empty if the model is on one device.
        probe: a few weights gathered from all slices, by which the complete model can be recognised
            (:func:`kvbench.calibration.file.probe`); None until they have been gathered.
        storage: torch's dtype in which caches of this model store full-precision keys and values
            (:mod:`kvbench.models.arithmetic`); None: the dtype of the weights.
    """

    team: Any = None
    parameters: int | None = None
    devices: tuple[Any, ...] = ()
    probe: dict[str, Any] | None = None
    storage: Any = None


@dataclass
class Attachment:
    """State that kvbench stores on a model object, as ``model._kvbench``.

    ``method.detach(model)`` removes all of it except the placement.

    Args:
        placement: devices and processes that hold the weights; None if the complete model is on one device.
        attention: name of the attention implementation that kvbench has replaced and will restore; None if it has not
            replaced any.
        rotary: the model's rotary embedding (:class:`kvbench.attention.rope.rotary.Rotary`); None until it is needed.
        key_hooks: objects that record keys before RoPE through forward hooks (:mod:`kvbench.attention.rope.rotary`);
            the method ``remove()`` of each removes its hook.
        int4: the object that switches between the model's own weights and their 4-bit version
            (:class:`kvbench.models.int4.Switch`); None if there is no such version.
    """

    placement: Placement | None = None
    attention: str | None = None
    rotary: Any = None
    key_hooks: list[Any] = field(default_factory=list)
    int4: Any = None


def attached(model: Any) -> Attachment | None:
    """Return what kvbench has stored on `model`, or None if it has stored nothing."""
    attachment: Attachment | None = getattr(model, "_kvbench", None)
    return attachment


def attachment(model: Any) -> Attachment:
    """Return what kvbench has stored on `model`, for reading or changing; store an empty record if there is none."""
    known = attached(model)
    if known is None:
        known = model._kvbench = Attachment()
    return known


def placement(model: Any) -> Placement:
    """Return where the weights of `model` are; the default, one device and no slices, if nothing is recorded.

    Changes to that default are lost, because it is not stored on the model.
    """
    known = attached(model)
    return Placement() if known is None or known.placement is None else known.placement


def record_placement(model: Any, placement: Placement) -> None:
    """Record on `model` where its weights are."""
    attachment(model).placement = placement


def storage_of(model: Any) -> Any:
    """Return torch's dtype in which caches of `model` store full-precision keys and values; by default the model's."""
    return placement(model).storage or model.dtype


def release(model: Any) -> None:
    """Delete what kvbench has stored on a model, except the placement of its weights.

    It undoes nothing: the caller must first have restored the attention implementation and removed the hooks.
    """
    known = attached(model)
    if known is None:
        return
    if known.placement is None:
        del model._kvbench
    else:
        model._kvbench = Attachment(known.placement)
