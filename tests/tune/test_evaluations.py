"""The file of evaluations: shared, mended and refused."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import KvbenchError
from kvbench.tune.evaluations import Evaluations
from kvbench.tune.measure import ChunkScore

SCORE = ChunkScore((0.125, 3e-07), (0.5, 0.25), 30)
HEADER = {"model": "toy", "texts": "abc"}


def test_evaluations_are_read_as_they_were_measured_also_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "evaluations.jsonl"
    one, other = Evaluations(path, HEADER), Evaluations(path, HEADER)
    one.add("0-1:q8_0", 1, SCORE)
    assert other.find("0-1:q8_0", 1) == SCORE
    assert other.find("0-1:q8_0", 0) is None
    assert len(Evaluations(path, HEADER)) == 1


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_line_whose_writer_was_killed_is_dropped(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "evaluations.jsonl"
    store = Evaluations(path, HEADER)
    store.add("0-1:q8_0", 0, SCORE)
    before = path.read_bytes()
    store.add("0-1:q5_0", 0, SCORE)
    after = path.read_bytes()
    path.write_bytes(before + after[len(before) :][:kept])
    again = Evaluations(path, HEADER)
    assert path.read_bytes() == before
    again.add("0-1:q5_0", 0, SCORE)
    assert path.read_bytes() == after


def test_a_killed_header_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    Evaluations(path, HEADER)
    whole = path.read_bytes()
    path.write_bytes(whole[:10])
    Evaluations(path, HEADER)
    assert path.read_bytes() == whole


def test_evaluations_of_another_model_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    Evaluations(path, HEADER).add("0:q8_0", 0, SCORE)
    before = path.read_bytes()
    with pytest.raises(KvbenchError, match="differ from this search's in: texts\n"):
        Evaluations(path, {**HEADER, "texts": "other"})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello\nworld\n", b"[1, 2]\n", b'{"id": "x"}\n', b"hello", b"hello\nwor"])
def test_a_foreign_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_bytes(content)
    with pytest.raises(KvbenchError, match="remove"):
        Evaluations(path, HEADER)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line", [b'{"recipe": 3}', b'{"recipe": "0:q8_0", "chunk": 1, "kl": [null], "top": [1], "count": 3}', b"[]"]
)
def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "evaluations.jsonl"
    Evaluations(path, HEADER).add("0:q8_0", 0, SCORE)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(KvbenchError, match="not an evaluation"):
        Evaluations(path, HEADER)


def test_a_full_disk_is_named_with_the_command_s_own_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evaluations.jsonl"
    store = Evaluations(path, HEADER)
    (tmp_path / "file").touch()
    with pytest.raises(KvbenchError, match=r"file.*: cannot be read or written: (Not a directory|File exists)"):
        Evaluations(tmp_path / "file" / "evaluations.jsonl", HEADER)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(KvbenchError, match="No space left on device") as caught:
        store.add("0:q8_0", 0, SCORE)
    assert str(path) in str(caught.value)
    assert "another --out" in str(caught.value) and "results_dir" not in str(caught.value)
    monkeypatch.undo()
    assert len(Evaluations(path, HEADER)) == 0
