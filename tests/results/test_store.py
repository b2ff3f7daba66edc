"""The directory of a run: written in order, held by one process."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from kvbench.errors import KvbenchError
from kvbench.results import record
from kvbench.results.samples import DiskError
from kvbench.results.store import RunStore, find_runs
from kvbench.util import atomic
from tests.results.test_tables import run as table_row
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
    messages: list[str] = []

    def let_go(text: str) -> None:
        messages.append(text)
        assert child.poll() is None
        child.stdin.close()

    with RunStore(tmp_path, "run", let_go).hold():
        pass
    assert len(messages) == 1
    assert child.wait() == 0
    assert f"process {child.pid} on " in messages[0] and " is working on run " in messages[0]


def test_a_killed_holder_holds_nothing(tmp_path):
    child = holder(tmp_path)
    with pytest.raises(KvbenchError, match="is still working on run"), RunStore(tmp_path, "run").hold(timeout_s=0.2):
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
        store.write_metrics(table_row("fp16"))
    assert store.config() == config(tmp_path)
    assert store.environment() == {"python": "3.11"}
    assert store.metrics() == record.fill_defaults(table_row("fp16"))
    assert [found.run_id for found in find_runs(tmp_path)] == ["run"]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    store = RunStore(tmp_path, "run")
    with store.hold():
        for name in (f".metrics.json.1{atomic.ENDING}", f"mine{atomic.ENDING}"):
            (store.path / name).write_text("half")
        store.start(config(tmp_path))
        assert not (store.path / "env.json").exists()
    assert {path.name for path in store.path.iterdir()} == {f"mine{atomic.ENDING}", "config.yaml", ".lock", ".holder"}


def test_unreadable_files_are_as_good_as_none(tmp_path):
    store = RunStore(tmp_path, "run")
    with store.hold():
        (store.path / "metrics.json").write_text("{")
        (store.path / "config.yaml").write_bytes(b"\xff\xfe: [")
    assert store.metrics() is None
    assert store.config() is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"status": "ok"}', "run_id is missing"),
        ("[1, 2]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("{", "not a JSON object"),
        (json.dumps({**table_row("fp16"), "mean": None}), "mean is not an object"),
        (json.dumps({**table_row("fp16"), "scores": {"t": {"score": "x"}}}), "scores.t.score is not a number"),
        (json.dumps({**table_row("fp16"), "tokens_per_s": True}), "tokens_per_s is not a number"),
        (json.dumps({**table_row("fp16"), "label": 3}), "label is not a text"),
    ],
)
def test_metrics_of_another_shape_are_none_and_the_reason_is_known(tmp_path, content, said):
    store = RunStore(tmp_path, "run")
    with store.hold():
        (store.path / "metrics.json").write_text(content)
    assert store.metrics() is None
    problem = store.problem()
    assert problem is not None and said in problem and str(store.path) in problem and "same command" in problem
    (store.path / "metrics.json").unlink()
    assert store.problem() is None


def test_deliveries_are_kept_by_destination(tmp_path):
    store = RunStore(tmp_path, "run")
    assert store.deliveries() == {}
    with store.hold():
        store.record_delivery("here", "a")
        store.record_delivery("there", "b")
        store.record_delivery("here", "c")
    assert store.deliveries() == {"here": "c", "there": "b"}
    folder = tmp_path / "offline"
    folder.mkdir()
    with store.hold():
        store.record_delivery("there", "d", folder)
    assert store.deliveries() == {"here": "c", "there": "d"}
    folder.rmdir()
    assert store.deliveries() == {"here": "c"}, "nobody has what was sent there"
    (store.path / ".delivered.json").write_text('{"a": 1, "b": ["x"], "c": "digest"}')
    assert store.deliveries() == {"c": "digest"}
    (store.path / ".delivered.json").write_text("{")
    assert store.deliveries() == {}


def test_a_lock_that_cannot_be_taken_is_said(tmp_path):
    store = RunStore(tmp_path, "run")
    (store.path / ".lock").mkdir(parents=True)
    with pytest.raises(DiskError, match=r"\.lock: cannot be written"), store.hold():
        pass


def test_a_folder_that_was_removed_needs_no_space(tmp_path):
    store = RunStore(tmp_path, "run")
    with pytest.raises(DiskError) as error:
        store.append([{}])
    assert "was removed" in str(error.value) and "space" not in str(error.value)
    assert "free some space" in str(DiskError(tmp_path, OSError(errno.ENOSPC, "full")))
    assert "make the file writable" in str(DiskError(tmp_path, PermissionError(errno.EACCES, "no")))


def test_runs_are_listed_by_the_time_they_were_touched(tmp_path):
    for name in ("b", "a", "c"):
        store = RunStore(tmp_path, name)
        with store.hold():
            store.start(config(tmp_path))
    (tmp_path / "no run").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert [found.run_id for found in find_runs(tmp_path)] == ["b", "a", "c"]
    assert find_runs(tmp_path / "nothing") == []


def test_commits_and_repetitions_are_kept_with_a_run(tmp_path):
    store = RunStore(tmp_path, "run")
    assert store.origin() == store.rerun() == {}
    with store.hold():
        store.write_origin({"commit": "abc"})
        store.write_rerun({"kind": "times"})
    assert (store.origin(), store.rerun()) == ({"commit": "abc"}, {"kind": "times"})
    assert json.loads((store.path / "origin.json").read_text()) == {"commit": "abc"}
    assert json.loads((store.path / "rerun.json").read_text()) == {"kind": "times"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"file/run"), RunStore(tmp_path / "file", "run").hold():
        pass


def filled(folder, *names):
    store = RunStore(folder, "run")
    store.path.mkdir()
    store.append([{**ROW, "id": name} for name in names])
    return store


ROW = {
    "id": "a", "task": "t", "length": None, "scores": {"score": 1.0}, "scorer_version": 1, "prediction": "x",
    "prompt_tokens": 3, "tokens": [1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["c", "a"], ["b", "c", "a"]),
        (["c", "absent", "b", "a"], ["c", "b", "a"]),
        (["c"], ["a", "b", "c"]),
        (["a"], ["b", "c", "a"]),
        ([], ["a", "b", "c"]),
    ],
)
def test_rows_of_several_processes_are_put_in_order_behind_all_others(tmp_path, order, expected):
    store = filled(tmp_path, "a", "b", "c")
    before = store.samples().rows
    store.arrange(order)
    after = store.samples().rows
    assert list(after) == expected and after == before


@pytest.mark.parametrize(
    ("names", "kept"), [({"a", "c"}, ["a", "c"]), ({"a", "b", "c", "d"}, ["a", "b", "c"]), ((), [])]
)
def test_some_rows_alone_are_kept(tmp_path, names, kept):
    store = filled(tmp_path, "a", "b", "c")
    before = store.samples_path.read_bytes()
    store.keep_only(names)
    assert list(store.samples().rows) == kept
    lines = before.splitlines(keepends=True)
    assert store.samples_path.read_bytes() == b"".join(lines["abc".index(name)] for name in kept)


def test_files_of_a_run_that_are_damaged_are_as_if_missing(tmp_path):
    store = RunStore(tmp_path, "run")
    store.path.mkdir()
    for text in ("a: [", "- a\n", ""):
        (store.path / "config.yaml").write_text(text)
        assert store.config() is None
    for text in ("{", "[]", ""):
        for name in ("origin", "rerun", "env"):
            (store.path / f"{name}.json").write_text(text)
        assert store.origin() == store.rerun() == {} and store.environment() is None


def test_what_yaml_cannot_hold_is_written_as_text(tmp_path):
    store = RunStore(tmp_path, "run")
    given = {"a": (1, 2.5, True, None, "x"), 3: {"path": tmp_path}, "deep": [{"set": (tmp_path,)}]}
    with store.hold():
        store.start(given)
    place = str(tmp_path)
    assert store.config() == {"a": [1, 2.5, True, None, "x"], "3": {"path": place}, "deep": [{"set": [place]}]}


def test_runs_are_ordered_by_their_last_change(tmp_path):
    assert find_runs(tmp_path / "absent") == []
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "none").mkdir()
    for name in ("a", "c", "b"):
        latest = max(path.stat().st_ctime_ns for path in tmp_path.iterdir())
        while (tmp_path / name).stat().st_ctime_ns <= latest:
            (tmp_path / name).chmod(0o755)
    assert [store.run_id for store in find_runs(tmp_path)] == ["a", "c", "b"]
