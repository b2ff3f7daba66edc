"""Cooperation of several processes, with made-up ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.errors import CombinationError, KvbenchError
from kvbench.results.samples import MEASURED
from kvbench.runner import ranks
from tests.run_support import ToyTask, config


class Team:
    """A rank with one other rank, whose answers the test gives."""

    broken, told, shared = False, False, None

    def __init__(self, rank: int = 0, other: Any = None) -> None:
        self.rank, self.other = rank, other
        self.calls: list[tuple[Any, ...]] = []

    def settle(self, rows: Any, failed: BaseException | None, seconds: float | None = None) -> list[Any]:
        self.calls.append(("settle", rows, failed, seconds))
        if failed is not None:
            raise failed
        return [rows, self.other if self.other is not None else rows]

    def open(self) -> None:
        self.calls.append(("open",))

    def tell(self, names: Sequence[str]) -> None:
        self.announced = True
        self.calls.append(("tell", list(names)))

    def fail(self, error: BaseException) -> None:
        self.calls.append(("fail", error))

    def hear(self) -> list[str]:
        return self.other


def row(tokens: Sequence[int] = (1, 2), used: int = 10, peak: int | None = 100) -> dict[str, Any]:
    bill = {"used": {"total": used, "codes": used}, "reserved": {"total": 2 * used, "codes": 0}, "fp16_equivalent": 99}
    peaks = {"prefill": peak, "decode": 5, "kind": "cuda_allocator", "rss": None}
    return {"id": "a/0", "tokens": list(tokens), "kv_bytes": bill, MEASURED: {"ttft_s": 0.5, "peak_bytes": peaks}}


def test_bytes_are_those_of_all_ranks_and_times_are_the_first_ones() -> None:
    own, other = row(), {**row(used=4, peak=60), MEASURED: {**row(peak=60)[MEASURED], "ttft_s": 9.0}}
    merged = ranks.merged(own, [own, other])
    assert merged["kv_bytes"]["used"] == {"total": 14, "codes": 14}
    assert merged["kv_bytes"]["reserved"] == {"total": 28, "codes": 0}
    assert merged["kv_bytes"]["fp16_equivalent"] == 198
    assert merged[MEASURED]["peak_bytes"] == {"prefill": 160, "decode": 10, "kind": "cuda_allocator", "rss": None}
    assert merged[MEASURED]["ttft_s"] == 0.5
    assert [each["kv_bytes"] for each in merged[MEASURED]["ranks"]] == [10, 4]
    assert [each["peak_bytes"]["prefill"] for each in merged[MEASURED]["ranks"]] == [100, 60]
    assert own == row(), "a rank's own row stays as it is"


def test_what_one_rank_did_not_measure_is_nobodys() -> None:
    for first, second in ((None, 100), (100, None), (None, None)):
        merged = ranks.merged(row(peak=first), [row(peak=first), row(peak=second)])
        assert merged[MEASURED]["peak_bytes"]["prefill"] is None
    bare = {key: value for key, value in row().items() if key != MEASURED} | {"kv_bytes": None}
    assert ranks.merged(bare, [bare, bare]) == bare


def test_ranks_that_disagree_are_a_defect() -> None:
    with pytest.raises(KvbenchError, match="a/0: rank 1 generated different tokens"):
        ranks.merged(row(), [row(), row((1, 3))])
    with pytest.raises(KvbenchError, match="rank 2"):
        ranks.merged(row(), [row(), row(), row(())])


def test_a_batch_of_one_process_is_the_sessions() -> None:
    session: Any = SimpleNamespace(rows=lambda samples: [*samples, "done"])
    assert ranks.batch(None, session, ["a"]) == ["a", "done"]  # type: ignore[list-item]


def test_a_batch_of_several_is_settled_and_each_row_is_merged_with_its_own() -> None:
    mine, theirs = [row(used=1), row((7,), used=2)], [row(used=10), row((7,), used=20)]
    team: Any = Team(other=theirs)
    made = ranks.batch(team, SimpleNamespace(rows=lambda samples: mine), [])  # type: ignore[arg-type]
    assert [each["kv_bytes"]["used"]["total"] for each in made] == [11, 22]
    assert team.calls == [("settle", mine, None, None)]
    error = ValueError("one")

    def fail(samples: Any) -> Any:
        raise error

    failing: Any = Team()
    with pytest.raises(ValueError, match="one"):
        ranks.batch(failing, SimpleNamespace(rows=fail), [])  # type: ignore[arg-type]
    assert failing.calls == [("settle", None, error, None)], "the others hear of it"


def test_what_all_do_is_done_when_all_have_done_it() -> None:
    assert ranks.on_every_rank(None, lambda: 3) == 3
    team: Any = Team()
    assert ranks.on_every_rank(team, lambda: 3) == 3
    assert team.calls == [("settle", None, None, ranks.LOADING_S)]
    error = OSError("no weights")
    with pytest.raises(OSError, match="no weights"):
        ranks.on_every_rank(team, lambda: (_ for _ in ()).throw(error))
    assert team.calls[-1] == ("settle", None, error, ranks.LOADING_S)


def test_one_process_joins_nobody_and_a_measurement_is_of_one() -> None:
    alone: Any = SimpleNamespace(runtime=SimpleNamespace(tensor_parallel=None), task=ToyTask())
    with ranks.joined_ranks(alone) as team:
        assert team is None
    measuring: Any = SimpleNamespace(single_process=True)
    many: Any = SimpleNamespace(runtime=SimpleNamespace(tensor_parallel="auto"), task=measuring)
    with pytest.raises(CombinationError, match="memory and time of a single process"), ranks.joined_ranks(many):
        pass


@pytest.mark.parametrize(
    ("rank", "told", "error", "passed_on"),
    [
        (0, False, ValueError("before anything was told"), False),
        (0, False, KeyboardInterrupt(), True),
        (0, True, ValueError("later"), True),
        (1, False, ValueError("elsewhere"), True),
    ],
)
def test_what_ends_a_run_here_is_passed_on_where_others_may_wait(
    monkeypatch: pytest.MonkeyPatch, rank: int, told: bool, error: BaseException, passed_on: bool
) -> None:
    many: Any = SimpleNamespace(runtime=SimpleNamespace(tensor_parallel="auto"), task=ToyTask())
    team: Any = Team(rank)
    team.announced = told
    monkeypatch.setattr("kvbench.models.devices.join_team", lambda runtime: team)
    with pytest.raises(type(error)), ranks.joined_ranks(many) as found:
        assert found is team and team.calls == [("open",)]
        raise error
    assert (("fail", error) in team.calls) == passed_on
    assert (("tell", []) in team.calls) == (rank == 0)


def test_an_error_that_came_from_the_others_is_not_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    many: Any = SimpleNamespace(runtime=SimpleNamespace(tensor_parallel="auto"), task=ToyTask())
    team: Any = Team(1)
    monkeypatch.setattr("kvbench.models.devices.join_team", lambda runtime: team)
    team.shared = ValueError("theirs")
    with pytest.raises(ValueError, match="theirs"), ranks.joined_ranks(many):
        raise team.shared
    assert team.calls == [("open",)]
    team.calls.clear()
    with ranks.joined_ranks(many):
        pass
    assert team.calls == [("open",)]


def test_a_terminated_run_is_interrupted_and_the_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ranks.terminated_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert signal.getsignal(signal.SIGTERM) is before
    seen: list[Any] = []

    def elsewhere() -> None:
        with ranks.terminated_as_interrupt():  # only the main thread may set one
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def following(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, team: Team, rows: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the result of a rank that follows, and the samples that it ran."""
    from contextlib import contextmanager
    from dataclasses import replace

    from kvbench.config.run_config import checked_config
    from kvbench.runner.batching import batches

    done: list[str] = []

    def noted(samples: Any) -> Any:
        done.extend(sample.id for sample in samples)
        return rows(samples)

    @contextmanager
    def opened(*_: Any) -> Any:
        yield SimpleNamespace(plan=lambda samples: list(batches(samples, 1)), rows=noted)

    monkeypatch.setattr(ranks, "open_session", opened)
    return ranks.follow(replace(checked_config(config(tmp_path)), task=ToyTask()), team), done  # type: ignore[arg-type]


