"""The one object that kvbench attaches to a model: ``model._kvbench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Placement:
    """Location of a model's weights, known from loading on and valid for the model's lifetime.

    Args:
        team: the processes that hold the other slices (:class:`kvbench.parallel.team.Team`), or None.
        parameters: of the whole model, where this process holds a slice; else None.
        devices: that layers are spread over; empty: the model was loaded onto one.
        probe: a few numbers of the weights of all slices (:func:`kvbench.calibration.file.probe`), once gathered.
    """

    team: Any = None
    parameters: int | None = None
    devices: tuple[Any, ...] = ()
    probe: dict[str, Any] | None = None


@dataclass
class Attachment:
    """Everything attached to a model, undone by ``method.detach(model)``.

    Args:
        placement: stays when the rest is detached; None: the model lies whole on one device.
        attention: the attention implementation that the model had before kvbench's; None: it has its own.
        rotary: its rotation (:class:`kvbench.attention.rope.rotary.Rotary`), once found.
        key_hooks: hooks that leave keys before RoPE (:mod:`kvbench.attention.rope.pre_rope`), each with ``remove()``.
        int4: the switch of its 4-bit weights (:class:`kvbench.models.int4.Switch`).
    """

    placement: Placement | None = None
    attention: str | None = None
    rotary: Any = None
    key_hooks: list[Any] = field(default_factory=list)
    int4: Any = None


def attached(model: Any) -> Attachment | None:
    """Return what is attached to `model`; None: nothing."""
    attachment: Attachment | None = getattr(model, "_kvbench", None)
    return attachment


def attachment(model: Any) -> Attachment:
    """Return what is attached to `model`; it gets an empty attachment where it has none."""
    known = attached(model)
    if known is None:
        known = model._kvbench = Attachment()
    return known


def placement(model: Any) -> Placement:
    """Return where the weights of `model` lie; changes are lost where nothing is recorded of it."""
    known = attached(model)
    return Placement() if known is None or known.placement is None else known.placement


def record_placement(model: Any, placement: Placement) -> None:
    """Record where the weights of `model` lie."""
    attachment(model).placement = placement


def release(model: Any) -> None:
    """Remove the attachment of `model`, all of which was undone; its placement stays."""
    known = attached(model)
    if known is None:
        return
    if known.placement is None:
        del model._kvbench
    else:
        model._kvbench = Attachment(known.placement)
