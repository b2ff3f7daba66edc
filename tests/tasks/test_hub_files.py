"""Files of data sets on the hub: what the cache holds, what is to be downloaded, and what is said if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.errors import DataError
from kvbench.hub.repository import HubError
from kvbench.tasks import data, hub_files
from kvbench.tasks.hub_files import HubSource
from kvbench.tasks.ruler.outside_texts import essays
from tests.hub.standin import Hub, reachable, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with a repository of plain files and shards, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    with serving() as hub, reachable(monkeypatch, tmp_path / "cache", hub.address):
        files = {"README.md": b"#", "a.jsonl": b'{"text": "one"}\n{"text": "two"}', "lines/train.jsonl": b"{}"}
        hub.add("datasets/o/n", {**files, **{f"s/test-0000{n}-of-00002.parquet": b"x" * (n + 1) for n in range(2)}})
        yield hub


SOURCE = HubSource(hub_id="o/n")


def test_a_source_without_a_repository_has_no_files() -> None:
    assert hub_files.cached(HubSource(), "a.jsonl", "toy") is None
    assert hub_files.sizes(HubSource(), "a.jsonl", "toy", "") == (0, 0)
    with pytest.raises(DataError, match=r"^toy: no file is given\.\n  hint: set dataset\.path=FILE_OR_FOLDER$"):
        hub_files.download(HubSource(), "a.jsonl", "toy", "")


def test_a_file_is_in_the_cache_after_its_download(hub: Hub) -> None:
    assert hub_files.cached(SOURCE, "a.jsonl", "toy") is None
    assert hub_files.sizes(SOURCE, "a.jsonl", "toy", "") == (31, 31)
    (file,) = hub_files.download(SOURCE, "a.jsonl", "toy", "")
    hub.asked.clear()
    assert hub_files.cached(SOURCE, "a.jsonl", "toy") == [file] and file.name == "a.jsonl"
    assert hub_files.sizes(SOURCE, "a.jsonl", "toy", "") == (31, 0) and not hub.asked
    assert hub_files.cached(SOURCE, "b.jsonl", "toy") is None
    assert hub_files.cached(SOURCE, "s/*.parquet", "toy") is None


def test_shards_count_as_cached_only_if_all_are_there(hub: Hub) -> None:
    """Of two shards with one and two bytes, the first is here."""
    hub_files.download(SOURCE, "s/test-00000-of-00002.parquet", "toy", "")
    assert hub_files.cached(SOURCE, "s/test-*.parquet", "toy") is None
    assert hub_files.sizes(SOURCE, "s/test-*.parquet", "toy", "") == (3, 2)
    files = hub_files.download(SOURCE, "s/test-*.parquet", "toy", "")
    assert [file.name for file in files] == [f"test-0000{n}-of-00002.parquet" for n in range(2)]
    hub.asked.clear()
    assert hub_files.cached(SOURCE, "s/test-*.parquet", "toy") == files
    assert hub_files.sizes(SOURCE, "s/test-*.parquet", "toy", "") == (3, 0) and not hub.asked


def test_a_split_is_known_after_its_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def found(name: str, names: list[str], readme: Path | None) -> list[str]:
        given.append((name, sorted(names), readme and readme.read_bytes()))
        return ["lines/train.jsonl"]

    monkeypatch.setattr(hub_files, "split_files", found)
    assert hub_files.cached(SOURCE, "@/train", "toy") is None
    assert hub_files.sizes(SOURCE, "@/train", "toy", "") == (2, 2)
    files = hub_files.download(SOURCE, "@/train", "toy", "")
    assert [file.read_bytes() for file in files] == [b"{}"]
    assert hub_files.cached(SOURCE, "@/train", "toy") == files and hub_files.cached(SOURCE, "@/test", "toy") is None
    name, names, readme = given[0]  # type: ignore[misc]
    assert (name, readme) == ("@/train", b"#") and "lines/train.jsonl" in names
    files[0].unlink()
    assert hub_files.cached(SOURCE, "@/train", "toy") is None, "a file that was removed is not here"


def test_a_pattern_without_a_file_is_refused_with_the_remedy(hub: Hub) -> None:
    for call in (hub_files.sizes, hub_files.download):
        with pytest.raises(DataError) as caught:
            call(SOURCE, "none-*.parquet", "toy", "name a file")
        said = "toy: o/n/none-*.parquet is not on this machine, and the hub does not have this file at revision main."
        assert str(caught.value).startswith(said) and str(caught.value).endswith("name a file")
        with pytest.raises(DataError, match=r"o/n/other\.jsonl is not on this machine(.|\n)*name a file"):
            call(SOURCE, "other.jsonl", "toy", "name a file")


@pytest.mark.parametrize(
    ("error", "remedy", "said"),
    [
        (HubError("it is gone", absent=True), "look here", "toy: o/n/a is not on this machine, and it is gone."),
        (HubError("it is gone", "ask", absent=True), "look here", "toy: o/n/a is not on this machine, and it is gone."),
        (HubError("the disk is full", "make room"), "look here", "toy: the disk is full."),
        (HubError("the disk is full"), "look here", "toy: the disk is full."),
    ],
)
def test_a_remedy_is_shown_for_what_is_absent_alone(error: HubError, remedy: str, said: str) -> None:
    hints = [hint for hint in (error.remedy, remedy if error.absent else "") if hint]
    shown = str(hub_files.unavailable_error(SOURCE, "a", "toy", error, remedy))
    assert shown == said + (f"\n  hint: {'; '.join(hints)}" if hints else "")


def test_a_cache_of_another_commit_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_files.download(SOURCE, "a.jsonl", "toy", "")

    def moved(*given: object) -> None:
        raise HubError("main is another commit", "remove it")

    monkeypatch.setattr(hub_files, "settle", moved)
    with pytest.raises(DataError, match=r"^toy: main is another commit\.\n  hint: remove it$"):
        hub_files.cached(SOURCE, "a.jsonl", "toy")


def test_essays_from_the_hub_are_joined_by_blanks(hub: Hub) -> None:
    assert essays(None, HubSource(hub_id="o/n", file="a.jsonl")) == "one two"
    assert data.find_records(HubSource(hub_id="o/n", file="a.jsonl"), "train", None, "toy").more == ()
