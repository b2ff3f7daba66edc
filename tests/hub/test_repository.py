"""Repositories in the hub's cache: their commits, files and hashes, and the record of the first fetch."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from kvbench.hub import repository, transfer
from kvbench.hub import transfer as asking
from kvbench.hub.repository import (
    HubError,
    Repository,
    commit_of,
    note,
    note_split,
    recorded,
    settle,
    sha256,
    stored_hash,
    verify,
)
from kvbench.hub.transfer import Answer, ask, demand, refused

FIRST, SECOND = "a" * 40, "b" * 40
MODEL = Repository("me/model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub")
    return tmp_path


def stored(cache: Path, commit: str, name: str, content: bytes, folder: str = "models--me--model") -> Path:
    path = cache / folder / "snapshots" / commit / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def branch(cache: Path, commit: str, name: str = "main", folder: str = "models--me--model") -> None:
    path = cache / folder / "refs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{commit}\n")


def test_names_of_a_repository(cache: Path) -> None:
    data = Repository("me/data", "dataset", "v2")
    assert (MODEL.key, data.key) == ("model.revision", "dataset.source.revision")
    assert (MODEL.asked, data.asked) == ("main", "v2")
    assert MODEL.folder == cache / "models--me--model" and data.folder == cache / "datasets--me--data"
    assert MODEL.url("a/b.txt") == "https://hub/me/model/resolve/main/a/b.txt"
    assert data.url("a.txt") == "https://hub/datasets/me/data/resolve/v2/a.txt"
    assert Repository("me/model", "model", FIRST).pinned and not data.pinned
    assert not Repository("me/model", "model", FIRST[:39]).pinned


def test_the_commit_of_a_branch_and_of_a_pinned_revision(cache: Path) -> None:
    pinned = Repository("me/model", "model", SECOND)
    assert MODEL.commit() is MODEL.snapshot() is MODEL.cached("a") is pinned.commit() is None
    file = stored(cache, FIRST, "a", b"1")
    assert MODEL.commit() is None
    branch(cache, FIRST)
    assert MODEL.commit() == FIRST and MODEL.snapshot() == file.parent and MODEL.cached("a") == file
    assert MODEL.cached("b") is None and MODEL.cached(".") is None and pinned.commit() is None
    branch(cache, SECOND)
    assert MODEL.commit() == SECOND and MODEL.snapshot() is None and MODEL.cached("a") is None
    stored(cache, SECOND, "a", b"2")
    assert pinned.commit() == SECOND and pinned.snapshot() == MODEL.snapshot()
    (cache / "models--me--model" / "refs" / "main").write_text("")
    assert MODEL.commit() is None


def test_commits_are_listed_with_the_newest_first(cache: Path) -> None:
    assert MODEL.commits() == []
    for commit, stamp in ((FIRST, 1), (SECOND, 3), ("c" * 40, 2), ("no commit", 4)):
        folder = stored(cache, commit, "a", b"").parent
        os.utime(folder, (stamp, stamp))
    assert MODEL.commits() == [SECOND, "c" * 40, FIRST]


def test_the_commit_and_the_hash_of_a_file_are_in_its_paths(cache: Path, tmp_path: Path) -> None:
    file = stored(cache, FIRST, "deep/a", b"")
    assert commit_of(file) == FIRST
    assert commit_of(Path("snapshots/x") / "snapshots" / SECOND / "a") == SECOND
    assert commit_of(Path("/x/snapshots")) is commit_of(Path("/x/snapshots/y/a")) is commit_of(Path("a")) is None
    link = file.parent / "link"
    link.symlink_to(Path("../../blobs/0123"))
    assert stored_hash(link) == "0123" and stored_hash(file) is None


def test_a_revision_keeps_the_commit_of_its_first_use(cache: Path) -> None:
    settle(MODEL, None, "the hub")
    settle(Repository("me/model", "model", FIRST), SECOND, "the hub")
    assert recorded(MODEL) == {} and not (MODEL.folder / repository.FILE).exists()
    settle(MODEL, FIRST, "the hub")
    first = recorded(MODEL)
    assert (first["commit"], first["files"]) == (FIRST, {})
    settle(MODEL, FIRST, "the hub")
    with pytest.raises(HubError) as error:
        settle(MODEL, SECOND, "a place")
    moved = (
        f"revision main of me/model has moved: it was commit {FIRST} when it was first fetched ({first['fetched']}), "
    )
    assert error.value.reason == f"{moved}but a place now has {SECOND}. Nothing was downloaded or changed"
    remedy = str(error.value.remedy)
    assert remedy.index(f"fetch with model.revision={FIRST}") < remedy.index(f"run with model.revision={SECOND}")
    assert recorded(MODEL) == first and not error.value.absent


def test_checksums_are_recorded_once_and_again_when_the_size_changes(cache: Path, monkeypatch) -> None:
    file = stored(cache, FIRST, "a", b"one")
    branch(cache, FIRST)
    entry = {"bytes": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
    assert note(MODEL, [("a", file)]) == {"a": entry}
    assert recorded(MODEL)["files"] == {"a": entry} and recorded(MODEL)["commit"] == FIRST
    with monkeypatch.context() as patch:
        patch.setattr(repository, "sha256", lambda path: pytest.fail("it is known"))
        patch.setattr(repository, "_update", lambda *_: pytest.fail("nothing is new"))
        assert note(MODEL, [("a", file)]) == {"a": entry}
    file.write_bytes(b"three")
    other = stored(cache, FIRST, "b", b"x")
    entries = note(MODEL, [("a", file), ("b", other)])
    assert entries["a"] == {"bytes": 5, "sha256": hashlib.sha256(b"three").hexdigest()}
    assert recorded(MODEL)["files"] == entries and set(entries) == {"a", "b"}


def test_a_record_is_added_to_and_other_revisions_stay(cache: Path) -> None:
    settle(MODEL, FIRST, "the hub")
    date = recorded(MODEL)["fetched"]
    content = json.loads((MODEL.folder / repository.FILE).read_text())
    content["revisions"]["main"]["fetched"] = "2000-01-01"
    (MODEL.folder / repository.FILE).write_text(json.dumps(content))
    branch(cache, SECOND)
    note(MODEL, [("a", stored(cache, SECOND, "a", b"1"))])
    note_split(MODEL, "@/test", ["x", "y"])
    note_split(MODEL, "@/train", ("z",))
    computed = recorded(MODEL)
    assert (computed["commit"], computed["fetched"]) == (FIRST, "2000-01-01") and date != "2000-01-01"
    assert computed["splits"] == {"@/test": ["x", "y"], "@/train": ["z"]} and list(computed["files"]) == ["a"]
    tag = Repository("me/model", "model", "v2")
    settle(tag, SECOND, "the hub")
    assert recorded(tag)["commit"] == SECOND and recorded(MODEL) == computed
    assert json.loads((MODEL.folder / repository.FILE).read_text())["version"] == 1


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"revisions": []}', '{"revisions": {"main": []}}', '{"revisions": {"main": {"commit": "x"}}}']
)
def test_a_damaged_record_is_as_good_as_none(cache: Path, text: str) -> None:
    MODEL.folder.mkdir(parents=True)
    (MODEL.folder / repository.FILE).write_text(text)
    assert recorded(MODEL) == {}


def link(cache: Path, name: str, content: bytes) -> Path:
    """A file of the cache that links to its content, which has this name."""
    blob = cache / "models--me--model" / "blobs" / name
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    file = cache / "models--me--model" / "snapshots" / FIRST / "file"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(blob)
    return file


def test_a_checksum_that_the_cache_knows_is_not_computed(cache: Path) -> None:
    assert sha256(link(cache, "f" * 64, b"content")) == "f" * 64
    expected = hashlib.sha256(b"content").hexdigest()
    assert sha256(link(cache, "f" * 40, b"content")) == expected
    assert sha256(stored(cache, FIRST, "plain", b"content")) == expected


def test_content_is_verified_by_either_hash_and_removed_if_it_differs(cache: Path) -> None:
    content = b"x" * 3_000_000
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    for name in (hashlib.sha256(content).hexdigest(), git, "etag"):
        file = link(cache, name, content)
        verify(file)
        assert file.is_file()
    verify(stored(cache, FIRST, "plain", b""))
    for name in ("0" * 64, "0" * 40):
        file = link(cache, name, content)
        blob = file.resolve()
        with pytest.raises(HubError, match=r"content of file does not have the checksum .*expected 000000000000\.\.\."):
            verify(file)
        assert not file.is_symlink() and not blob.exists()


def answers(monkeypatch, **answer: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(asking, "_request", lambda url: Answer(**answer))


def test_an_answer_is_the_hubs_or_the_reason_why_there_is_none(cache: Path, monkeypatch) -> None:
    answers(monkeypatch, status=200, commit=FIRST, size=7)
    assert ask(MODEL, "a") == Answer(200, "", FIRST, 7)
    answers(monkeypatch, problem="no route")
    assert ask(MODEL, "a") == Answer(problem="https://hub cannot be reached (no route)")
    for status, problem in (
        (499, ""),
        (500, "https://hub responded with status 500"),
        (503, "https://hub responded with status 503"),
    ):
        answers(monkeypatch, status=status)
        assert ask(MODEL, "a") == (Answer(problem=problem) if problem else Answer(status=status))
    monkeypatch.setattr(asking, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(asking, "_request", lambda url: time.sleep(0.2))
    assert ask(MODEL, "a").problem == "https://hub cannot be reached (no answer in 0.01 s)"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ask(MODEL, "a") == Answer(problem="HF_HUB_OFFLINE is set")


def test_a_file_is_demanded_or_only_its_repository(cache: Path, monkeypatch) -> None:
    answers(monkeypatch, status=200, commit=FIRST)
    assert demand(MODEL, "a").commit == FIRST
    answers(monkeypatch, status=404, commit=FIRST)
    assert demand(MODEL, "a", only_repository=True).status == 404
    with pytest.raises(HubError, match=r"does not have this file at revision main \(404\)") as error:
        demand(MODEL, "a")
    assert error.value.absent
    answers(monkeypatch, status=404)
    with pytest.raises(HubError, match=r"\(404\)"):
        demand(MODEL, "a", only_repository=True)
    for status in (401, 403):
        answers(monkeypatch, status=status)
        with pytest.raises(HubError, match=rf"denied access to this account \({status}\)") as error:
            demand(MODEL, "a")
        assert error.value.absent and "https://huggingface.co/me/model, then" in str(error.value.remedy)
    assert "huggingface.co/datasets/me/data," in str(refused(Repository("me/data", "dataset"), 401).remedy)
    answers(monkeypatch, problem="away")
    with pytest.raises(HubError, match="cannot be reached") as error:
        demand(MODEL, "a")
    assert error.value.absent


def test_room_is_looked_for_where_the_cache_will_be(cache: Path, monkeypatch) -> None:
    asked: list[Path] = []

    def usage(place: Path) -> Any:
        asked.append(place)
        return SimpleNamespace(free=1000)

    monkeypatch.setattr(transfer.shutil, "disk_usage", usage)
    transfer.check_space(MODEL, 1000)
    with pytest.raises(HubError, match=r"needs 1.0 kB, but only 1.0 kB are free; nothing was downloaded"):
        transfer.check_space(MODEL, 1001)
    assert asked == [cache, cache]
    with pytest.raises(HubError, match="does not contain any of the files that are needed"):
        transfer.fetch(MODEL, transfer.Plan((), (), 0, 0))
