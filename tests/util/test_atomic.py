"""A file has its old content or its new one, whoever writes and whatever fails."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from kvbench.util import atomic


def test_two_threads_that_write_the_same_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins while the first is about to finish, and stops before it has written anything."""
    path = tmp_path / "metrics.json"
    second_is_open, first_is_done = threading.Event(), threading.Event()
    seen: list[bytes] = []
    sync = os.fsync

    def slow(descriptor: int) -> None:
        sync(descriptor)
        assert os.fstat(descriptor).st_size == len(b"the first's")  # nothing is left in a buffer
        if threading.current_thread() is not second and not second.is_alive() and not second_is_open.is_set():
            second.start()
            assert second_is_open.wait(10)

    def other() -> None:
        with atomic.replacing(path) as partial, partial.open("wb") as handle:
            second_is_open.set()
            assert first_is_done.wait(10)
            handle.write(b"the second's")

    second = threading.Thread(target=other)
    monkeypatch.setattr(os, "fsync", slow)
    atomic.replace_file(path, b"the first's")
    seen.append(path.read_bytes())
    first_is_done.set()
    second.join(10)
    seen.append(path.read_bytes())
    assert seen == [b"the first's", b"the second's"]
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.json"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_content_and_nothing_beside(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.json"
    atomic.replace_file(path, b"old")
    with pytest.raises(type(error)), atomic.replacing(path) as partial:
        partial.write_bytes(b"ne")
        raise error
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic.replace_file(path, b"old")
    with pytest.raises(FileNotFoundError), atomic.replacing(path):
        pass
    assert path.read_bytes() == b"old"


def test_long_names_and_folders(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 120 + ".json")
    atomic.replace_file(path, b"x")
    assert path.read_bytes() == b"x"
    for folder in (tmp_path, Path(), Path("/")):
        with pytest.raises(IsADirectoryError):
            atomic.replace_file(folder, b"x")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    atomic.replace_file(path, b"x")
    with pytest.raises(FileNotFoundError), atomic.replacing(path) as partial:
        partial.write_bytes(b"y")
        partial.rename(tmp_path / partial.name.replace(str(os.getpid()), "1"))  # of a process that is no more
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / ".hidden").touch()
    (tmp_path / "mine.partial").touch()
    atomic.tidy(tmp_path)
    assert sorted(item.name for item in tmp_path.iterdir()) == [".hidden", "metrics.json", "mine.partial"]


def partial_names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir() if item.name.endswith(atomic.ENDING))


def test_the_next_writer_of_a_file_removes_what_killed_ones_left_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with atomic.replacing(path) as partial:
        partial.write_bytes(b"x")
        alive = partial.name
    gone = alive.replace(f".{os.getpid()}.", ".4194305.")  # above any process's number
    other_file, other_machine = gone.replace("runs.csv", "other.csv"), ".runs.csv.elsewhere-9.7.8.partial"
    old_machine, other_thread = ".runs.csv.elsewhere-8.7.8.partial", alive.replace(".partial", "1.partial")
    for name in (gone, other_file, other_machine, old_machine, other_thread):
        (tmp_path / name).write_bytes(b"half")
    no_process = gone.replace(".4194305.", f".{10**30}.")
    unread = ".runs.csv.something else.partial"
    for name in (no_process, unread):
        (tmp_path / name).write_bytes(b"half")
    now = time.time()
    os.utime(tmp_path / old_machine, (now, now - 24.1 * 3600))
    os.utime(tmp_path / other_machine, (now, now - 23.9 * 3600))
    os.utime(tmp_path / other_thread, (1, 1))
    atomic.replace_file(path, b"y")
    assert partial_names(tmp_path) == sorted([other_file, other_machine, other_thread, unread])
    assert path.read_bytes() == b"y"


def test_the_file_of_another_users_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(process: int, number: int) -> None:
        assert number == 0  # asks, and ends nothing
        raise PermissionError

    path = tmp_path / "runs.csv"
    with atomic.replacing(path) as partial:
        partial.write_bytes(b"x")
    theirs = tmp_path / partial.name.replace(f".{os.getpid()}.", ".1.")
    theirs.write_bytes(b"half")
    monkeypatch.setattr(os, "kill", kill)
    atomic.replace_file(path, b"y")
    assert partial_names(tmp_path) == [theirs.name]


def test_a_name_of_an_unfinished_file_says_what_and_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a.host_ä" + "x" * 50)
    with atomic.replacing(tmp_path / ("n" * 60)) as partial:
        partial.touch()
    host = "a-host_-" + "x" * 12
    assert partial == tmp_path / f".{'n' * 40}.{host}.{os.getpid()}.{threading.get_ident()}.partial"
