"""Downloads through a stand-in for the hub: what is fetched, and one clear message for each fault."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.hub import transfer
from kvbench.hub.repository import FILE, HubError, Repository, recorded, settle
from kvbench.hub.transfer import ask
from tests.hub.standin import Hub, reachable, serving

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
FILES = {
    "config.json": b'{"a": 1}',
    "README.md": b"# a model",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
}
MODEL = Repository("me/model")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with one model, and an empty cache; the client's pauses between its attempts are left out."""
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    with serving() as hub, reachable(monkeypatch, tmp_path / "cache", hub.address):
        hub.add("me/model", FILES)
        yield hub


def everything() -> transfer.Plan:
    return transfer.plan(MODEL, lambda names: [name for name in names if name != "README.md"], "config.json")


def fails(repository: Repository = MODEL) -> HubError:
    with pytest.raises(HubError) as caught:
        transfer.fetch(repository, everything())
    return caught.value


def test_a_plan_knows_the_sizes_before_anything_is_downloaded(hub: Hub) -> None:
    plan = everything()
    assert plan.files == plan.missing == tuple(name for name in sorted(FILES) if name != "README.md")
    assert plan.total == plan.missing_bytes == 2 * len(WEIGHTS) + 8
    assert not hub.downloads()


def test_files_arrive_with_a_record_of_commit_and_checksums(hub: Hub) -> None:
    folder = transfer.fetch(MODEL, everything())
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == WEIGHTS[::-1]
    assert not (folder / "README.md").exists()
    record = recorded(MODEL)
    assert record["commit"] == folder.name == hub.repositories["me/model"].main
    assert {name: entry["sha256"] for name, entry in record["files"].items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in FILES.items() if name != "README.md"
    }
    content = json.loads((MODEL.folder / FILE).read_text())
    assert content["version"] == 1 and set(content["revisions"]) == {"main"}
    again = everything()
    assert not again.missing and again.missing_bytes == 0


def test_a_cut_download_goes_on_at_its_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.faults.cut = {"model-00001-of-00002.safetensors": 2}
    folder = transfer.fetch(MODEL, everything())
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS
    ranges = [start for method, path, start in hub.asked if method == "GET" and "model-00001" in path]
    assert ranges == [None, f"bytes={len(WEIGHTS) // 2}-", f"bytes={len(WEIGHTS) * 3 // 4}-"]


def test_after_a_failure_only_what_is_missing_is_fetched(hub: Hub) -> None:
    hub.faults.gone = {"model-00002-of-00002.safetensors": 500}
    error = fails()
    assert error.reason.startswith("the download of me/model stopped early (HfHubHTTPError: ")
    assert error.remedy == "run the same command again; it downloads only the files that are not complete"
    first = MODEL.cached("model-00001-of-00002.safetensors")
    assert first is not None and first.read_bytes() == WEIGHTS
    hub.faults.gone, hub.asked[:] = {}, []
    plan = everything()
    assert plan.missing == ("model-00002-of-00002.safetensors",) and plan.missing_bytes == len(WEIGHTS)
    transfer.fetch(MODEL, plan)
    assert hub.downloads() == ["model-00002-of-00002.safetensors"]


def test_a_connection_that_ends_again_and_again_is_given_up(hub: Hub) -> None:
    hub.faults.cut = {"model-00001-of-00002.safetensors": 1000}
    error = fails()
    assert "the download of me/model stopped early (" in error.reason and error.remedy == transfer.AGAIN
    assert MODEL.cached("config.json") is not None and MODEL.cached("model-00001-of-00002.safetensors") is None


def test_a_server_that_stops_sending_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.02)
    hub.faults.slow = {"model-00002-of-00002.safetensors": 0.2}
    assert "the download of me/model stopped early (ReadTimeout" in fails().reason
    hub.faults.slow = {}
    transfer.fetch(MODEL, everything())


def test_a_slow_download_is_waited_for(hub: Hub) -> None:
    hub.faults.slow = {"model-00002-of-00002.safetensors": 0.2}
    transfer.fetch(MODEL, everything())
    assert recorded(MODEL)["files"]["model-00002-of-00002.safetensors"]["bytes"] == len(WEIGHTS)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_content_of_another_checksum_is_removed_and_the_rest_stays(hub: Hub, name: str) -> None:
    hub.faults.wrong = {name}
    error = fails()
    assert error.reason.startswith(f"the content of {name} does not have the checksum that the hub lists (")
    assert "run the same command again" in str(error.remedy)
    assert MODEL.cached(name) is None and MODEL.cached("model-00001-of-00002.safetensors") is not None
    assert len(list((MODEL.folder / "blobs").iterdir())) == 2
    hub.faults.wrong = set()
    folder = transfer.fetch(MODEL, everything())
    assert (folder / name).read_bytes() == FILES[name]


