"""samples.jsonl: what was appended comes back, and no torn, damaged or unwritable line costs another one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from kvbench.results import samples
from kvbench.results.samples import DiskError, UnreadableError


def row(index: int, prediction: str = "a — b\n") -> dict:
    return {
        "id": f"needle@512/{index}",
        "task": "needle",
        "length": 512,
        "prediction": prediction,
        "scores": {"score": 1.0},
        "scorer_version": 1,
    }


def test_rows_come_back_and_the_last_of_an_id_counts(tmp_path):
    path = tmp_path / "samples.jsonl"
    samples.append(path, [row(0), row(1)])
    samples.append(path, [{**row(0), "scores": {"score": 0.0}, "scorer_version": 2}])
    stored = samples.read_samples(path)
    assert list(stored.rows) == ["needle@512/0", "needle@512/1"]
    assert stored.rows["needle@512/0"]["scorer_version"] == 2
    assert stored.rows["needle@512/1"] == row(1)
    assert not stored.damaged


def test_every_line_is_plain_json(tmp_path):
    path = tmp_path / "samples.jsonl"
    samples.append(path, [row(0), row(1, 'quote " and "crc": "deadbeef"}')])
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["needle@512/0", "needle@512/1"]
    assert samples.read_samples(path).rows["needle@512/1"]["prediction"] == 'quote " and "crc": "deadbeef"}'


@pytest.mark.parametrize("text", ["half an emoji \ud83d", "line\u2028separator", "nul \x00", "\r\n", ""])
def test_any_prediction_survives(tmp_path, text):
    path = tmp_path / "samples.jsonl"
    samples.append(path, [row(0, text), row(1)])
    stored = samples.read_samples(path)
    assert stored.rows["needle@512/0"]["prediction"] == text
    assert not stored.damaged


def test_a_line_torn_at_any_byte_costs_only_itself(tmp_path):
    path = tmp_path / "samples.jsonl"
    samples.append(path, [row(0)])
    whole = path.read_bytes()
    last = samples.encode_row(row(1))
    for length in range(1, len(last)):
        path.write_bytes(whole + last[:length])
        stored = samples.read_samples(path)
        assert list(stored.rows) == ["needle@512/0"]
        assert stored.torn
        samples.repair(path, stored)
        samples.append(path, [row(1)])
        assert list(samples.read_samples(path).rows) == ["needle@512/0", "needle@512/1"]


def test_a_flipped_bit_anywhere_is_seen_or_harmless(tmp_path):
    path = tmp_path / "samples.jsonl"
    line = samples.encode_row(row(1))
    seen = 0
    for place in range(len(line) - 1):
        changed = bytearray(line)
        changed[place] ^= 1
        path.write_bytes(samples.encode_row(row(0)) + bytes(changed) + samples.encode_row(row(2)))
        stored = samples.read_samples(path)
        assert stored.rows["needle@512/0"] == row(0)
        assert stored.rows["needle@512/2"] == row(2)
        if stored.damaged:
            seen += 1
            assert "needle@512/1" not in stored.rows
        else:  # the name of the checksum itself
            assert samples.outputs(stored.rows["needle@512/1"]).items() >= row(1).items()
    assert seen >= len(line) - 5


def test_repair_keeps_the_damaged_line_aside(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(samples.encode_row(row(0)) + b"garbage\n" + samples.encode_row(row(1)))
    samples.repair(path, samples.read_samples(path))
    assert (tmp_path / "samples.damaged").read_bytes() == b"garbage\n"
    again = samples.read_samples(path)
    assert list(again.rows) == ["needle@512/0", "needle@512/1"]
    assert not again.damaged
    samples.repair(path, again)
    path.write_bytes(path.read_bytes() + b"torn")
    samples.repair(path, samples.read_samples(path))
    assert (tmp_path / "samples.damaged").read_bytes() == b"garbage\ntorn\n"


def test_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    samples.append(path, [row(0)])
    before = path.read_bytes()
    write = os.write

    def full(descriptor, data):
        if len(data) > 10:  # the disk takes a few bytes more, then none
            return write(descriptor, bytes(data[:10]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", lambda d, data: full(d, data[:20]))
    with pytest.raises(DiskError, match="no space left on the disk") as error:
        samples.append(path, [row(1)])
    assert "runtime.results_dir" in str(error.value)
    monkeypatch.undo()
    assert path.read_bytes() == before
    samples.append(path, [row(1)])
    assert len(samples.read_samples(path).rows) == 2


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_all_of_them(tmp_path, monkeypatch):
    write, calls = os.write, []
    monkeypatch.setattr(os, "write", lambda d, data: calls.append(len(data)) or write(d, bytes(data[:7])))
    samples.append(tmp_path / "a.jsonl", [row(0), row(1)])
    monkeypatch.undo()
    assert calls == list(range(calls[0], 0, -7)) and len(calls) > 10
    assert list(samples.read_samples(tmp_path / "a.jsonl").rows.values()) == [row(0), row(1)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_really_full():
    with pytest.raises(DiskError, match="no space left on the disk"):
        samples.append(Path("/dev/full"), [row(0)])


def test_atomic_write_leaves_the_old_content_on_an_error(tmp_path, monkeypatch):
    path = tmp_path / "metrics.json"
    samples.write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError):
        samples.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.json"]


def test_no_nan_in_a_line():
    with pytest.raises(ValueError):
        samples.encode_row({**row(0), "scores": {"score": float("nan")}})


def test_a_row_that_was_typed_by_hand_is_no_result(tmp_path):
    path = tmp_path / "samples.jsonl"
    typed = json.dumps({**row(1), "kv_bytes": "few"}).encode() + b"\n"
    path.write_bytes(samples.encode_row(row(0)) + typed)
    stored = samples.read_samples(path)
    assert list(stored.rows) == ["needle@512/0"]
    assert [(number, line, "by hand" in problem) for number, line, problem in stored.damaged] == [
        (2, typed.rstrip(), True)
    ]


def test_deep_nesting_is_a_damaged_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n" + samples.encode_row(row(0)))
    stored = samples.read_samples(path)
    assert list(stored.rows) == ["needle@512/0"]
    assert stored.damaged[0][2] == "the sample's JSON is nested too deeply"


def test_a_folder_or_a_loop_in_its_place_is_said(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "loop"):
        with pytest.raises(UnreadableError, match="cannot be read") as error:
            samples.read_samples(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)


def test_a_row_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    seen: list[bytes] = []
    sync = os.fsync

    def noted(descriptor):
        sync(descriptor)
        seen.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", noted)
    samples.append(path, [row(0), row(1)])
    assert seen == [path.read_bytes()]
    assert seen[0].count(b"\n") == 2
