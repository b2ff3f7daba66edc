"""Sizes of what runs would download, and where each number is from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.config import downloads as module
from kvbench.config.downloads import Download, data_downloads, downloads, model_download
from kvbench.errors import DataError, ModelError
from kvbench.models.spec import Architecture, ModelConfig
from kvbench.tasks.hub_files import HubSource

SIZES: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 300},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rope": {}},
}


def model(**changes: Any) -> ModelConfig:
    architecture = Architecture(**SIZES, parameters=1_000_000)
    return ModelConfig(
        **{"name": "m", "hub_id": "some/model", "max_length": 64, "architecture": architecture} | changes
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub that lists files of 1500 bytes; ``cached`` and ``away`` can be changed."""
    state = SimpleNamespace(cached=False, away=False)

    def planned(chosen: ModelConfig) -> Any:
        if state.away:
            raise ModelError(
                "model m: the weights of some/model are not on this machine, and the hub is away.\n  hint: x"
            )
        return SimpleNamespace(missing_bytes=1500)

    monkeypatch.setattr(module, "is_cached", lambda chosen: state.cached)
    monkeypatch.setattr(module, "planned", planned)
    return state


def test_a_model_is_here_or_on_the_hub_or_estimated(hub) -> None:
    assert model_download(model()) == Download("model m (some/model)", 1500, "the hub's list of its files")
    assert model_download(model(gated="ask")).what == "model m (some/model, gated)"
    hub.away = True
    basis = "about, 2 bytes for each of its parameters: the hub is away"
    assert model_download(model()) == Download("model m (some/model)", 2_000_000, basis)
    unknown = Download("model m (some/model)", None, "the hub is away")
    assert model_download(model(requires="gptqmodel")) == unknown
    assert model_download(model(architecture=None)) == unknown
    packed = model_download(model(hub_id="some/model-AWQ"))
    assert packed is not None and packed.bytes is None
    assert model_download(model(architecture=Architecture(**SIZES))) == unknown
    hub.cached = True
    assert model_download(model()) == Download("model m (some/model)", 0, "on this machine")


@pytest.mark.parametrize("changes", [{"weights": "random"}, {"path": "folder"}, {"hub_id": None}])
def test_local_and_random_weights_need_no_download(hub, changes) -> None:
    assert model_download(model(**changes)) is None


def test_each_file_of_a_data_set_has_its_size(monkeypatch) -> None:
    asked: list[Any] = []

    def sizes(source: HubSource, name: str, what: str, remedy: str) -> tuple[int | None, int | None]:
        asked.append((name, what))
        if name == "away.jsonl":
            raise DataError("data x is not on this machine, and there is no network.\n  hint: y")
        return 99, {"here.jsonl": 0, "all.zip": 7, "odd.jsonl": None}[name]

    monkeypatch.setattr(module.hub_files, "sizes", sizes)
    single, archive = (
        HubSource(hub_id="some/data", file="{task}.jsonl"),
        HubSource(hub_id="some/data", file="all.zip!{task}.jsonl"),
    )
    files = [(single, "here"), (archive, "qa"), (single, "odd"), (single, "away"), (HubSource(), "local")]
    task: Any = SimpleNamespace(files=lambda: iter(files))
    computed = list(data_downloads(task, {"path": None}))
    assert computed == [
        Download("data some/data/here.jsonl", 0, "on this machine"),
        Download("data some/data/all.zip", 7, "the hub's list of its files"),
        Download("data some/data/odd.jsonl", None, "the hub's list of its files"),
        Download("data some/data/away.jsonl", None, "there is no network"),
    ]
    assert asked[1] == ("all.zip", "data some/data/all.zip")
    assert list(data_downloads(task, {"path": "mine"})) == []
    assert list(data_downloads(task, {"over": "gsm8k", "options": {"path": "mine"}})) == []
    assert list(data_downloads(task, {"over": "gsm8k", "options": {"lengths": [8]}})) == computed


def test_downloads_are_listed_once_each(hub, monkeypatch) -> None:
    part = HubSource(hub_id="some/data", file="all.zip!{task}.jsonl")
    task = SimpleNamespace(files=lambda: iter([(part, "a"), (part, "b")]))
    monkeypatch.setattr(module.tasks, "load", lambda group: task)
    monkeypatch.setattr(module.hub_files, "sizes", lambda *_: (9, 9))
    computed = downloads(["llama2-7b", "llama2-7b", "tiny"], ["gsm8k", "mini", "gsm8k"])
    assert [entry.what.split()[0] for entry in computed] == ["model", "data"]
    assert computed[0].what.startswith("model llama2-7b (meta-llama/Llama-2-7b-hf")


@pytest.mark.parametrize(
    ("download", "text"),
    [
        (Download("a", 0, "on this machine"), "a: on this machine"),
        (Download("a", 1500, "listed"), "a: 1.5 kB (listed)"),
        (Download("a", None, "why"), "a: unknown size (why)"),
    ],
)
def test_a_download_in_words(download, text) -> None:
    assert str(download) == text
