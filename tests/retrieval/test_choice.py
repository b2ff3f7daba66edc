"""Encoders by name: what stands for a name, what is loaded and downloaded, and what is said where that fails."""

from __future__ import annotations

import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import ConfigError, ModelError
from kvbench.hub.repository import HubError
from kvbench.hub.transfer import Plan
from kvbench.retrieval import embedding, encoders
from kvbench.retrieval.embedding import EmbeddingStore
from kvbench.util.requirements import Package


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A store of this test's own, and no encoders of earlier tests."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    encoders.encoder.cache_clear()
    yield tmp_path / "embeddings.sqlite"
    encoders.encoder.cache_clear()


def test_a_name_stands_for_one_encoder_of_a_process(store: Path) -> None:
    assert type(encoders.encoder("bm25")) is encoders.BM25 and type(encoders.encoder("openai")) is encoders.OpenAI
    for name, path in (
        ("contriever", "facebook/contriever"),
        ("llm_embedder", "BAAI/llm-embedder"),
        ("minilm", "sentence-transformers/all-MiniLM-L6-v2"),
        ("org/model", "org/model"),
    ):
        made = encoders.encoder(name)
        assert type(made) is encoders.SentenceTransformer and (made.name, made.path) == (name, path)
        assert encoders.encoder(name) is made
    assert store.exists()
    with pytest.raises(ConfigError, match=r"method\.encoder=nothing: is not a known encoder"):
        encoders.encoder("nothing")


def test_names_that_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for name in (*encoders.NAMED, "org/model", "a/b-c.d_e", "folder", str(tmp_path), "o" * 96 + "/" + "m" * 95):
        encoders.check_name(name)
    for name in ("", "file", "org/model/more", ".org/model", "órg/model", "o" * 97 + "/m", "m/" + "m" * 96):
        with pytest.raises(ConfigError, match="is not a known encoder"):
            encoders.check_name(name)


def test_the_store_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    EmbeddingStore.default().put("x", {"a": [1.0]}, "m", 1.0)
    assert (tmp_path / "xdg" / "kvbench" / "embeddings.sqlite").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    EmbeddingStore.default()
    assert (tmp_path / "home" / ".cache" / "kvbench" / "embeddings.sqlite").exists()
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "own"))
    EmbeddingStore.default()
    assert (tmp_path / "own" / "embeddings.sqlite").exists()


def test_a_store_that_cannot_write_is_used_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "v.sqlite"
    store = EmbeddingStore(path)
    store.put("x", {"a": [1.0], "b": [2.0]}, "m", 3.0)
    store._db.execute("CREATE TRIGGER full BEFORE INSERT ON costs BEGIN SELECT RAISE(ABORT, 'full'); END")
    store.put("x", {"c": [3.0]}, "m", 1.0)  # vectors without a time are not kept either
    assert store.get("x", ["a", "b", "c"]) == {"a": [1.0], "b": [2.0]}
    assert store.costs("x", ["a", "b"], "m") == {"a": 1.5, "b": 1.5} and store.costs("x", ["a"], "other") == {}
    for odd in (-1.0, float("inf"), "text"):
        store._db.execute("UPDATE costs SET seconds = ?", (odd,))
        assert store.costs("x", ["a"], "m") == {}
    assert store.knows("x") and not store.knows("y")
    for table in ("costs", "vectors", "names"):
        store._db.execute(f"DROP TABLE {table}")
    assert (store.knows("x"), store.get("x", ["a"]), store.costs("x", ["a"], "m")) == (False, {}, {})


