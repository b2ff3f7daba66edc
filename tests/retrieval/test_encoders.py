"""Encoders: BM25, embeddings kept, missing weights and keys."""

import array
import importlib
import os
import re
import sqlite3
import sys
import types
from contextlib import closing
from functools import partial

import pytest

from kvbench.errors import ConfigError, ModelError
from kvbench.retrieval import encoders
from kvbench.retrieval.embedding import EmbeddingStore


def test_bm25_prefers_the_chunk_with_the_querys_words():
    pytest.importorskip("bm25s")
    scores = encoders.BM25().scores("the key zq7", ["a b c d", "key zq7: 5 5 1", "so so so", "other key x"])
    assert scores.index(max(scores)) == 1
    assert scores[0] == 0.0
    assert encoders.BM25().scores("...", ["a", "b"]) == [0.0, 0.0]
    assert encoders.BM25().scores("word", ["", ""]) == [0.0, 0.0]


def test_bm25_ranks_prose_without_the_querys_words_with_everything_else():
    pytest.importorskip("bm25s")
    query = "What is the value of the key 7?"
    scores = encoders.BM25().scores(query, ["The end of the road is the sea.", "a3f91c: 55", "7: a4"])
    assert scores[0] == scores[1] == 0.0
    assert scores[2] > 0.0
    plain, longer, _ = encoders.BM25().scores("key", ["key", "the key of it is", "other"])
    assert plain == longer > 0.0  # stop words make no text longer


def test_a_letter_is_a_word_for_bm25_but_for_the_stop_word_a():
    pytest.importorskip("bm25s")
    for letter in "bistx7_":
        scores = encoders.BM25().scores(f"the key {letter.upper()}", ["b i s t x 7 _", f"{letter}: 1", "c: 2", "a: 3"])
        assert scores[1] > scores[0] > scores[2] == scores[3] == 0.0
    assert encoders.BM25().scores("a", ["a: 1", "b: 2"]) == [0.0, 0.0]


def test_bm25_knows_the_words_of_scripts_without_spaces():
    pytest.importorskip("bm25s")
    scores = encoders.BM25().scores("光合作用是什么？", ["植物的光合作用。", "月亮很远。", "the rate"])
    assert scores[0] > scores[1] >= scores[2] == 0.0
    assert re.findall(encoders.WORD, "漢字 a3F-x_1") == ["漢", "字", "a3F", "x_1"]


