"""What is fetched, by which names and revisions, and what is said where it cannot be; the hub stands in."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.cli import fetch
from kvbench.errors import ConfigError, DataError, ModelError
from kvbench.models.spec import ModelConfig
from kvbench.tasks import data
from kvbench.tasks.data import HubSource

REVISION = "5" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A hub that answers 200, with the files of ``hub.files``; ``hub.asked`` is what it was asked for."""
    hub = SimpleNamespace(asked=[], probed=[], files=["README.md", "data/a.txt", "data/test-1.parquet"], status=200)

    def download(repo: str, name: str, *, repo_type: str, revision: str | None) -> str:
        hub.asked.append((repo, name, repo_type, revision))
        return str(tmp_path / name)

    def listed(self: Any, repo: str, *, repo_type: str, revision: str | None) -> list[str]:
        assert (repo, repo_type, revision) == ("o/n", "dataset", REVISION)
        return hub.files

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", listed)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(data, "probe", lambda url: hub.probed.append(url) or hub.status)
    return hub


def source(file: str, revision: str | None = REVISION) -> HubSource:
    return HubSource(hub_id="o/n", revision=revision, file=file)


def test_a_file_is_asked_for_by_name_and_revision(hub: SimpleNamespace, tmp_path: Path) -> None:
    found = data.find(source("data/{task}.zip!in/{task}.jsonl"), "qasper", None, "toy")
    assert (found.path, found.member) == (tmp_path / "data/qasper.zip", "in/qasper.jsonl")
    assert hub.asked == [("o/n", "data/qasper.zip", "dataset", REVISION)]
    assert hub.probed[0].endswith(f"/datasets/o/n/resolve/{REVISION}/data/qasper.zip")
    data.find(source("a", None), "qasper", None, "toy")
    assert hub.probed[1].endswith("/datasets/o/n/resolve/main/a") and hub.asked[1][3] is None


def test_a_pattern_is_looked_up_and_the_snapshot_can_be_found_again(hub: SimpleNamespace, tmp_path: Path) -> None:
    assert data.find(source("data/test-*.parquet"), "test", None, "toy").path == tmp_path / "data/test-1.parquet"
    assert [name for _, name, _, _ in hub.asked] == ["README.md", "data/test-1.parquet"]
    assert hub.probed[0].endswith("/README.md")
    hub.files.append("data/test-2.parquet")
    with pytest.raises(
        DataError, match=r"toy: 'data/test-\*\.parquet' matches 2 files \(data/test-1\.parquet, \.\.\.\)"
    ):
        data.find(source("data/test-*.parquet"), "test", None, "toy")


def test_what_is_in_the_cache_is_not_asked_for(
    hub: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("README.md", "data/test-1.parquet"):
        (tmp_path / name).write_text("x")
    looked = []

    def cached(repo: str, name: str, *, revision: str | None, repo_type: str) -> str | None:
        looked.append((repo, name, revision, repo_type))
        return str(tmp_path / name) if (tmp_path / name).is_file() else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    for file in ("data/{task}-1.parquet", "data/{task}-*.parquet"):
        assert data.find(source(file), "test", None, "toy").path == tmp_path / "data/test-1.parquet"
    assert not hub.asked and not hub.probed
    assert looked == [("o/n", name, REVISION, "dataset") for name in ("data/test-1.parquet", "README.md")]
    data.find(source("data/{task}-*.parquet"), "train", None, "toy")  # the snapshot is here, the file is not
    assert hub.probed
    with pytest.raises(DataError, match=r"toy: no file is named.\n  hint: dataset.path="):
        data.find(HubSource(), "test", None, "toy")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "refused this account (401)"),
        (403, "refused this account (403)"),
        (404, "no such file at revision main (404)"),
        (500, "cannot be reached (500)"),
        ("ConnectError", "cannot be reached (ConnectError)"),
    ],
)
def test_what_the_hub_answers_is_said(hub: SimpleNamespace, status: Any, said: str) -> None:
    hub.status = status
    with pytest.raises(DataError) as caught:
        data.find(source("a.jsonl", None), "a", None, "dataset toy")
    assert "dataset toy: o/n/a.jsonl is not on this machine, and " in str(caught.value)
    assert said in str(caught.value) and not hub.asked


