"""The thread that watches the other ranks: it ends a process whose main thread cannot, and goes when the team goes."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest
import torch

from kvbench.parallel import team as teams

dist = pytest.importorskip("torch.distributed")

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),  # the thread's SystemExit
]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exit codes of processes that the watching thread would have ended, and a way to wait for one."""
    codes: list[int] = []
    there = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        there.set()
        raise SystemExit  # of the thread

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(teams, "NOTICE_S", 0.05)
    return codes, there


def fails(store: Any, kind: str = "ValueError") -> None:
    store.set("failed", json.dumps({"rank": 1, "kind": kind, "message": "boom", "oom": False}))


@pytest.mark.parametrize(("kind", "code"), [("ValueError", 1), ("KeyboardInterrupt", 130)])
def test_another_ranks_failure_is_recorded_and_ends_the_process(ended: Any, kind: str, code: int) -> None:
    codes, there = ended
    store = dist.HashStore()
    team = teams.Team(0, 2, torch.device("cpu"), store, store)
    seen: list[dict[str, Any]] = []
    team.on_failure = seen.append
    fails(store, kind)
    assert there.wait(20)
    assert codes == [code]
    assert [found["message"] for found in seen] == ["boom"]
    assert team.broken


def test_a_record_that_hangs_does_not_keep_the_process(ended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, there = ended
    monkeypatch.setattr(teams, "RECORD_S", 0.05)
    store, hung = dist.HashStore(), threading.Event()
    team = teams.Team(0, 2, torch.device("cpu"), store, store)
    team.on_failure = lambda found: hung.wait(60) and None
    fails(store)
    assert there.wait(20)
    assert codes == [1] and not hung.is_set()
    hung.set()


def test_who_leaves_has_no_thread_left(ended: Any) -> None:
    codes, _ = ended
    store = dist.HashStore()
    team = teams.Team(0, 2, torch.device("cpu"), store, store)
    team.close()
    assert not team._watcher.is_alive()
    fails(store)
    assert not codes


def test_what_the_main_thread_has_noticed_is_its_own(ended: Any) -> None:
    codes, _ = ended
    store, watched = dist.HashStore(), dist.HashStore()  # the main thread's view is ahead of the watching one's
    team = teams.Team(0, 2, torch.device("cpu"), store, watched)
    fails(store)
    with pytest.raises(teams.PeerError, match="rank 1: ValueError: boom"):
        team.exchange({"a": 1})
    fails(watched)
    team._watcher.join(20)
    assert not team._watcher.is_alive() and not codes


@pytest.mark.parametrize("own", [None, ValueError("mine"), MemoryError("mine")])
def test_where_ranks_fail_in_different_ways_memory_comes_first(own: Exception | None) -> None:
    """That one ran out of memory is the result, whoever else failed, and whichever rank it was."""
    errors = {
        1: {"kind": "ValueError", "message": "theirs", "oom": False},
        2: {"kind": "MemoryError", "message": "full", "oom": True},
    }
    store = dist.HashStore()
    team = teams.Team(0, 3, torch.device("cpu"), store, store)
    for rank, error in errors.items():
        store.set(f"round/0/{rank}", json.dumps({"value": None, "error": error, "calls": 0}))
    try:
        with pytest.raises(MemoryError) as found:
            team.settle(None, own)
    finally:
        team.close()
    assert team.shared is found.value and not team.broken
    if isinstance(own, MemoryError):
        assert found.value is own
    else:
        assert isinstance(found.value, teams.PeerOutOfMemoryError) and "rank 2: MemoryError: full" in str(found.value)


def test_the_first_failure_is_the_cause_and_stays() -> None:
    store = dist.HashStore()
    team = [teams.Team(rank, 2, torch.device("cpu"), store, dist.HashStore()) for rank in (0, 1)]
    try:
        team[1].fail(ValueError("the cause"))
        team[0].fail(RuntimeError("what came of it"))
    finally:
        for each in team:
            each.close()
    content = json.loads(store.get("failed"))
    assert (content["rank"], content["kind"], content["message"]) == (1, "ValueError", "the cause")
    assert team[0].broken and team[1].broken
