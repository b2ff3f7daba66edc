"""Digests of checkpoints: which files and what of them count, and a cache that may be lost or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench.util import fingerprint as module
from kvbench.util.fingerprint import cache_file, fingerprint

SETTLED_S, LARGE, SLOW = module.SETTLED_S, module.LARGE, module.SLOW


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, in which files of 9 bytes are large and old enough for their digests to be stored."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "LARGE", 8)
    monkeypatch.setattr(module, "SETTLED_S", -1.0)
    monkeypatch.setattr(module, "_memory", {})


def checkpoint(place: Path, weights: bytes = b"0123456789") -> Path:
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(weights)
    (place / "config.json").write_bytes(b"{}")
    return place


def test_the_content_counts_and_not_the_place(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a")
    digest = fingerprint(first)
    assert digest is not None and len(digest) == 16
    assert fingerprint(checkpoint(tmp_path / "elsewhere" / "b")) == digest
    assert fingerprint(checkpoint(tmp_path / "c", b"0123456780")) != digest
    (first / "config.json").write_bytes(b"[]")
    assert fingerprint(first) != digest
    assert fingerprint(None) is None
    assert fingerprint(tmp_path / "nothing") is None


def test_only_files_that_decide_the_outputs_count(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "a")
    digest = fingerprint(place)
    for name in ("README.md", "notes.txt"):
        (place / name).write_text("about it")
    (place / "sub").mkdir()
    (place / "sub" / "model.safetensors").write_bytes(b"other")
    assert fingerprint(place) == digest
    assert fingerprint(place, suffixes=module.SUFFIXES) != digest
    assert fingerprint(place, deep=True) != digest
    (place / "config.json").rename(place / "other.json")
    assert fingerprint(place) != digest  # a file's name decides what it is read as


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path / "a")
    digest = fingerprint(place)
    monkeypatch.setattr(module, "_memory", {})  # as in another process
    weights = place / "model.safetensors"
    before = cache_file().read_text()
    assert str(weights) in before
    cache_file().write_text(before.replace(before.split('": "')[1][:64], "f" * 64))
    assert fingerprint(place) != digest  # so the cache was believed
    weights.write_bytes(b"9876543210")
    os.utime(weights, ns=(1, 1))
    assert fingerprint(place) == fingerprint(checkpoint(tmp_path / "b", b"9876543210"))


@pytest.mark.parametrize("content", ["", "[]", '{"x": 3}', "[" * 100_000, "\udcff"])
def test_a_damaged_cache_costs_time_alone(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path / "a")
    digest = fingerprint(place)
    monkeypatch.setattr(module, "_memory", {})
    cache_file().write_bytes(content.encode("utf-8", "surrogateescape"))
    assert fingerprint(place) == digest


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = fingerprint(checkpoint(tmp_path / "a"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "file" / "below"))
    assert fingerprint(checkpoint(tmp_path / "b")) == digest


def test_a_long_read_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW", 9)
    lines: list[str] = []
    place = checkpoint(tmp_path / "a")
    for _ in range(2):
        fingerprint(place, lines.append)
    assert len(lines) == 1
    assert str(place) in lines[0]
    assert "10 B of weights" in lines[0]


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.json", "a.model", "a.jinja"])
def test_files_of_these_kinds_count(name: str, tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "a")
    digest = fingerprint(place)
    (place / name).write_bytes(b"")
    assert fingerprint(place) != digest


def test_neighbouring_files_do_not_run_into_each_other(tmp_path: Path) -> None:
    digests = set()
    for i, (first, second) in enumerate([(b"ab", b"c"), (b"a", b"bc"), (b"a.json:1:", b"")]):
        place = tmp_path / str(i)
        place.mkdir()
        (place / "a.json").write_bytes(first)
        (place / "b.json").write_bytes(second)
        digests.add(fingerprint(place))
    assert len(digests) == 3
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "a.json").write_bytes(b"abb.json:c")
    assert fingerprint(alone) not in digests


def test_a_file_that_has_just_changed_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that changes while it is read."""
    assert (SETTLED_S, LARGE, SLOW) == (2.0, 32 * 2**20, 2 * 2**30)
    place = checkpoint(tmp_path / "a")
    monkeypatch.setattr(module, "SETTLED_S", 3600.0)
    fingerprint(place)
    assert not cache_file().exists() and not module._memory
    monkeypatch.setattr(module, "SETTLED_S", -1.0)
    monkeypatch.setattr(module, "SLOW", 9)
    fingerprint(place, lambda line: (place / "model.safetensors").write_bytes(b"9876543210") and None)
    assert not cache_file().exists() and not module._memory
    fingerprint(place)
    assert cache_file().exists()


def test_a_large_file_is_one_above_the_limit_and_the_process_remembers_it(tmp_path: Path) -> None:
    fingerprint(checkpoint(tmp_path / "small", b"12345678"))
    assert not cache_file().exists()
    place = checkpoint(tmp_path / "a", b"123456789")
    digest = fingerprint(place)
    cache_file().unlink()
    (key,) = module._memory
    assert key.split(" ")[:2] == [str(place / "model.safetensors"), "9"]
    module._memory[key] = "f" * 64
    assert fingerprint(place) != digest  # so it was remembered
    fingerprint(checkpoint(tmp_path / "b", b"123456789"))
    assert len(module._memory) == 2


def test_a_digest_of_another_length_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path / "a")
    digest = fingerprint(place)
    monkeypatch.setattr(module, "_memory", {})
    before = cache_file().read_text()
    cache_file().write_text(before.replace(before.split('": "')[1][:64], "f" * 63))
    assert fingerprint(place) == digest
    monkeypatch.setattr(module, "_memory", {})
    fingerprint(checkpoint(tmp_path / "b"))
    assert str(place) in cache_file().read_text()  # what others have stored stays


def test_the_cache_is_in_the_folder_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_file() == tmp_path / "cache" / "weights.json"
    monkeypatch.setenv("KVBENCH_CACHE", "")
    assert cache_file() == tmp_path / "xdg" / "kvbench" / "weights.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_file() == tmp_path / "home" / ".cache" / "kvbench" / "weights.json"
