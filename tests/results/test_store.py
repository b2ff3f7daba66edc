"""The directory of a run: written in order, held by one process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kvbench.errors import KvbenchError
from kvbench.results.store import RunStore, find_runs
from tests.run_support import config

HOLDER = """
import sys, time
from kvbench.results.store import RunStore
with RunStore(sys.argv[1], "run").hold():
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(directory, seconds: float) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    return child


def test_the_second_process_waits_and_says_so(tmp_path):
    child = holder(tmp_path, 1.0)
    said: list[str] = []
    started = time.monotonic()
    with RunStore(tmp_path, "run", said.append).hold():
        assert time.monotonic() - started > 0.3
    child.wait()
    assert len(said) == 1
    assert f"is held by process {child.pid} on " in said[0]


def test_a_killed_holder_holds_nothing(tmp_path):
    child = holder(tmp_path, 60)
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
