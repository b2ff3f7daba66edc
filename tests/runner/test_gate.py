"""The gate in front of a GPU, with devices that are made up: who enters, who waits, and who is forgotten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbench.errors import ConfigError
from kvbench.runner import gate
from kvbench.util.processor import began

SIZE = 1000


class Queue:
    """Runs in threads that enter the gate of one device; each leaves when the test releases it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inside, self.said = folder, [], []
        self._leave: dict[str, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, needed: int) -> None:
        leave, joined = threading.Event(), threading.Event()
        self._leave[name] = leave

        def run() -> None:
            with gate.entered("fake", SIZE, needed, self._say, self.folder, 0.002):
                self.inside.append(name)
                joined.set()
                assert leave.wait(20)
            self.inside.remove(name)

        thread = threading.Thread(target=run, daemon=True)
        before = len(entries(self.folder))
        thread.start()
        self._threads.append(thread)
        until(lambda: len(entries(self.folder)) > before)

    def end(self, name: str) -> None:
        self._leave[name].set()
        until(lambda: name not in self.inside)

    def close(self) -> None:
        for leave in self._leave.values():
            leave.set()
        for thread in self._threads:
            thread.join(20)

    def _say(self, line: str) -> None:
        self.said.append(line)


def entries(folder: Path) -> list[dict]:
    try:
        return json.loads((folder / "fake.json").read_text())
    except (FileNotFoundError, ValueError):
        return []


def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("did not happen")


def test_runs_share_a_device_while_they_fit_and_enter_in_order(tmp_path: Path) -> None:
    with ExitStack() as stack:
        queue = Queue(tmp_path)
        stack.callback(queue.close)
        queue.start("a", 500)
        until(lambda: queue.inside == ["a"])
        queue.start("b", 400)
        until(lambda: queue.inside == ["a", "b"])
        queue.start("large", 900)
        queue.start("small", 10)  # would fit, but does not overtake
        until(lambda: len(queue.said) == 2)
        assert queue.inside == ["a", "b"]
        assert "waiting for 900 B of 0.977 KiB on fake, which other runs use" in queue.said
        queue.end("a")
        queue.end("b")
        until(lambda: queue.inside == ["large", "small"])
        queue.end("large")
        queue.start("whole", 5000)  # more than there is: alone
        until(lambda: len(queue.said) == 3)
        queue.end("small")
        until(lambda: queue.inside == ["whole"])
        queue.start("last", 1)
        until(lambda: len(queue.said) == 4)
        queue.end("whole")
        until(lambda: queue.inside == ["last"])
    assert entries(tmp_path) == []


def test_a_process_that_ended_leaves_its_room(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from kvbench.runner import gate\n"
        f"with gate.entered('fake', {SIZE}, 900, ledgers=Path(sys.argv[1])): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert [entry["in"] for entry in entries(tmp_path)] == [True]
    (reused,) = entries(tmp_path)
    messages: list[str] = []
    with gate.entered("fake", SIZE, 900, messages.append, tmp_path, 0.002):
        assert [entry["pid"] for entry in entries(tmp_path)] != [reused["pid"]]
    assert messages == []


def test_an_error_inside_gives_the_room_back_and_a_damaged_ledger_is_empty(tmp_path: Path) -> None:
    (tmp_path / "fake.json").write_text("{")
    with pytest.raises(ValueError, match="inside"), gate.entered("fake", SIZE, 900, ledgers=tmp_path):
        raise ValueError("inside")
    assert entries(tmp_path) == []


@pytest.mark.parametrize(("text", "number"), [(None, 1), ("", 1), ("1", 1), ("3", 3)])
def test_workers_per_gpu(text: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gate.PER_GPU, raising=False)
    if text is not None:
        monkeypatch.setenv(gate.PER_GPU, text)
    assert gate.per_gpu() == number


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_workers_per_gpu_that_are_no_number_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gate.PER_GPU, text)
    with pytest.raises(ConfigError, match="must be a whole number, 1 or greater"):
        gate.per_gpu()


def test_ledgers_are_made_where_there_is_no_folder_for_others_to_read(tmp_path: Path) -> None:
    place = tmp_path / "new" / "ledgers"
    for _ in range(2):
        with gate.entered("fake", SIZE, 900, ledgers=place):
            assert len(entries(place)) == 1
    assert place.stat().st_mode & 0o777 == 0o700


def listed(place: Path, *waiting: tuple[str, int, bool]) -> gate._Ledger:
    """A ledger with entries of this process: their marks, their bytes, and whether they are in."""
    place.mkdir(exist_ok=True)
    mine = {"pid": os.getpid(), "began": began(os.getpid())}
    content = [{"mark": mark, "bytes": size, "in": inside, **mine} for mark, size, inside in waiting]
    (place / "fake.json").write_text(json.dumps(content))
    return gate._Ledger(place, "fake")


@pytest.mark.parametrize(
    ("inside", "needed", "enters"),
    [([], 5000, True), ([500], 420, True), ([500], 421, False), ([300, 200], 420, True), ([300, 200], 421, False)],
)
def test_92_percent_of_a_device_are_promised(tmp_path: Path, inside: list[int], needed: int, enters: bool) -> None:
    ledger = listed(tmp_path, *((f"in {size}", size, True) for size in inside), ("mine", needed, False))
    assert ledger.enter("mine", SIZE) is enters
    assert [entry["in"] for entry in entries(tmp_path)] == [True] * len(inside) + [enters]


def test_only_the_first_that_waits_enters(tmp_path: Path) -> None:
    ledger = listed(tmp_path, ("in", 10, True), ("first", 10, False), ("second", 10, False))
    assert not ledger.enter("second", SIZE) and not ledger.enter("in", SIZE) and not ledger.enter("unknown", SIZE)
    assert ledger.enter("first", SIZE) and ledger.enter("second", SIZE)
    ledger.leave("first")
    assert [entry["mark"] for entry in entries(tmp_path)] == ["in", "second"]


def test_an_entry_says_who_waits_for_how_much(tmp_path: Path) -> None:
    ledger = gate._Ledger(tmp_path, "cuda:0 / a b")
    marks = [ledger.join(7), ledger.join(8)]  # type: ignore[list-item]
    content = json.loads((tmp_path / "cuda-0---a-b.json").read_text())
    mine = {"pid": os.getpid(), "began": began(os.getpid()), "in": False}
    assert content == [{"mark": mark, "bytes": size, **mine} for mark, size in zip(marks, (7, 8), strict=True)]
    assert len(set(marks)) == 2


def test_a_process_with_the_number_of_one_that_ended_is_another(tmp_path: Path) -> None:
    ledger = listed(tmp_path, ("old", 900, True))
    (entry,) = entries(tmp_path)
    (tmp_path / "fake.json").write_text(json.dumps([{**entry, "began": -1.0}]))
    assert ledger.enter(ledger.join(900), SIZE)
    assert [entry["bytes"] for entry in entries(tmp_path)] == [900] and len(entries(tmp_path)) == 1


def test_ledgers_of_a_user_are_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert gate.ledger_folder() == tmp_path / "kvbench-gate-1234"
    with gate.entered("fake", SIZE, 900):
        assert len(entries(gate.ledger_folder())) == 1
    monkeypatch.delattr(os, "getuid")
    assert gate.ledger_folder() == tmp_path / "kvbench-gate-0"
