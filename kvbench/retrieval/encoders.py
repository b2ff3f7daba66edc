"""Encoders that score a context's chunks against a query.

All of them give one number a chunk, the larger the more similar. Nothing is chosen silently: an encoder whose weights
or key are missing stops the run with the override that helps.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from kvbench.errors import ConfigError, ModelError
from kvbench.retrieval.store import EmbeddingStore
from kvbench.util.requirements import Package, exists

#: names with a meaning; anything else is a sentence-transformers model, by hub id or folder
NAMED = ("contriever", "bm25", "llm_embedder", "minilm", "openai")
HUB = {
    "contriever": "facebook/contriever",
    "llm_embedder": "BAAI/llm-embedder",
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
}
#: what LLM-Embedder expects before queries and documents (its question-answering task)
LLM_EMBEDDER = {
    "query": "Represent this query for retrieving relevant documents: ",
    "text": "Represent this document for retrieval: ",
}
#: Han, kana and their like: characters of scripts without spaces between words
UNSPACED = "\\u3040-\\u30ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\U00020000-\\U0003ffff"
#: a word of BM25
WORD = rf"(?u)[{UNSPACED}]|[^\W{UNSPACED}]+"
NO_KEY = "method.encoder=openai needs a key.\n  hint: export OPENAI_API_KEY=..., or method.encoder=bm25"
NO_BM25S = "method.encoder=bm25 needs the package bm25s.\n  hint: pip install 'kvbench[retrieval]'"
#: the endpoint of ``encoder=openai`` where the environment names no other
OPENAI_MODEL, OPENAI_URL = "text-embedding-ada-002", "https://api.openai.com/v1"
#: seconds that the hub may take to answer before it counts as out of reach
PROBE_SECONDS = 1.5


class Encoder(ABC):
    """Scores texts against a query."""

    #: seconds of the searches so far that a person who searches for the first time would have spent beside those that
    #: passed (vectors that were kept), less those that only the first search of a process takes (weights are loaded)
    unspent_s: float = 0.0
    #: kept vectors so far whose making could not be charged: nobody knows how long it takes on this machine
    uncharged: int = 0
    #: whether a text's first and last word must be whole: where words are compared, half a word is another word
    whole_words: ClassVar[bool] = False

    @abstractmethod
    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """One number for each text, the larger the more similar."""

    @abstractmethod
    def ready(self) -> None:
        """Raise ModelError where what it needs cannot be had; looks, and loads nothing."""


class BM25(Encoder):
    """BM25 in Lucene's variant over lower-cased words (bm25s); the raw score.

    A word is a run of letters, digits and underscores, a single one too (keys in retrieval tasks are often spelled in
    them); where a script writes words without spaces, each character is one, as in Lucene's standard analyzer. English
    stop words are left out, as bm25s and Lucene's English analyzer do: with the "is", "the" and "of" of a question,
    prose about nothing would rank before the records of a list. Of the letters alone, "a" is a stop word: where it is
    a key, it is not found.
    """

    whole_words = True
    #: raised when it finds other words; part of a run's identity (2: cut words whole, no stop words, Han by character)
    version: ClassVar[int] = 2

    def ready(self) -> None:
        """Its package is installed."""
        if find_spec("bm25s") is None:
            raise ModelError(NO_BM25S)

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """0 for a text without a word of the query."""
        # bm25s imports jax where it is installed, and jax would take three quarters of the GPU's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        try:
            import bm25s
        except ImportError as error:
            raise ModelError(NO_BM25S) from error
        corpus = bm25s.tokenize(list(texts), stopwords="english", token_pattern=WORD, show_progress=False)
        words = bm25s.tokenize([query], stopwords="english", token_pattern=WORD, show_progress=False)
        if not any(len(ids) for ids in corpus.ids) or not words.ids[0]:
            return [0.0] * len(texts)
        index = bm25s.BM25(method="lucene")
        index.index(corpus, show_progress=False)
        names = {number: word for word, number in words.vocab.items()}
        return [float(s) for s in index.get_scores([names[i] for i in words.ids[0]])]


class Embedding(Encoder):
    """Cosine similarity of embeddings (Cocktail, eq. 1), each text encoded once and kept.

    Args:
        name: identifies the vectors in the store.
        store: keeps vectors by (name, text).
    """

    batch = 64

    def __init__(self, name: str, store: EmbeddingStore) -> None:
        self.name, self.store = name, store

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Vectors of texts."""

    def prepare(self, query: str, texts: Sequence[str]) -> list[str]:
        """The query and the texts as the encoder wants them."""
        return [query, *texts]

    def load(self) -> None:
        """Load what :meth:`embed` needs, where it is not loaded yet. Raises ModelError."""

    def machine(self) -> str:
        """What vectors are made on: times of one are not those of another."""
        return machine()

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Cosine of the query's and each text's vector, in double precision.

        A text is encoded again where its vector is kept and nobody knows how long that took on this machine.
        """
        wanted = self.prepare(query, texts)
        by_text = self.store.get(self.name, wanted)
        here = self.machine()
        costs = self.store.costs(self.name, list(by_text), here)
        unknown, missing = sorted(by_text.keys() - costs), sorted(set(wanted) - by_text.keys())
        if unknown or missing:
            started = time.perf_counter()
            try:
                self.load()
            except ModelError:
                if missing:
                    raise
                self.uncharged, unknown = self.uncharged + len(unknown), []
            self.unspent_s -= time.perf_counter() - started
        left = sorted([*unknown, *missing])
        for first in range(0, len(left), self.batch):
            part = left[first : first + self.batch]
            started = time.perf_counter()
            encoded = dict(zip(part, self.embed(part), strict=True))
            by_text = {**encoded, **by_text}  # what is kept stays, to the bit: searches with it must not change
            self.store.put(self.name, {text: by_text[text] for text in part}, here, time.perf_counter() - started)
        self.unspent_s += sum(costs.values())
        vectors = [by_text[text] for text in wanted]
        return [cosine(vectors[0], vector) for vector in vectors[1:]]


class SentenceTransformer(Embedding):
    """Any sentence-transformers model; plain Transformers checkpoints get mean pooling (as Contriever wants)."""

    def __init__(self, name: str, path: str, store: EmbeddingStore) -> None:
        super().__init__(name, store)
        self.path = path
        self._model: Any = None

    def prepare(self, query: str, texts: Sequence[str]) -> list[str]:
        """LLM-Embedder has instructions before its inputs; the others take the plain texts."""
        if self.name != "llm_embedder":
            return super().prepare(query, texts)
        return [LLM_EMBEDDER["query"] + query, *(LLM_EMBEDDER["text"] + text for text in texts)]

    def ready(self) -> None:
        """The weights are in a folder or the hub's cache, or the hub answers; or vectors are kept, perhaps of all."""
        from huggingface_hub import try_to_load_from_cache

        if os.path.isdir(self.path) or isinstance(try_to_load_from_cache(self.path, "config.json"), str):
            return
        if not hub_answers() and not len(self.store):
            raise cannot_load(self.name, self.path, "neither a folder nor in the hub's cache")

    def load(self) -> None:
        """The weights, once."""
        if self._model is None:
            self._model = load_sentence_transformer(self.path if "/" in self.name else self.name, self.path)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Vectors, fp32."""
        self.load()
        vectors = self._model.encode(list(texts), batch_size=self.batch, show_progress_bar=False)
        return [[float(x) for x in vector] for vector in vectors]


class OpenAI(Embedding):
    """An OpenAI-compatible embeddings endpoint (``text-embedding-ada-002`` unless ``OPENAI_EMBEDDING_MODEL`` is set).

    ``OPENAI_API_KEY`` and, for other servers, ``OPENAI_BASE_URL`` come from the environment; the key is never logged.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self.model, base = openai_endpoint()
        self.url = base + "/embeddings"
        super().__init__(f"openai/{self.model}" + ("" if base == OPENAI_URL else f" {base}"), store)

    def load(self) -> None:
        """There is a key."""
        if not os.environ.get("OPENAI_API_KEY"):
            raise ModelError(NO_KEY)

    def ready(self) -> None:
        """There is a key, or vectors are kept, maybe all of them."""
        if not os.environ.get("OPENAI_API_KEY") and not len(self.store):
            raise ModelError(NO_KEY)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Vectors from the endpoint."""
        import httpx

        key = os.environ.get("OPENAI_API_KEY")
        if not key:
            raise ModelError(NO_KEY)
        try:
            answer = httpx.post(
                self.url,
                json={"model": self.model, "input": list(texts)},
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:  # its text may hold the request's headers: name the kind alone
            status = getattr(getattr(error, "response", None), "status_code", "no answer")
            raise ModelError(
                f"the embeddings endpoint {self.url} failed ({type(error).__name__}, {status}).\n"
                "  hint: check OPENAI_BASE_URL and OPENAI_API_KEY, or method.encoder=bm25"
            ) from None
        return [item["embedding"] for item in sorted(answer.json()["data"], key=lambda item: item["index"])]


def openai_endpoint() -> tuple[str, str]:
    """Model and base URL of ``encoder=openai``, from the environment."""
    model = os.environ.get("OPENAI_EMBEDDING_MODEL") or OPENAI_MODEL
    return model, (os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")


@lru_cache(maxsize=1)
def machine() -> str:
    """The processor, how many threads it computes with, and the GPU, as they decide how fast an encoder is."""
    import torch

    from kvbench.profiling.device import device_name
    from kvbench.results.environment import cpu_name

    gpu = device_name("cuda:0") if torch.cuda.is_available() else "no GPU"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {gpu}"


def load_sentence_transformer(name: str, path: str) -> Any:
    """The model, from disk or the hub's cache; the hub itself only when it answers.

    Raises:
        ModelError: it cannot be had, with the overrides that help.
    """
    try:
        import sentence_transformers
    except ImportError as error:
        raise ModelError(
            f"method.encoder={name} needs the package sentence-transformers.\n"
            "  hint: pip install sentence-transformers, or method.encoder=bm25"
        ) from error
    try:
        return sentence_transformers.SentenceTransformer(path, local_files_only=True)
    except Exception as error:
        reason: Exception = error
    if not os.path.isdir(path) and hub_answers():
        try:
            return sentence_transformers.SentenceTransformer(path)
        except Exception as error:
            reason = error
    raise cannot_load(name, path, type(reason).__name__) from reason


def cannot_load(name: str, path: str, reason: str) -> ModelError:
    """What is said where weights are missing, with the overrides that help."""
    return ModelError(
        f"the encoder '{name}' ({path}) cannot be loaded: {reason}; its weights are not on this machine "
        "or the hub cannot be reached.\n  hint: method.encoder=bm25 (needs no weights), or method.encoder=DIR of a "
        "sentence-transformers model"
    )


def hub_answers() -> bool:
    """Whether the hub's host takes a connection at once (a retry loop would cost a minute)."""
    from urllib.parse import urlparse

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    host = urlparse(constants.ENDPOINT)
    answered: list[bool] = []

    def probe() -> None:
        try:
            socket.create_connection((host.hostname or "", host.port or 443), timeout=PROBE_SECONDS).close()
            answered.append(True)
        except OSError:
            pass

    thread = threading.Thread(target=probe, daemon=True)  # name resolution knows no timeout
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answered)


