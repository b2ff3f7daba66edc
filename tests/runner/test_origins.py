"""Origins: the commit of a run's first samples is recorded, and another one is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from kvbench.errors import ModelError
from kvbench.models.spec import ModelConfig
from kvbench.results.store import RunStore
from kvbench.retrieval.encoders import HUB
from kvbench.runner import origins
from kvbench.tasks.base import Task
from kvbench.tasks.hub_files import HubSource

COMMIT, OTHER = "a" * 40, "b" * 40


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def cached(cache: Path, folder: str, commit: str, files: dict[str, bytes]) -> None:
    """Put files of a commit into the hub's cache, and make it the main branch."""
    root = cache / folder
    for name, content in files.items():
        path = root / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(commit)


WEIGHTS = {"config.json": b'{"auto_map": {}}', "model.safetensors": b"weights", "README.md": b"words"}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    cached(folder, "models--some--model", COMMIT, WEIGHTS)
    return folder


@pytest.fixture
def store(tmp_path) -> RunStore:
    run = RunStore(tmp_path / "runs", "1-2")
    run.path.mkdir(parents=True)
    return run


def checked(data: str | None = None, encoder: str | None = None, task: Any = None, **model: Any) -> Any:
    parts: dict[str, Any] = {"name": "m", "hub_id": "some/model", "max_length": 64} | model
    method = SimpleNamespace(**({"encoder": encoder} if encoder else {}))
    return SimpleNamespace(model=ModelConfig(**parts), method=method, dataset={"path": data} if data else {}, task=task)


class Data(Task):
    """A data set of these files."""

    def __init__(self, *files: tuple[HubSource, str]) -> None:
        self.of_hub = files

    def files(self) -> Any:
        return iter(self.of_hub)


def test_commit_and_checksums_of_the_weights_are_recorded(cache, store) -> None:
    assert origins.noted(store) == {}
    origins.settle(store, checked(task=Data()))
    entry = {"hub_id": "some/model", "revision": COMMIT, "sha256": {"model.safetensors": sha(b"weights")}}
    assert store.origin() == {"model": entry}
    assert origins.noted(store) == {"origin": {"model": entry}}


def test_weights_of_another_commit_are_refused_and_the_same_weights_are_not(cache, store) -> None:
    origins.settle(store, checked(task=Data()))
    cached(cache, "models--some--model", OTHER, WEIGHTS)
    origins.settle(store, checked(task=Data()))  # the same content
    assert store.origin()["model"]["revision"] == COMMIT
    cached(cache, "models--some--model", OTHER, {"model.safetensors": b"other weights"})
    before = (store.path / "origin.json").read_bytes()
    with pytest.raises(ModelError) as error:
        origins.settle(store, checked(task=Data()))
    message = str(error.value)
    assert f"run 1-2 has samples of some/model at commit {COMMIT}, and this machine has commit {OTHER}" in message
    assert f"model.revision={OTHER}" in message
    assert (store.path / "origin.json").read_bytes() == before


def test_an_unchanged_record_is_not_written_again(cache, store, monkeypatch) -> None:
    origins.settle(store, checked(task=Data()))
    monkeypatch.setattr(RunStore, "write_origin", lambda *_: pytest.fail("it was written again"))
    origins.settle(store, checked(task=Data()))


@pytest.mark.parametrize("case", ["random", "folder", "no hub", "not cached", "incomplete"])
def test_weights_that_are_not_the_hubs_have_no_origin(cache, store, tmp_path, case) -> None:
    changes: dict[str, Any] = {
        "random": {"weights": "random"},
        "folder": {"path": str(tmp_path)},
        "no hub": {"hub_id": None},
        "not cached": {"hub_id": "some/other"},
        "incomplete": {},
    }[case]
    if case == "incomplete":
        (cache / "models--some--model" / "snapshots" / COMMIT / "model.safetensors").unlink()
    origins.settle(store, checked(**changes, task=Data()))
    assert store.origin() == {} and not (store.path / "origin.json").exists()


def test_data_of_the_hub_are_recorded_once_per_file_and_local_data_are_not(cache, store) -> None:
    cached(cache, "datasets--some--data", OTHER, {"data/qa.jsonl": b"[]", "all.zip": b"zip"})
    single = HubSource(file="data/{task}.jsonl", hub_id="some/data")
    archive = HubSource(file="all.zip!{task}.jsonl", hub_id="some/data")
    local = HubSource(file="data/{task}.jsonl")
    task = Data((single, "qa"), (archive, "qa"), (archive, "other"), (local, "qa"), (single, "absent"))
    origins.settle(store, checked(hub_id=None, task=task))
    parts = {"hub_id": "some/data", "revision": OTHER}
    assert store.origin() == {
        "data": [
            {**parts, "sha256": {"data/qa.jsonl": sha(b"[]")}},
            {**parts, "sha256": {"all.zip": sha(b"zip")}},
        ]
    }
    elsewhere = RunStore(store.path.parent, "3-4")
    elsewhere.path.mkdir()
    origins.settle(elsewhere, checked("files.jsonl", hub_id=None, task=task))
    assert elsewhere.origin() == {}


def test_what_was_recorded_first_stays_and_what_is_new_is_added(cache, store) -> None:
    origins.settle(store, checked(task=Data()))
    model = store.origin()["model"]
    cached(cache, "datasets--some--data", OTHER, {"qa.jsonl": b"[]"})
    task = Data((HubSource(file="{task}.jsonl", hub_id="some/data"), "qa"))
    cached(cache, "models--some--model", OTHER, WEIGHTS)  # the same weights, fetched again from another commit
    origins.settle(store, checked(task=task))
    assert set(store.origin()) == {"model", "data"} and store.origin()["model"] == model


@pytest.mark.parametrize(("name", "hub_id"), [("contriever", HUB["contriever"]), ("some/encoder", "some/encoder")])
def test_the_weights_of_an_encoder_are_recorded_if_they_are_here(cache, store, name, hub_id) -> None:
    origins.settle(store, checked(hub_id=None, encoder=name, task=Data()))
    assert store.origin() == {}, "they are not here yet"
    cached(
        cache, f"models--{hub_id.replace('/', '--')}", OTHER, {"config.json": b"{}", "model.safetensors": b"encoder"}
    )
    origins.settle(store, checked(hub_id=None, encoder=name, task=Data()))
    entry = {"hub_id": hub_id, "revision": OTHER, "sha256": {"model.safetensors": sha(b"encoder")}}
    assert store.origin() == {"encoder": entry}


def test_encoders_of_this_machine_have_no_origin(cache, store, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "encoder").mkdir(parents=True)
    cached(cache, "models--some--encoder", OTHER, {"model.safetensors": b"encoder"})
    for name in ("bm25", "some/encoder"):
        origins.settle(store, checked(hub_id=None, encoder=name, task=Data()))
    assert store.origin() == {}
