"""Runs of a machine whose results another one gathers: files, rows, errors, locks, and attempts that are lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import KvbenchError
from kvbench.results import keeper as module
from kvbench.results.keeper import Keeper, KeptMirror
from kvbench.results.mirror import current, mirrored
from kvbench.results.samples import DiskError
from kvbench.results.store import RunStore


def row(name: str) -> dict[str, Any]:
    return {"id": name, "task": "t", "prediction": "p", "scores": {}, "scorer_version": 1}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def keeper(home: Path) -> Keeper:
    home.mkdir()
    return Keeper(home)


def mirror(keeper: Keeper, scratch: Path, claim: str = "job 1") -> KeptMirror:
    return KeptMirror(lambda name, *arguments: getattr(keeper, name)(*arguments), claim, scratch)


def test_rows_and_files_arrive_as_they_are_written_and_a_second_job_continues(
    tmp_path: Path, home: Path, keeper: Keeper
) -> None:
    there = home / "results" / "runs" / "a-b"
    with mirrored(mirror(keeper, tmp_path / "one")):
        store = RunStore("results/runs", "a-b")
        with store.hold():
            store.start({"model": {"name": "m"}}, {"device": "cpu"})
            assert (there / "config.yaml").is_file() and (there / "env.json").is_file()
            store.append([row("1"), row("2")])
            assert (there / "samples.jsonl").read_bytes() == store.samples_path.read_bytes()
        assert not store.path.exists(), "nothing stays on the other machine"
    assert current() is None
    with mirrored(mirror(keeper, tmp_path / "two", "job 2")):
        store = RunStore("results/runs", "a-b")
        with store.hold():
            assert list(store.recover()) == ["1", "2"]
            assert os.stat(store.samples_path).st_mtime == 0, "older than the job"
            store.append([row("3")])
            store.arrange(["3", "2"])
    gathered = RunStore(home / "results" / "runs", "a-b")
    assert list(gathered.samples().rows) == ["1", "3", "2"] and not gathered.samples().damaged
    with gathered.hold(timeout_s=0):
        pass


def test_a_torn_line_of_the_gathering_machine_is_repaired_there(tmp_path: Path, home: Path, keeper: Keeper) -> None:
    gathered = RunStore(home / "runs", "a-b")
    with gathered.hold():
        gathered.start({})
        gathered.append([row("1")])
    with gathered.samples_path.open("ab") as handle:
        handle.write(b'{"id": "2", "ta')
    with mirrored(mirror(keeper, tmp_path / "one")):
        store = RunStore("runs", "a-b")
        with store.hold():
            assert list(store.recover()) == ["1"]
            store.append([row("2")])
    assert list(gathered.samples().rows) == ["1", "2"] and not gathered.samples().damaged


def test_a_full_disk_of_the_gathering_machine_is_the_error_of_the_job(
    tmp_path: Path, home: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = os.write, []

    def write(descriptor: int, data: Any) -> int:
        if full and str(home) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with mirrored(mirror(keeper, tmp_path / "one")):
        store = RunStore("runs", "a-b")
        with store.hold():
            store.start({})
            store.append([row("1")])
            full.append(True)
            with pytest.raises(DiskError, match="no space left on the disk"):
                store.append([row("2")])
    full.clear()
    gathered = RunStore(home / "runs", "a-b")
    assert list(gathered.samples().rows) == ["1"] and not gathered.samples().damaged


def test_a_lost_attempt_is_unlocked_and_writes_nothing_more(
    tmp_path: Path, home: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, second = mirror(keeper, tmp_path / "one", "first"), mirror(keeper, tmp_path / "two", "second")
    folder = Path("runs/a-b")
    assert lost.begin(folder) == {}
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            keeper.withdraw("first")

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert second.begin(folder) == {} and len(waits) == 2
    assert "first is working on run a-b; waiting" in capsys.readouterr().err
    with pytest.raises(KvbenchError, match="first does not hold"):
        lost.append(folder, b"{}\n")
    with pytest.raises(KvbenchError, match="claim of first"):
        lost.begin(folder)
    second.write(folder, "../../outside.txt", b"x")
    assert (home / folder / "outside.txt").exists(), "only the run's folder is written"
    lost.end(folder)
    with pytest.raises(KvbenchError, match="still working"), RunStore(home / "runs", "a-b").hold(0):
        pass
    second.end(folder)
    own = RunStore(home / "runs", "a-b")
    with own.hold(), monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", lambda seconds: (_ for _ in ()).throw(TimeoutError))
        with pytest.raises(TimeoutError):
            second.begin(folder)  # a process of the gathering machine has it


def test_a_run_that_is_held_answers_busy_and_one_that_cannot_be_read_an_error(
    home: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    number, text, name = keeper.begin("one", "file/run")["error"]
    assert number in (errno.EEXIST, errno.ENOTDIR) and text == os.strerror(number) and "file" in name
    assert keeper.begin("one", "runs/a") == {"files": {}}
    assert keeper.begin("two", "runs/a") == {"busy": "one"}
    assert keeper.end("two", "runs/a") == {} and keeper.begin("two", "runs/a") == {"busy": "one"}, "it is not its own"
    keeper.end("one", "runs/a")
    (home / "runs" / "a" / "metrics.json").write_bytes(b"{}")
    (home / "runs" / "a" / "folder").mkdir()

    def unreadable(self: Path) -> bytes:
        raise OSError(errno.EIO, "bad sector", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", unreadable)
        number, text, name = keeper.begin("one", "runs/a")["error"]
    assert (number, text) == (errno.EIO, "bad sector") and name.endswith("metrics.json")
    assert keeper.begin("two", "runs/a") == {"files": {"metrics.json": b"{}"}}, "the failed attempt holds nothing"
    refused = keeper.append("one", "runs/a", b"{}\n")
    assert set(refused) == {"refused"} and keeper.write("one", "runs/a", "x", b"") == refused
    assert keeper.append("two", "runs/a", b'{"id": "1"}\n') == {} == keeper.write("two", "runs/a", "x", b"y")
    assert (home / "runs" / "a" / "x").read_bytes() == b"y"
    assert keeper.withdraw("two") == {}
    assert set(keeper.begin("two", "runs/a")) == {"refused"}
    assert set(keeper.begin("one", "runs/a")) == {"files"}


def test_an_error_without_a_number_is_one_of_input_and_output() -> None:
    assert module._failed(OSError("odd")) == {"error": (errno.EIO, "odd", "")}
    assert module._failed(OSError(errno.ENOSPC, "full", "x")) == {"error": (errno.ENOSPC, "full", "x")}
    bare = DiskError(Path("x"), OSError(errno.ENOSPC, "full"))
    assert module._failed(bare) == {"error": (errno.EIO, os.strerror(errno.EIO), "")}
