"""The directory of a run: written in order, held by one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbench.errors import KvbenchError
from kvbench.results.store import RunStore, find_runs
from tests.run_support import config

HOLDER = """
import sys
from kvbench.results.store import RunStore
with RunStore(sys.argv[1], "run").hold():
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(directory) -> subprocess.Popen:
    """A process that holds the run until its input is closed."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    return child


def test_the_second_process_waits_and_says_so(tmp_path):
    child = holder(tmp_path)
    said: list[str] = []

    def let_go(text: str) -> None:
        said.append(text)
        assert child.poll() is None
        child.stdin.close()

    with RunStore(tmp_path, "run", let_go).hold():
        pass
    assert len(said) == 1
    assert child.wait() == 0
    assert f"is held by process {child.pid} on " in said[0]


def test_a_killed_holder_holds_nothing(tmp_path):
    child = holder(tmp_path)
    with pytest.raises(KvbenchError, match="still held"), RunStore(tmp_path, "run").hold(timeout_s=0.2):
        pass
    child.kill()
    child.wait()
    with RunStore(tmp_path, "run").hold(timeout_s=1):
        pass


def test_what_is_written_comes_back(tmp_path):
    store = RunStore(tmp_path, "run")
    assert store.config() is None
    assert store.metrics() is None
    with store.hold():
        store.start(config(tmp_path), {"python": "3.11"})
        store.write_metrics({"status": "ok"})
    assert store.config() == config(tmp_path)
    assert store.metrics() == {"status": "ok"}
    assert [found.run_id for found in find_runs(tmp_path)] == ["run"]


def test_unreadable_files_are_as_good_as_none(tmp_path):
    store = RunStore(tmp_path, "run")
    with store.hold():
        (store.path / "metrics.json").write_text("{")
        (store.path / "config.yaml").write_bytes(b"\xff\xfe: [")
    assert store.metrics() is None
    assert store.config() is None