@pytest.fixture
def jax_and_bm25s(monkeypatch, tmp_path):
    """Stand-ins for jax and bm25s in a folder; bm25s imports jax, and notes JAX_PLATFORMS while it is imported."""
    (tmp_path / "jax.py").write_text("import os\nplatforms = os.environ.get('JAX_PLATFORMS')\n")
    (tmp_path / "bm25s.py").write_text("import jax\nplatforms = jax.platforms\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("jax", "bm25s"):
        monkeypatch.setitem(sys.modules, name, None)  # what stood there, or nothing, comes back afterwards
        del sys.modules[name]
    return tmp_path


@pytest.mark.parametrize("before", [None, "cuda", ""])
def test_jax_is_on_the_cpu_while_bm25s_is_imported_and_the_variable_is_then_as_before(
    monkeypatch, jax_and_bm25s, before
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if before is not None:
        monkeypatch.setenv("JAX_PLATFORMS", before)
    assert encoders.import_bm25s().platforms == "cpu"
    assert os.environ.get("JAX_PLATFORMS") == before
    assert encoders.import_bm25s() is sys.modules["bm25s"]
    assert os.environ.get("JAX_PLATFORMS") == before


def test_a_jax_that_was_imported_before_keeps_its_platforms_and_takes_memory_as_needed(monkeypatch, jax_and_bm25s):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    (jax_and_bm25s / "bm25s.py").write_text("import os\nplatforms = os.environ['JAX_PLATFORMS']\n")
    importlib.import_module("jax")
    assert encoders.import_bm25s().platforms == "cuda"
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_the_variable_comes_back_where_bm25s_cannot_be_imported(monkeypatch, jax_and_bm25s):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (jax_and_bm25s / "bm25s.py").write_text("raise ImportError('broken')\n")
    with pytest.raises(ModelError, match="bm25s"):
        encoders.import_bm25s()
    assert "JAX_PLATFORMS" not in os.environ


class Counting(encoders.Embedding):
    """Letters as vectors; counts what it encodes."""

    def __init__(self, store):
        super().__init__("counting", store)
        self.encoded = []

    def ready(self):
        pass

    def embed(self, texts):
        self.encoded += texts
        return [[float(text.count(c)) for c in "abc"] for text in texts]


def test_each_text_is_encoded_once_also_by_another_process(tmp_path):
    path = tmp_path / "deep" / "vectors.sqlite"
    first = Counting(EmbeddingStore(path))
    assert first.scores("aab", ["aab", "c", "aab", "ab"])[:2] == [pytest.approx(1.0), 0.0]
    assert sorted(first.encoded) == ["aab", "ab", "c"]
    second = Counting(EmbeddingStore(path))
    second.scores("c", ["aab", "new"])
    assert second.encoded == ["new"]


def test_a_damaged_store_costs_nothing_but_time(tmp_path):
    path = tmp_path / "vectors.sqlite"
    path.write_bytes(b"no database" * 100)
    assert Counting(EmbeddingStore(path)).scores("a", ["a"]) == [pytest.approx(1.0)]
    (tmp_path / "file").write_text("")
    assert Counting(EmbeddingStore(tmp_path / "file" / "v.sqlite")).scores("a", ["b"]) == [0.0]


def test_kept_vectors_and_their_costs_are_of_one_encoder(tmp_path):
    store = EmbeddingStore(tmp_path / "v.sqlite")
    store.put("one", {"a": [1.0]}, "here", 2.0)
    assert store.get("two", ["a"]) == {} == store.costs("two", ["a"], "here")
    store.put("two", {"a": [3.0], "b": [4.0]}, "here", 8.0)
    assert store.get("one", ["a", "b"]) == {"a": [1.0]} and store.get("two", ["a", "b"]) == {"a": [3.0], "b": [4.0]}
    assert store.costs("one", ["a"], "here") == {"a": 2.0} and store.costs("two", ["a"], "here") == {"a": 4.0}
    assert store.knows("one") and store.knows("two") and not store.knows("three")


def test_a_store_from_before_names_were_recorded_may_know_any_encoder(tmp_path):
    path = tmp_path / "v.sqlite"
    EmbeddingStore(path).put("one", {"a": [1.0]}, "here", 2.0)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE names")
        db.commit()
    store = EmbeddingStore(path)
    assert store.knows("one") and store.knows("another")
    store.put("two", {"b": [1.0]}, "here", 2.0)
    assert store.knows("one") and store.knows("another") and store.get("one", ["a"]) == {"a": [1.0]}


class Clocked(Counting):
    """Encodes at one second a text and loads in a hundred, by a clock of its own."""

    loaded = False

    def __init__(self, store, monkeypatch, here="this machine"):
        super().__init__(store)
        self.here, self.now = here, 0.0
        monkeypatch.setattr("kvbench.retrieval.embedding.time.perf_counter", lambda: self.now)

    def machine(self):
        return self.here

    def load(self):
        if not self.loaded:
            self.loaded, self.now = True, self.now + 100.0

    def embed(self, texts):
        self.now += float(len(texts))
        return super().embed(texts)

    def charged(self, query, texts):
        """Seconds that a search for them is charged with, and what it encoded."""
        now, unspent, self.encoded = self.now, self.unspent_s, []
        self.scores(query, texts)
        return self.now - now + self.unspent_s - unspent, sorted(self.encoded)


def test_a_search_is_charged_as_the_first_one_whoever_searched_before(tmp_path, monkeypatch):
    store = EmbeddingStore(tmp_path / "v.sqlite")
    first = Clocked(store, monkeypatch)
    assert first.charged("q", ["a", "b", "b"]) == (3.0, ["a", "b", "q"])  # loading is not the search's
    assert first.charged("q", ["a", "b", "b"]) == (3.0, [])
    second = Clocked(store, monkeypatch)
    assert second.charged("q", ["a", "b", "c"]) == (4.0, ["c"])
    elsewhere = Clocked(store, monkeypatch, "another machine")
    assert elsewhere.charged("q", ["a"]) == (2.0, ["a", "q"])
    assert elsewhere.charged("q", ["a", "b"]) == (3.0, ["b"])
    assert {first.uncharged, second.uncharged, elsewhere.uncharged} == {0}


def test_a_vector_that_is_encoded_for_its_time_stays_as_it_is(tmp_path, monkeypatch):
    store = EmbeddingStore(tmp_path / "v.sqlite")
    store.put("counting", {"aab": [0.5, 0.25, 0.0]}, "another machine", 1.0)
    encoder = Clocked(store, monkeypatch)
    assert encoder.charged("q", ["aab"])[1] == ["aab", "q"]
    assert store.get("counting", ["aab"]) == {"aab": [0.5, 0.25, 0.0]}


def test_kept_vectors_of_an_encoder_that_cannot_be_had_serve_uncharged(tmp_path, monkeypatch):
    store = EmbeddingStore(tmp_path / "v.sqlite")
    Counting(store).scores("q", ["a", "b"])
    lost = Clocked(store, monkeypatch, "another machine")

    def refuse():
        raise ModelError("no weights")

    monkeypatch.setattr(lost, "load", refuse)
    assert lost.scores("q", ["a", "b"]) == Counting(store).scores("q", ["a", "b"])
    assert lost.uncharged == 3 and not lost.encoded
    with pytest.raises(ModelError, match="no weights"):
        lost.scores("q", ["new"])


@pytest.mark.parametrize("vector", [b"abc", b"", array.array("f", [1.0, float("nan"), 0.0]).tobytes(), "text"])
def test_a_damaged_vector_is_made_again(tmp_path, vector):
    path = tmp_path / "vectors.sqlite"
    Counting(EmbeddingStore(path)).scores("a", ["b"])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE vectors SET vector = ?", (vector,))
    again = Counting(EmbeddingStore(path))
    assert again.scores("a", ["a"]) == [pytest.approx(1.0)]
    assert again.encoded == ["a"]


def test_another_checkpoint_in_the_same_folder_has_other_vectors(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("a")
    before = encoders.stored_name(str(folder))
    assert encoders.stored_name(str(folder)) == before
    (folder / "weights").write_text("other")
    assert encoders.stored_name(str(folder)) != before
    assert encoders.stored_name("contriever") == "contriever"
    assert encoders.stored_name("org/model") == "org/model"


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ModelError, match=r"(?s)sentence-transformers.*method.encoder=bm25"):
        encoders.load_sentence_transformer("contriever", "facebook/contriever")


def test_missing_weights_are_said_quickly_with_the_override(monkeypatch):
    fake = types.ModuleType("sentence_transformers")
    asked: list[bool] = []

    def missing(path, local_files_only=False):
        asked.append(local_files_only)
        raise OSError("not here")

    fake.SentenceTransformer = missing
    monkeypatch.setitem(sys.modules, "sentence_transformers", fake)
    monkeypatch.setattr(encoders, "hub_answers", lambda: False)
    encoders.encoder.cache_clear()
    with pytest.raises(ModelError, match=r"(?s)contriever.*method.encoder=bm25"):
        encoders.encoder("contriever").scores("q", ["a text never seen"])
    assert asked == [True], "a hub that does not answer is not asked for weights"
    encoders.encoder.cache_clear()


def test_what_cannot_be_had_is_said_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(encoders, "hub_answers", lambda: False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    empty, full = EmbeddingStore(None), EmbeddingStore(tmp_path / "v.sqlite")
    full.put("minilm", {"a": [1.0]}, "a machine", 1.0)
    contriever = partial(encoders.SentenceTransformer, "contriever", "nobody/no-such-model")
    for made, said in ((contriever, "method.encoder=bm25"), (encoders.OpenAI, "export OPENAI_API_KEY")):
        for store in (empty, full):  # which has vectors of another encoder
            with pytest.raises(ModelError, match=said):
                made(store).ready()
        full.put(made(full).name, {"a": [1.0]}, "a machine", 1.0)
        made(full).ready()  # perhaps nothing has to be encoded
    encoders.SentenceTransformer("x", str(tmp_path), empty).ready()
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"kvbench\[retrieval\]"):
        encoders.BM25().ready()


def test_openai_without_a_key_says_so_and_never_shows_one(monkeypatch, tmp_path):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ModelError, match="export OPENAI_API_KEY"):
        encoders.OpenAI(EmbeddingStore(None)).scores("q", ["a"])
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="embeddings endpoint") as caught:
        encoders.OpenAI(EmbeddingStore(None)).scores("q", ["a"])
    assert "sk-secret" not in str(caught.value)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'contriever'"):
        encoders.check_name("contreiver")
    encoders.check_name("org/model")


def test_vectors_of_an_endpoint_belong_to_their_texts_in_whatever_order_they_come(monkeypatch):
    def post(url, json, headers, timeout):
        data = [{"index": number, "embedding": [float(len(text))]} for number, text in enumerate(json["input"])]
        return types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: {"data": data[::-1]})

    monkeypatch.setitem(sys.modules, "httpx", types.SimpleNamespace(post=post, HTTPError=OSError))
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-key")
    assert encoders.OpenAI(EmbeddingStore(None)).embed(["a", "bbb", "cc"]) == [[1.0], [3.0], [2.0]]
