"""The one object on a model: made when it is needed, and reduced to the placement when it is released."""

from __future__ import annotations

from types import SimpleNamespace

from kvbench.util.attachment import Attachment, Placement, attached, attachment, placement, record_placement, release


def test_an_attachment_is_made_once_and_only_when_asked_for() -> None:
    model = SimpleNamespace()
    assert attached(model) is None
    assert placement(model) == Placement(team=None, parameters=None, devices=(), probe=None)
    release(model)
    assert vars(model) == {}
    state = attachment(model)
    assert state == Attachment(None, None, None, [], None)
    assert attachment(model) is state is attached(model) is model._kvbench
    assert placement(model) == Placement() and state.placement is None


def test_release_removes_everything_but_the_placement() -> None:
    model = SimpleNamespace()
    attachment(model).attention = "sdpa"
    release(model)
    assert not hasattr(model, "_kvbench")
    place = Placement(parameters=7, devices=("cpu",))
    record_placement(model, place)
    assert placement(model) is place
    attachment(model).attention, attachment(model).int4 = "sdpa", object()
    attachment(model).key_hooks.append(object())
    release(model)
    assert attached(model) == Attachment(placement=place) and placement(model) is place
    assert attachment(SimpleNamespace()).key_hooks == []  # each has its own list
