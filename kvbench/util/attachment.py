"""The one object that kvbench attaches to a model: ``model._kvbench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Placement:
    """Placement of a model's weights on devices and processes, recorded when the model is loaded.

    Args:
        team: all processes that hold a slice of the model (:class:`kvbench.parallel.team.Team`); None if the model is
            not sliced.
        parameters: number of parameters of the complete model if this process holds only a slice of it; else None.
        devices: devices over which the layers are distributed; empty if the model is on one device.
        probe: a small sample of the weights of all slices (:func:`kvbench.calibration.file.probe`); None until it has
            been collected from the processes.
    """

    team: Any = None
    parameters: int | None = None
    devices: tuple[Any, ...] = ()
    probe: dict[str, Any] | None = None


@dataclass
class Attachment:
    """State that kvbench keeps on a model. ``method.detach(model)`` undoes it, apart from the placement.

    Args:
        placement: devices and processes that hold the model; None if the complete model is on one device.
        attention: name of the attention implementation that the model had before kvbench replaced it; None if it has
            not been replaced.
        rotary: the model's rotary embedding (:class:`kvbench.attention.rope.rotary.Rotary`); None until it is needed.
        key_hooks: hooks that record keys before RoPE (:mod:`kvbench.attention.rope.pre_rope`), each with ``remove()``.
        int4: the switch between the model's own and its 4-bit weights (:class:`kvbench.models.int4.Switch`), or None.
    """

    placement: Placement | None = None
    attention: str | None = None
    rotary: Any = None
    key_hooks: list[Any] = field(default_factory=list)
    int4: Any = None


def attached(model: Any) -> Attachment | None:
    """Return the attachment of `model`, or None if it has none."""
    attachment: Attachment | None = getattr(model, "_kvbench", None)
    return attachment


def attachment(model: Any) -> Attachment:
    """Return the attachment of `model`; create an empty one if it has none."""
    known = attached(model)
    if known is None:
        known = model._kvbench = Attachment()
    return known


def placement(model: Any) -> Placement:
    """Return the placement of `model`; if none is recorded, a new default one that is not stored on the model."""
    known = attached(model)
    return Placement() if known is None or known.placement is None else known.placement


def record_placement(model: Any, placement: Placement) -> None:
    """Store the placement of `model` in its attachment."""
    attachment(model).placement = placement


def release(model: Any) -> None:
    """Remove the state that kvbench keeps on a model, apart from the placement of its weights.

    The caller must already have undone what the state describes, such as a replaced attention implementation.
    """
    known = attached(model)
    if known is None:
        return
    if known.placement is None:
        del model._kvbench
    else:
        model._kvbench = Attachment(known.placement)
