"""Ranks of a team in one process: what they exchange, in which order they act, and how they join and leave."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch

from kvbench.errors import ConfigError, KvbenchError
from kvbench.parallel import launch
from kvbench.parallel import team as teams

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

CPU = torch.device("cpu")


@pytest.fixture
def pair() -> Any:
    """Two ranks over one store."""
    store = dist.HashStore()
    both = [teams.Team(rank, 2, CPU, store, dist.HashStore()) for rank in (0, 1)]
    yield both
    for team in both:
        team.close()


def together(*acts: Any) -> list[Any]:
    """Call one function per rank at the same time, and return their values or errors."""
    results: list[Any] = [None] * len(acts)

    def call(number: int) -> None:
        try:
            results[number] = acts[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def test_values_are_exchanged_in_the_order_of_ranks_round_by_round(pair: Any) -> None:
    first, second = pair
    for number in range(2):
        values = together(lambda: first.exchange(["a", number]), lambda: second.exchange(["b", number]))  # noqa: B023
        assert values == [[["a", number], ["b", number]]] * 2
    assert first.exchange("alone", 0.0) is None, "nobody answers in time"


def test_results_without_an_error_are_those_of_all_ranks(pair: Any) -> None:
    first, second = pair
    first.calls = 3  # numbers of collectives matter after an error only
    assert together(lambda: first.settle(1, None), lambda: second.settle(2, None)) == [[1, 2], [1, 2]]
    assert first.shared is None and not first.broken


@pytest.mark.parametrize("calls", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all(pair: Any, calls: int) -> None:
    first, second = pair
    second.calls = calls
    error = ValueError("x" * 3000)
    peer, own = together(lambda: first.settle(None, None), lambda: second.settle(None, error))
    assert own is error and second.shared is error
    assert type(peer) is teams.PeerError and str(peer) == f"rank 1: ValueError: {'x' * 2000}" and first.shared is peer
    assert first.broken == second.broken == bool(calls), "ranks that stopped at different collectives cannot go on"


def test_memory_that_ran_out_elsewhere_takes_the_place_of_ones_own_error(pair: Any) -> None:
    first, second = pair
    full = MemoryError("tried to allocate 3 bytes")
    peer, own = together(lambda: first.settle(None, ValueError("mine")), lambda: second.settle(None, full))
    assert own is full and isinstance(peer, teams.PeerOutOfMemoryError) and isinstance(peer, MemoryError)
    mine, theirs = (ValueError("a"), ValueError("b"))
    assert together(lambda: first.settle(None, mine), lambda: second.settle(None, theirs)) == [mine, theirs]


def test_a_failed_rank_that_hears_nothing_ends_the_others(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    error = ValueError("alone")
    with pytest.raises(ValueError, match="alone"):
        first.settle(None, error, 0.0)
    assert first.broken and first.shared is None
    with pytest.raises(teams.PeerError, match="rank 0: ValueError: alone"):
        second.hear()
    assert second.broken
    monkeypatch.setattr(teams, "GRACE_S", 0.0)
    with pytest.raises(KeyError):
        first.settle(None, KeyError("again"))


def test_an_interrupt_elsewhere_is_one_here(pair: Any) -> None:
    first, second = pair
    first.fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="rank 0 was interrupted"):
        second.exchange(1)
    assert second.shared is None
    assert first.exchange(2) == [2, 1], "its own failure does not stop it"


def test_ranks_take_turns_also_if_one_fails(pair: Any) -> None:
    first, second = pair
    order: list[str] = []
    begun = threading.Event()

    def early() -> None:
        assert begun.wait(20)
        with first.turns():
            order.append("first")
            raise ValueError("of the first")

    def late() -> None:
        begun.set()
        with second.turns():
            order.append("second")

    results = together(early, late)
    assert order == ["first", "second"] and isinstance(results[0], ValueError) and results[1] is None
    order.clear()
    with first.turns():
        order.append("first")
    with second.turns():
        order.append("second")
    assert order == ["first", "second"]


def test_the_plan_is_told_once_a_run(pair: Any) -> None:
    first, second = pair
    first.tell(["before any run"])
    for plan in (["a", "b"], []):
        first.shared = first.on_failure = second.shared = "of the run before"
        for team in pair:
            team.open()
        assert first.shared is None and first.on_failure is None and not first.announced
        first.tell(plan)
        first.tell(["too late"])
        assert first.announced and second.hear() == plan


def test_broken_ranks_begin_no_run(pair: Any) -> None:
    pair[0].broken = True
    with pytest.raises(KvbenchError, match="cannot continue, because a rank has failed"):
        pair[0].open()
    pair[1].open()


def test_a_failure_without_a_store_is_no_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    team = teams.Team(0, 2, CPU, dist.HashStore(), dist.HashStore())
    try:
        monkeypatch.setattr(team, "_store", None)
        team.fail(ValueError("the store is gone"))
        assert team.broken
    finally:
        team.close()


def test_collectives_are_counted_and_gathered_by_rank(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    team = pair[0]
    seen: list[torch.Tensor] = []

    def gather(whole: torch.Tensor, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        whole.copy_(torch.cat([x, x + 100]))

    monkeypatch.setattr(dist, "all_gather_single", gather, raising=False)
    monkeypatch.setattr(dist, "all_reduce", lambda x: seen.append(x) or x.mul_(3))
    x = torch.tensor([[1, 2], [3, 4]])
    assert team.gather(x.T).tolist() == [[1, 3, 101, 103], [2, 4, 102, 104]]
    assert team.gather(x, 0).tolist() == [[1, 2], [3, 4], [101, 102], [103, 104]]
    total = team.sum(x)
    assert total is x and x.tolist() == [[3, 6], [9, 12]] and team.calls == 3


def test_a_team_ends_its_collectives_unless_it_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    for broken in (True, False):
        team = teams.Team(0, 2, CPU, dist.HashStore(), dist.HashStore())
        team.broken = broken
        team.close()
        assert bool(ended) != broken and not team._watcher.is_alive()


def test_a_watcher_leaves_its_own_ranks_failure_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("it ended its own process"))
    store = dist.HashStore()
    team = teams.Team(1, 2, CPU, store, store)
    store.set("failed", json.dumps({"rank": 1, "kind": "ValueError", "message": "mine", "oom": False}))
    team._watcher.join(20)
    assert not team._watcher.is_alive() and not team.broken
    team.close()


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets what torchrun sets; nobody has joined."""
    monkeypatch.setattr(teams, "_team", [])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def start(size: int, gpus: int) -> None:
        values = {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    return start


def test_nobody_joins_without_torchrun(torchrun: Any) -> None:
    assert not launch.launched() and teams.current() is None
    with pytest.raises(ConfigError, match="needs several processes, which torchrun starts"):
        teams.join()


@pytest.mark.parametrize(("device", "gpus", "typed"), [("cuda", 0, 1), ("auto", 1, 1), ("cuda", 1, 1), ("auto", 2, 2)])
def test_more_processes_than_gpus_are_refused(torchrun: Any, device: str, gpus: int, typed: int) -> None:
    torchrun(3, gpus)
    with pytest.raises(ConfigError, match=f"started 3 processes on a machine with {gpus} GPUs.*\n.*node {typed} "):
        teams.join(device)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 4), ("auto", 0)])
def test_processes_without_gpus_need_gloo(
    torchrun: Any, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int
) -> None:
    torchrun(2, gpus)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(KvbenchError, match="tensor parallelism on cpu needs gloo"):
        teams.join(device)


def test_a_team_is_joined_once_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    team = teams.Team(0, 1, CPU, dist.HashStore(), dist.HashStore())
    monkeypatch.setattr(teams, "_team", [team])
    assert teams.current() is teams.join() is team
    teams.leave()
    assert teams.current() is None and not team._watcher.is_alive()
    teams.leave()
