"""A session that is opened for a run: limits on memory, and the release whatever happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.runner import ranks


class Team:
    """A rank that hears of one other."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def settle(self, rows: Any, failed: BaseException | None, seconds: float | None = None) -> list[Any]:
        self.calls.append(("settle", rows, failed, seconds))
        if failed is not None:
            raise failed
        return [rows, rows]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sessions that are made up, and what happens to them and to the memory of two devices."""
    from contextlib import contextmanager

    events: list[Any] = []

    @contextmanager
    def limited(device: str, limit: float | None) -> Any:
        events.append(("limited", device, limit))
        yield limit is not None and (device != "second" or limit != 7.0)
        events.append(("unlimited", device))

    class Session:
        def __init__(self, *args: Any) -> None:
            events.append(("opened", *args))
            if args[0].task == "broken":
                raise OSError("no weights")

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr("kvbench.runner.session.Session", Session)
    monkeypatch.setattr("kvbench.profiling.device.limited", limited)
    monkeypatch.setattr("kvbench.profiling.memory.release", lambda device: events.append(("released", device)))
    monkeypatch.setattr("kvbench.models.devices.homes", lambda runtime: ["first", "second"])
    return events


def run_with(limit: float | None, task: str = "task") -> Any:
    return SimpleNamespace(task=task, runtime=SimpleNamespace(memory_limit_gb=limit))


def test_a_session_is_closed_and_its_memory_released_whatever_happens(sessions: Any, capsys: Any) -> None:
    checked = run_with(2.0)
    with pytest.raises(ValueError, match="inside"), ranks.open_session(checked, None):
        sessions.append("inside")
        raise ValueError("inside")
    assert sessions[:2] == [("limited", "first", 2.0), ("limited", "second", 2.0)]
    assert sessions[2:6] == [("opened", checked), "inside", "closed", ("released", "first")]
    assert sessions[6:] == []  # the error leaves the limits, which are made up here, by their own way
    assert capsys.readouterr().err == ""


def test_memory_is_released_although_the_model_was_not_loaded(sessions: Any) -> None:
    team: Any = Team()
    with pytest.raises(OSError, match="no weights"), ranks.open_session(run_with(None, "broken"), team):
        pass
    assert sessions[-1] == ("released", "first") and "closed" not in sessions
    assert team.calls[-1][0] == "settle", "the others hear of it"


@pytest.mark.parametrize(("limit", "said"), [(7.0, True), (2.0, False), (None, False)])
def test_a_limit_that_a_device_does_not_take_is_said(sessions: Any, capsys: Any, limit: Any, said: bool) -> None:
    with ranks.open_session(run_with(limit), None) as session:
        assert type(session).__name__ == "Session"
    message = capsys.readouterr().err
    assert ("runtime.memory_limit_gb=7.0: the memory of first cannot be limited" in message) == bool(message) == said