def test_a_branch_that_moved_is_refused_and_both_commits_are_named(hub: Hub) -> None:
    hub.faults.gone = {"model-00002-of-00002.safetensors": 500}
    fails()
    first = hub.repositories["me/model"].main
    hub.faults.gone = {}
    second = hub.add("me/model", {**FILES, "model-00002-of-00002.safetensors": WEIGHTS})
    hub.asked.clear()
    with pytest.raises(HubError) as caught:
        everything()
    moved = f"revision main of me/model has moved: it was commit {first} when it was first fetched ("
    assert moved in caught.value.reason
    assert f"the hub now has {second}. Nothing was downloaded or changed" in caught.value.reason
    assert f"model.revision={first}" in str(caught.value.remedy)
    assert f"model.revision={second}" in str(caught.value.remedy)
    assert not hub.downloads() and MODEL.commit() == first
    # the remedy: the first commit is completed, and the branch is then whole on this machine
    pinned = Repository("me/model", "model", first)
    plan = transfer.plan(pinned, lambda names: list(FILES), "config.json")
    transfer.fetch(pinned, plan)
    assert MODEL.cached("model-00002-of-00002.safetensors") is not None
    with pytest.raises(HubError, match="has moved"):
        settle(MODEL, second, "the hub's cache on this machine")


def test_a_disk_without_room_is_found_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1_500_000))
    error = fails()
    assert "it needs 2.1 MB, but only 1.5 MB are free; nothing was downloaded" in error.reason
    assert "HF_HOME=FOLDER on a larger disk" in str(error.remedy)
    assert not hub.downloads()


def test_a_disk_that_fills_meanwhile_keeps_what_was_complete(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    get = file_download.http_get

    def full(url: str, stream: Any, **options: Any) -> None:
        if "model-00002" in url:
            stream.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        get(url, stream, **options)

    monkeypatch.setattr(file_download, "http_get", full)
    error = fails()
    assert "filled the disk; complete files are kept" in error.reason
    assert MODEL.cached("model-00001-of-00002.safetensors") is not None
    assert not list(MODEL.folder.rglob("*.incomplete"))


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_says_where_to_ask(hub: Hub, status: int) -> None:
    hub.add("datasets/me/data", {"a.jsonl": b"{}"}, refuses=status)
    with pytest.raises(HubError) as caught:
        transfer.fetch_file(Repository("me/data", "dataset"), "a.jsonl")
    assert caught.value.reason.startswith(f"the hub denied access to this account ({status}): the repository is gated")
    assert "https://huggingface.co/datasets/me/data, then run `hf auth login`" in str(caught.value.remedy)


def test_weights_that_are_gated_behind_an_open_config_say_so_too(hub: Hub) -> None:
    hub.faults.gone = {name: 403 for name in FILES if name.endswith(".safetensors")}
    assert fails().reason.startswith("the hub denied access to this account (403)")


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    assert ask(MODEL, "config.json").status == 200 and ask(MODEL, "config.json").size == 8
    assert ask(MODEL, "model-00001-of-00002.safetensors").size == len(WEIGHTS)  # behind a redirection
    assert ask(MODEL, "none").status == ask(Repository("me/none"), "none").status == 404
    with pytest.raises(HubError, match=r"does not have this file at revision v2 \(404\)"):
        transfer.fetch_file(Repository("me/model", "model", "v2"), "config.json")


def test_a_cache_that_cannot_be_written_to_is_still_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer.fetch(MODEL, everything())
    (MODEL.folder / FILE).unlink()

    def refused(*arguments: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("kvbench.util.atomic.replace_file", refused)
    settle(MODEL, MODEL.commit(), "the hub's cache on this machine")
    assert recorded(MODEL) == {}


def test_amounts_are_for_people() -> None:
    assert [transfer.amount(size) for size in (0, 999, 1500, 24_793_736, 13_476_839_424, 2.1e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "24.8 MB",
        "13.5 GB",
        "2100.0 GB",
    ]