class Model:
    """A model of sentence-transformers: a vector per text."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def encode(self, texts: list[str], batch_size: int, show_progress_bar: bool) -> list[list[float]]:
        self.seen.append((texts, batch_size, show_progress_bar))
        return [[float(len(text)), 1.0] for text in texts]


def test_instructions_are_llm_embedders_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, model = [], Model()
    monkeypatch.setattr(encoders, "load_sentence_transformer", lambda *given: asked.append(given) or model)
    plain = encoders.SentenceTransformer("contriever", "facebook/contriever", EmbeddingStore(None))
    assert plain.prepare("q", ["a", "b"]) == ["q", "a", "b"]
    assert plain.embed(["aaa", "b"]) == [[3.0, 1.0], [1.0, 1.0]] and plain.embed(["c"]) == [[1.0, 1.0]]
    assert asked == [("contriever", "facebook/contriever")]  # loaded once
    assert model.seen[0] == (["aaa", "b"], 64, False)
    other = encoders.SentenceTransformer("llm_embedder", "BAAI/llm-embedder", EmbeddingStore(None))
    assert other.prepare("q", ["a"]) == [
        "Represent this query for retrieving relevant documents: q",
        "Represent this document for retrieval: a",
    ]
    folder = encoders.SentenceTransformer("/some/folder abc", "/some/folder", EmbeddingStore(None))
    folder.load()
    assert asked[-1] == ("/some/folder", "/some/folder")  # its digest is not part of a message


def test_texts_are_encoded_in_batches_and_compared_by_their_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(encoders, "load_sentence_transformer", lambda *given: model)
    encoder = encoders.SentenceTransformer("contriever", "x/y", EmbeddingStore(None))
    scores = encoder.scores("qq", ["t" * n for n in range(100)])
    assert sorted(len(texts) for texts, _, _ in model.seen) == [37, 64] and len(scores) == 100
    assert scores[2] == pytest.approx(1.0) and scores[0] == pytest.approx(5**-0.5)
    assert embedding.cosine([3.0, 4.0], [4.0, 3.0]) == pytest.approx(0.96)
    assert embedding.cosine([0.0, 0.0], [4.0, 3.0]) == embedding.cosine([1.0], [0.0]) == 0.0
    assert embedding.cosine([1.0, 0.0], [-2.0, 0.0]) == -1.0


def test_an_endpoint_is_asked_with_key_model_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def post(url: str, **more: Any) -> Any:
        asked.append((url, more))
        data = [{"index": 0, "embedding": [1.0]}]
        return types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: {"data": data})

    monkeypatch.setitem(sys.modules, "httpx", types.SimpleNamespace(post=post, HTTPError=OSError))
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-key")
    for name in ("OPENAI_BASE_URL", "OPENAI_EMBEDDING_MODEL"):
        monkeypatch.delenv(name, raising=False)
    plain = encoders.OpenAI(EmbeddingStore(None))
    plain.load()
    plain.embed(["a"])
    ((url, given),) = asked
    assert url == "https://api.openai.com/v1/embeddings" and plain.name == "openai/text-embedding-ada-002"
    assert given["json"] == {"model": "text-embedding-ada-002", "input": ["a"]}
    assert given["headers"] == {"Authorization": "Bearer not-a-key"} and given["timeout"] == 60
    monkeypatch.setenv("OPENAI_BASE_URL", "http://here/v1/")
    monkeypatch.setenv("OPENAI_EMBEDDING_MODEL", "mine")
    other = encoders.OpenAI(EmbeddingStore(None))
    assert (other.url, other.name) == ("http://here/v1/embeddings", "openai/mine http://here/v1")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ModelError, match="export OPENAI_API_KEY"):
        other.load()


def test_packages_are_those_of_the_encoder() -> None:
    def hinted(module: str, name: str, command: str) -> tuple[Package, ...]:
        return (Package(module, "method.encoder", name, f"run {command}, or choose another method.encoder"),)

    assert encoders.packages("bm25") == hinted("bm25s", "bm25", "pip install 'kvbench[retrieval]'")
    assert encoders.packages("openai") == hinted("httpx", "openai", "pip install httpx")
    for name in ("minilm", "org/model"):
        assert encoders.packages(name) == hinted("sentence_transformers", name, "pip install sentence-transformers")


def test_a_machine_is_its_processor_its_threads_and_its_gpu() -> None:
    import torch

    assert f"{torch.get_num_threads()} threads, no GPU" in embedding.machine() or torch.cuda.is_available()
    assert encoders.OpenAI(EmbeddingStore(None)).machine() == embedding.machine()


@pytest.mark.parametrize("fails", [False, True])
def test_the_hub_answers_if_its_host_does(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    asked: list[Any] = []

    def connect(address: tuple[str, int], timeout: float) -> Any:
        asked.append((address, timeout))
        if fails:
            raise OSError("no route")
        return types.SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    assert encoders.hub_answers() is not fails
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example:8080")
    encoders.hub_answers()
    assert asked == [(("hub.example", 443), 1.5), (("hub.example", 8080), 1.5)]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not encoders.hub_answers() and len(asked) == 2


def loading(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], answers: bool = True) -> list[Any]:
    """Record the calls of sentence-transformers, whose attempts end as `outcomes` say."""
    asked: list[Any] = []

    def load(path: str, local_files_only: bool = False) -> Any:
        asked.append((path, local_files_only))
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setitem(sys.modules, "sentence_transformers", types.SimpleNamespace(SentenceTransformer=load))
    monkeypatch.setattr(encoders, "hub_answers", lambda: answers)
    return asked


def test_weights_are_downloaded_once_and_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    fetched: list[Any] = []

    def fetch(hub_id: str, announce: Any) -> Path:
        fetched.append(hub_id)
        announce(Plan(("a",), ("a",), 3 << 20, 2 << 20))
        return tmp_path

    monkeypatch.setattr(encoders, "fetch_weights", fetch)
    asked = loading(monkeypatch, ["here"])
    assert encoders.load_sentence_transformer("minilm", "org/minilm") == "here" and fetched == []
    asked = loading(monkeypatch, [OSError("not here"), "fetched"])
    assert encoders.load_sentence_transformer("minilm", "org/minilm") == "fetched"
    assert fetched == ["org/minilm"] and asked == [("org/minilm", True)] * 2
    assert "encoder minilm: 2" in capsys.readouterr().err
    loading(monkeypatch, [OSError("not here"), ValueError("odd files")])
    with pytest.raises(ModelError, match=r"the encoder 'minilm' \(org/minilm\) cannot be loaded \(ValueError\)"):
        encoders.load_sentence_transformer("minilm", "org/minilm")
    fetched.clear()
    loading(monkeypatch, [OSError("odd")])
    with pytest.raises(ModelError, match=r"cannot be loaded \(OSError\)(?s:.*)method\.encoder=bm25"):
        encoders.load_sentence_transformer(str(tmp_path), str(tmp_path))
    assert fetched == []  # a folder is not on the hub

    def refuse(hub_id: str, announce: Any) -> Path:
        raise HubError("the repository is gated")

    monkeypatch.setattr(encoders, "fetch_weights", refuse)
    loading(monkeypatch, [OSError("not here")])
    with pytest.raises(ModelError, match=r"cannot be loaded \(the repository is gated\)"):
        encoders.load_sentence_transformer("minilm", "org/minilm")


def test_what_is_fetched_of_an_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = ["1_Pooling/config.json", "README.md", "config.json", "model.safetensors", "onnx/model.onnx", "vocab.txt"]
    files += [
        "pytorch_model.bin",
        "2_Dense/model.safetensors",
        "tokenizer.model",
        "x.jinja",
        "modeling.py",
        "x_1/y.json",
    ]
    assert encoders.wanted(files) == [
        "model.safetensors",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "config.json",
        "vocab.txt",
        "tokenizer.model",
        "x.jinja",
        "modeling.py",
    ]
    assert encoders.wanted(["a.bin", "b.bin", "1_Dense/c.bin", "config.json"]) == [
        "a.bin",
        "b.bin",
        "1_Dense/c.bin",
        "config.json",
    ]
    calls: list[Any] = []
    for missing in ((), ("a.bin",)):
        made = Plan(("a.bin",), missing, 5, 5 * len(missing))
        monkeypatch.setattr(encoders, "plan", lambda *given, made=made: calls.append(given) or made)
        monkeypatch.setattr(encoders, "fetch", lambda repository, files: (repository.hub_id, files))
        told: list[Any] = []
        assert encoders.fetch_weights("org/model", told.append) == ("org/model", made)
        assert told == ([made] if missing else [])
    repository, wanted, probe = calls[0]
    assert (repository.hub_id, repository.kind, wanted, probe) == ("org/model", "model", encoders.wanted, "config.json")
    assert os.path.basename(probe) == probe


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def refuse(address: Any, **_: Any) -> None:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.create_connection", refuse)
    encoder = encoders.SentenceTransformer("minilm", "org/minilm", EmbeddingStore(None))
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        encoder.ready()
    assert len(asked) == 1


def test_an_encoder_in_the_hubs_cache_is_ready_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    answers: list[Any] = ["/cache/config.json", None, object()]  # there, not there, known not to be in the repository
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *given: asked.append(given) or answers.pop(0))
    monkeypatch.setattr(encoders, "hub_answers", lambda: False)
    encoder = encoders.SentenceTransformer("minilm", "org/minilm", EmbeddingStore(None))
    encoder.ready()
    assert asked == [("org/minilm", "config.json")]
    for _ in range(2):
        with pytest.raises(ModelError, match="neither a folder nor in the hub's cache"):
            encoder.ready()
    monkeypatch.setattr(encoders, "hub_answers", lambda: True)
    answers.append(None)
    encoder.ready()
