"""Worker processes: who gets which request, and what happens when one of them dies, fails, or the parent is stopped."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import KvbenchError
from kvbench.parallel.crew import DEATHS, Crew, WorkerDiedError
from kvbench.util.failures import bytes_asked, is_out_of_memory

SERVER = "tests.parallel.crew_support:serve"


def crew(folder: Path, count: int = 2, **argument: Any) -> Crew:
    return Crew(SERVER, {"folder": str(folder), **argument}, [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(count)])


def gone(pid: int) -> bool:
    """True once a process has ended (or is a zombie of this one)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_requests_are_answered_by_all_workers_and_a_killed_ones_by_another(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [{"say": i} for i in range(6)]
    requests[0] |= {"wait_for": "second", "dies": "once"}
    requests[1] |= {"touch": "second"}
    with crew(tmp_path) as workers:
        first = workers.pids
        answers = dict(workers.outcomes(requests))
        pids = workers.pids
        assert {facts["gpu"] for facts in workers.facts.values()} == {"0", "1"}, "each has its own GPU"
        again = dict(workers.outcomes([{"say": "again"}]))
    assert not first, "nothing is started before there is something to do"
    assert {index: answer["said"] for index, answer in answers.items()} == {i: i for i in range(6)}
    assert again[0]["said"] == "again" and again[0]["pid"] in pids, "workers stay between requests"
    assert all(gone(pid) for pid in pids)
    assert {answer["pid"] for answer in answers.values()} <= set(pids), "the dead one answered nothing"


def test_errors_come_back_as_they_were_and_only_as_many_workers_start_as_there_is_work(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as workers:
        ((_, error),) = workers.outcomes([{"raises": "config"}])
        assert len(workers.pids) == 1
        assert isinstance(error, KvbenchError) and type(error).__name__ == "ConfigError" and error.exit_code == 2
        assert str(error) == "method.residual=7: must be even.\n  hint: set method.residual=8"
        ((_, memory),) = workers.outcomes([{"raises": "memory"}])
        assert is_out_of_memory(memory) and bytes_asked(memory) == 77
        ((_, bug),) = workers.outcomes([{"raises": "bug"}])
        assert not isinstance(bug, KvbenchError) and not is_out_of_memory(bug)
        trace = "".join(traceback.format_exception(bug))
        assert trace.endswith("ZeroDivisionError: division by zero\n") and "crew_support.py" in trace


def test_a_request_that_kills_every_worker_is_given_up_with_a_clear_error(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as workers:
        outcomes = workers.outcomes([{"say": 1}, {"say": 2, "dies": "always"}])
        assert next(outcomes)[1]["said"] == 1
        with pytest.raises(WorkerDiedError) as caught:
            next(outcomes)
    message = str(caught.value)
    assert message.startswith(f"{DEATHS} worker processes died, the last one while working on")
    assert "killed by signal 9, SIGKILL" in message and "runtime.workers=1" in message


def test_a_worker_that_cannot_load_ends_the_work(tmp_path: Path) -> None:
    with crew(tmp_path, 1, fails="memory") as workers, pytest.raises(MemoryError, match="allocate 5 bytes"):
        list(workers.outcomes([{"say": 1}]))
    with crew(tmp_path, 1, fails="dies") as workers, pytest.raises(WorkerDiedError, match=r"loading \(exit status 3\)"):
        list(workers.outcomes([{"say": 1}]))


def test_what_was_answered_before_an_interruption_is_still_there_and_stopped_work_ends(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [{"say": 0}, {"say": 1, "wait_for": "interrupted"}, {"say": 2}, {"say": 3}]
    with crew(tmp_path) as workers:
        outcomes = workers.outcomes(requests)
        assert next(outcomes)[0] == 0
        outcomes.close()  # as an exception in the loop over it does
        assert [index for index, _ in workers.unseen()][:1] == [0], "it may not have been stored"
        pids = workers.pids
    until = time.monotonic() + 20
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(map(gone, pids)), "also the one in the middle of a request"
    (tmp_path / "interrupted").touch()
    with crew(tmp_path, 1) as workers:
        outcomes = workers.outcomes(requests)
        assert next(outcomes)[0] == 0
        workers.stop()
        assert list(outcomes) == []


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        try:
            workers = crew(tmp_path)
            for _ in workers.outcomes([{"say": 0}, {"say": 1}, {"say": 2, "wait_for": "never"}, {"say": 3}]):
                (tmp_path / "pids").write_text(" ".join(map(str, workers.pids)))
                if len(workers.facts) == 2:
                    os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until = time.monotonic() + 20
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(pids) == 2 and all(map(gone, pids))