def test_a_rank_that_follows_does_what_it_is_told_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    team: Any = Team(1, [])
    assert following(monkeypatch, tmp_path, team, lambda samples: [row()]) == ({"status": "ok", "rank": 1}, [])
    team.other = ["first/2", "first/0"]
    monkeypatch.setattr(Team, "settle", lambda self, rows, failed, seconds=None: [rows])
    found, done = following(monkeypatch, tmp_path, team, lambda samples: [row()])
    assert found == {"status": "ok", "rank": 1} and done == ["first/2", "first/0"]
    assert not list(tmp_path.iterdir()), "it writes nothing"


def test_a_rank_that_follows_goes_on_as_the_first_one_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    team: Any = Team(1, ["first/0", "second/1"])

    def fail(error: BaseException) -> Any:
        def rows(samples: Any) -> Any:
            team.shared = error
            raise error

        return rows

    found, done = following(monkeypatch, tmp_path, team, fail(ValueError("one bad record")))
    assert found["status"] == "ok" and done == ["first/0", "second/1"]
    found, done = following(monkeypatch, tmp_path, team, fail(MemoryError("tried to allocate 3 bytes")))
    assert found == {"status": "oom", "rank": 1} and done == ["first/0"]
    team.broken = True
    with pytest.raises(ValueError, match="lost"):
        following(monkeypatch, tmp_path, team, fail(ValueError("lost")))


def test_a_rank_that_follows_binds_the_tokenizer_and_raises_what_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    bound: list[Any] = []
    monkeypatch.setattr("kvbench.models.load.load_tokenizer", lambda model: f"tokenizer of {model.name}")
    monkeypatch.setattr(ToyTask, "bind", lambda self, tokenizer: bound.append(tokenizer))
    monkeypatch.setattr(ToyTask, "needs_tokenizer", True)
    monkeypatch.setattr(Team, "settle", lambda self, rows, failed, seconds=None: [rows])
    following(monkeypatch, tmp_path, Team(1, ["first/0"]), lambda samples: [row()])
    assert bound == ["tokenizer of toy"]

    def refuse(samples: Any) -> Any:
        raise MemoryError("its own, which rank 0 does not know")

    team: Any = Team(1, ["first/0"])
    monkeypatch.undo()
    with pytest.raises(MemoryError):
        following(monkeypatch, tmp_path, team, refuse)


def test_sums_of_bytes_are_by_key_and_what_is_no_number_is_the_first_ones() -> None:
    own, other = row(used=1), row(used=2)
    del other[MEASURED]["peak_bytes"]["rss"]
    other[MEASURED]["peak_bytes"] |= {"rss": 5, "kind": "another"}
    peaks = ranks.merged(own, [own, other])[MEASURED]["peak_bytes"]
    assert peaks == {"prefill": 200, "decode": 10, "kind": "cuda_allocator", "rss": None}
    bare = {**row(), "kv_bytes": None}
    assert ranks.merged(bare, [bare, bare])[MEASURED]["ranks"][0]["kv_bytes"] is None
