"""Another rank fails: the thread that watches for it, and the main thread, may both come to the end of a run."""

from __future__ import annotations

import threading

import pytest

from kvbench.results import summary
from kvbench.results.store import RunStore
from kvbench.runner import run as run_module
from kvbench.runner.run import answer_run
from tests.run_files import on_disk, read
from tests.run_support import config

LOST = {"rank": 1, "kind": "MemoryError", "message": "tried to allocate 20.00 GiB", "oom": True}


@pytest.mark.parametrize("lost", [LOST, {**LOST, "oom": False}, {**LOST, "kind": "KeyboardInterrupt", "oom": False}])
def test_a_run_ends_once_though_two_threads_come_to_its_end(tmp_path, monkeypatch, lost):
    """Under tensor parallelism, a thread watches the other ranks, and may record a failure at the same time."""
    begun: list[run_module.RunSteps] = []
    written: list[str] = []
    do, build, write = run_module.RunSteps.steps, summary.build, RunStore.write_metrics
    watcher = threading.Thread(target=lambda: begun[0]._lost(lost))

    def noted(self):
        begun.append(self)
        return (yield from do(self))

    def slow(*args, **kwargs):
        if not watcher.ident:
            watcher.start()
            watcher.join(0.3)  # it has to wait for this thread, and to leave alone what is being written
            assert watcher.is_alive()
        return build(*args, **kwargs)

    def counted(self, metrics):
        written.append(metrics["status"])
        write(self, metrics)

    monkeypatch.setattr(run_module.RunSteps, "steps", noted)
    monkeypatch.setattr(summary, "build", slow)
    monkeypatch.setattr(RunStore, "write_metrics", counted)
    done = answer_run(config(tmp_path))
    watcher.join(10)
    assert written == ["ok"]
    computed = on_disk(done)
    assert (computed["status"], computed["oom"], computed["error"], computed["errors"]) == ("ok", None, None, [])


def test_a_failure_elsewhere_is_the_end_of_a_run_that_has_none(tmp_path, monkeypatch):
    """The main thread waits for ever: what the watching thread writes is whole, and is not written over."""
    do = run_module.RunSteps.steps

    def lost(self):
        done = yield from do(self)
        self._ended = None
        self._lost(LOST)
        self.failures.errors.append(
            {"sample": None, "type": "RuntimeError", "message": "the connection broke", "traceback": ""}
        )
        assert self._finish("error") == self._ended
        return done

    monkeypatch.setattr(run_module.RunSteps, "steps", lost)
    content = read(answer_run(config(tmp_path))["run_dir"])
    assert content["status"] == "oom"
    assert content["oom"]["message"].startswith("rank 1: ")
    assert content["oom"]["bytes_asked"] == 20 * 2**30