@pytest.mark.parametrize(("error", "said"), [(OSError("no room\nand more"), "no room"), (OSError(), "OSError")])
def test_a_download_that_fails_is_said_in_one_line(
    hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    def fails(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    with pytest.raises(DataError, match=rf"not on this machine, and {said}\.\n"):
        data.find(source("a.jsonl"), "a", None, "toy")


def test_a_probe_gives_the_status_or_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def answer(url: str, headers: Any, timeout: float) -> Any:
        assert timeout == data.PROBE_SECONDS
        if url == "slow":
            release.wait(60)
        if url == "broken":
            raise ConnectionError("x")
        return SimpleNamespace(status_code=418)

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(head=answer))
    assert data.probe("fine") == 418
    assert data.probe("broken") == "ConnectionError"
    monkeypatch.setattr(data, "PROBE_SECONDS", 0.01)
    assert data.probe("slow") == "no answer in 0.01 s"
    release.set()


def test_a_model_comes_with_what_loading_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return f"cache/{name}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(fetch, "locate", lambda model: SimpleNamespace(name="o/model", local=False))
    model = ModelConfig(name="m", hub_id="o/model", revision="abc", max_length=8)
    with pytest.raises(ModelError, match="the download of o/model is incomplete: weights are missing in cache/o/model"):
        fetch.fetch_model(model)
    asked.clear()
    monkeypatch.setattr(fetch, "is_cached", lambda model: True)
    assert fetch.fetch_model(model) == "model m: cache/o/model"
    assert asked == [("o/model", "abc", list(fetch.MODEL_FILES))] and "*.bin" not in fetch.MODEL_FILES
    assert {"*.safetensors", "*.json", "*.model", "*.jinja"} <= set(fetch.MODEL_FILES)
    monkeypatch.setattr(fetch, "locate", lambda model: SimpleNamespace(name="o/model", local=True))
    assert fetch.fetch_model(model) == "model m: already here"
    monkeypatch.setattr(fetch, "locate", lambda model: SimpleNamespace(name=None, local=False))
    assert fetch.fetch_model(model) == "model m: random weights"
    assert len(asked) == 1
    # an encoder may have no safetensors
    monkeypatch.setattr("kvbench.retrieval.encoders.hub_answers", lambda: True)
    assert fetch.fetch_encoder("o/encoder") == "encoder o/encoder: cache/o/encoder"
    assert asked[1] == ("o/encoder", None, [*fetch.MODEL_FILES, "*.bin"])
    assert fetch.fetch_encoder("openai") == "encoder openai: nothing to fetch"
    monkeypatch.setattr("kvbench.retrieval.encoders.hub_answers", lambda: False)
    with pytest.raises(ModelError, match=r"hint: method\.encoder=bm25 needs no weights"):
        fetch.fetch_encoder("o/encoder")


@pytest.mark.parametrize(("error", "said"), [(OSError("no room\nand more"), "no room"), (OSError(), "OSError")])
def test_a_model_that_cannot_be_fetched_is_said(monkeypatch: pytest.MonkeyPatch, error: OSError, said: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    monkeypatch.setattr(fetch, "locate", lambda model: SimpleNamespace(name="o/model", local=False))
    with pytest.raises(ModelError) as caught:
        fetch.fetch_model(ModelConfig(name="m", hub_id="o/model", max_length=8))
    assert str(caught.value) == f"model m: o/model cannot be fetched: {said}"


def test_only_what_is_named_is_fetched_and_each_thing_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert fetch.named(["dataset=a", "model.path=b", "runtime.seed=1", "methods=x"]) == {"dataset", "model"}
    monkeypatch.setattr(fetch, "fetch_model", lambda model: f"model {model.name}: fetched")
    assert fetch.main(["dataset=mini,mini_text", "model=tiny", "runtime.seed=1,2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(set(said)) == 3
    assert {"dataset mini: generated, nothing to fetch", "model tiny: fetched"} < set(said)
    assert fetch.main(["dataset=text", f"dataset.path={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"dataset text: {tmp_path} is local\n"

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "fetch", interrupted)
    assert fetch.main(["dataset=mini"]) == 130
    assert "run the same command again to resume" in capsys.readouterr().err


def test_a_checksum_is_that_of_fields_in_order() -> None:
    """Run ids hold it, so it must never change."""
    records = [{"a": "é", "b": [1, None]}, {"a": "x"}]
    assert data.fingerprint(records, ("a", "b")) == "5f2be57c34cd6b5d"
    different = {
        data.fingerprint(records, ("b", "a")),
        data.fingerprint(records[::-1], ("a", "b")),
        data.fingerprint(records[:1], ("a", "b")),
        data.fingerprint(records, ("a",)),
        data.fingerprint([], ()),
    }
    assert len(different) == 5 and "5f2be57c34cd6b5d" not in different


def test_repositories_are_owner_and_name() -> None:
    HubSource(hub_id="a/b").check()
    HubSource().check()
    for name in ("a", "a/b/c"):
        with pytest.raises(ConfigError, match=rf"x\.hub_id={name}: is not the name of a repository"):
            HubSource(hub_id=name).check("x")