@lru_cache(maxsize=8)
def encoder(name: str) -> Encoder:
    """The encoder of that name (:data:`NAMED`, or a sentence-transformers id or folder), made once a process.

    Raises:
        ConfigError: neither a name nor something that looks like a model.
    """
    if name == "bm25":
        return BM25()
    store = EmbeddingStore.default()
    if name == "openai":
        return OpenAI(store)
    check_name(name)
    return SentenceTransformer(stored_name(name), HUB.get(name, name), store)


def stored_name(name: str) -> str:
    """What an encoder's vectors are kept under: a folder's by its files too, which training changes."""
    if name in NAMED or not os.path.isdir(name):
        return name
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    seen = [f"{path.relative_to(name)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return f"{os.path.realpath(name)} {hashlib.sha256(chr(10).join(seen).encode()).hexdigest()[:16]}"


def packages(name: str) -> tuple[Package, ...]:
    """What the encoder of that name is made with."""
    module = {"bm25": "bm25s", "openai": "httpx"}.get(name, "sentence_transformers")
    hint = "pip install 'kvbench[retrieval]'" if name == "bm25" else f"pip install {module.replace('_', '-')}"
    return (Package(module, "method.encoder", name, f"{hint}, or another method.encoder"),)


def check_name(name: str) -> None:
    """Raise ConfigError for a name that is neither known, nor a hub id (``org/model``), nor a folder."""
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,95}", name, flags=re.ASCII)
    if name not in NAMED and not hub_id and not (name and exists(name, "method.encoder") and os.path.isdir(name)):
        raise ConfigError(
            "method.encoder", name, "is not an encoder", allowed=[*NAMED, "ORG/MODEL or DIR of sentence-transformers"]
        )


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine similarity in double precision; 0 where a vector is zero."""
    norm = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
