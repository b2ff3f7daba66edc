"""Encoders that score a context's chunks against a query.

Each gives one number per chunk; larger means more similar. No encoder is replaced silently: one whose weights or key
are missing stops the run with the override that helps.
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
from kvbench.hub.repository import HubError
from kvbench.hub.transfer import amount
from kvbench.retrieval.store import EmbeddingStore
from kvbench.retrieval.weights import fetch_weights
from kvbench.util.progress import say
from kvbench.util.requirements import Package, exists

#: names with a meaning; anything else is a sentence-transformers model, by hub id or folder
NAMED = ("contriever", "bm25", "llm_embedder", "minilm", "openai")
HUB = {
    "contriever": "facebook/contriever",
    "llm_embedder": "BAAI/llm-embedder",
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
}
#: instructions that LLM-Embedder expects before queries and documents (its question-answering task)
LLM_EMBEDDER = {
    "query": "Represent this query for retrieving relevant documents: ",
    "text": "Represent this document for retrieval: ",
}
#: Han, kana and their like: characters of scripts without spaces between words
UNSPACED = "\\u3040-\\u30ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\U00020000-\\U0003ffff"
#: a word of BM25
WORD = rf"(?u)[{UNSPACED}]|[^\W{UNSPACED}]+"
NO_KEY = "method.encoder=openai needs an API key.\n  hint: export OPENAI_API_KEY=KEY, or set method.encoder=bm25"
NO_BM25S = "method.encoder=bm25 needs the package bm25s.\n  hint: run pip install 'kvbench[retrieval]'"
#: the endpoint of ``encoder=openai`` unless the environment names another
OPENAI_MODEL, OPENAI_URL = "text-embedding-ada-002", "https://api.openai.com/v1"
#: seconds that the hub may take to answer before it counts as out of reach
PROBE_SECONDS = 1.5


class Encoder(ABC):
    """Scorer of texts against a query."""

    #: seconds that the searches so far would have taken in addition, had no vector been stored, less those that only
    #: the first search of a process takes (loading of weights)
    unspent_s: float = 0.0
    #: stored vectors used so far without a known encoding time on this machine
    uncharged: int = 0
    #: True if a text's first and last word must be whole: to a comparison of words, half a word is another word
    whole_words: ClassVar[bool] = False

    @abstractmethod
    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return one number for each text; larger means more similar."""

    @abstractmethod
    def ready(self) -> None:
        """Raise ModelError if weights, key or package are unavailable; load nothing."""


class BM25(Encoder):
    """BM25 in Lucene's variant over lower-cased words (bm25s); the raw score.

    A word is a run of letters, digits and underscores, a single one too (keys in retrieval tasks are often spelled in
    them); where a script writes words without spaces, each character is one, as in Lucene's standard analyzer. English
    stop words are left out, as in bm25s and Lucene's English analyzer: with the "is", "the" and "of" of a question,
    prose about nothing would rank before the records of a list. Of the letters alone, "a" is a stop word: where it is
    a key, it is not found.
    """

    whole_words = True
    #: incremented when the words change; part of a run's identity (2: cut words whole, no stop words, Han by character)
    version: ClassVar[int] = 2

    def ready(self) -> None:
        """Raise ModelError unless bm25s is installed."""
        if find_spec("bm25s") is None:
            raise ModelError(NO_BM25S)

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return BM25 scores; 0 for a text without a word of the query."""
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
    """Cosine similarity of embeddings (Cocktail, eq. 1), each text encoded once and stored.

    Args:
        name: identifier of the vectors in the store.
        store: vectors by (name, text).
    """

    batch = 64

    def __init__(self, name: str, store: EmbeddingStore) -> None:
        self.name, self.store = name, store

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vectors of texts."""

    def prepare(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return the query and the texts in the form that the encoder expects."""
        return [query, *texts]

    def load(self) -> None:
        """Load what :meth:`embed` needs, unless it is loaded; raise ModelError if that fails."""

    def machine(self) -> str:
        """Return the name of the machine that computes vectors; times are recorded per machine."""
        return machine()

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the cosine of the query's and each text's vector, in double precision.

        A text with a stored vector is encoded again if its encoding time on this machine is unknown.
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
            by_text = {**encoded, **by_text}  # stored vectors win, so that searches repeat to the bit
            self.store.put(self.name, {text: by_text[text] for text in part}, here, time.perf_counter() - started)
        self.unspent_s += sum(costs.values())
        vectors = [by_text[text] for text in wanted]
        return [cosine(vectors[0], vector) for vector in vectors[1:]]


class SentenceTransformer(Embedding):
    """Encoder from any sentence-transformers model; plain checkpoints get mean pooling, as Contriever needs.

    Args:
        name: name of the encoder in rows and in the store.
        path: folder or hub id of the checkpoint.
        store: embeddings computed before.
    """

    def __init__(self, name: str, path: str, store: EmbeddingStore) -> None:
        super().__init__(name, store)
        self.path = path
        self._model: Any = None

    def prepare(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return the texts, for LLM-Embedder with its instructions in front."""
        if self.name != "llm_embedder":
            return super().prepare(query, texts)
        return [LLM_EMBEDDER["query"] + query, *(LLM_EMBEDDER["text"] + text for text in texts)]

    def ready(self) -> None:
        """Raise ModelError if there are neither weights on disk, nor a hub that answers, nor stored vectors."""
        from huggingface_hub import try_to_load_from_cache

        if os.path.isdir(self.path) or isinstance(try_to_load_from_cache(self.path, "config.json"), str):
            return
        if not hub_answers() and not len(self.store):
            raise cannot_load(self.name, self.path, "it is neither a folder nor in the hub's cache")

    def load(self) -> None:
        """Load the weights, once."""
        if self._model is None:
            self._model = load_sentence_transformer(self.path if "/" in self.name else self.name, self.path)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vectors, fp32."""
        self.load()
        vectors = self._model.encode(list(texts), batch_size=self.batch, show_progress_bar=False)
        return [[float(x) for x in vector] for vector in vectors]


class OpenAI(Embedding):
    """OpenAI-compatible embeddings endpoint (``text-embedding-ada-002`` unless ``OPENAI_EMBEDDING_MODEL`` is set).

    ``OPENAI_API_KEY`` and, for other servers, ``OPENAI_BASE_URL`` come from the environment; the key is never logged.

    Args:
        store: embeddings computed before.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self.model, base = openai_endpoint()
        self.url = base + "/embeddings"
        super().__init__(f"openai/{self.model}" + ("" if base == OPENAI_URL else f" {base}"), store)

    def load(self) -> None:
        """Raise ModelError unless the environment has a key."""
        if not os.environ.get("OPENAI_API_KEY"):
            raise ModelError(NO_KEY)

    def ready(self) -> None:
        """Raise ModelError if there are neither a key nor stored vectors."""
        if not os.environ.get("OPENAI_API_KEY") and not len(self.store):
            raise ModelError(NO_KEY)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return vectors from the endpoint."""
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
                "  hint: check OPENAI_BASE_URL and OPENAI_API_KEY, or set method.encoder=bm25"
            ) from None
        return [item["embedding"] for item in sorted(answer.json()["data"], key=lambda item: item["index"])]


def openai_endpoint() -> tuple[str, str]:
    """Return model and base URL of ``encoder=openai``, from the environment."""
    model = os.environ.get("OPENAI_EMBEDDING_MODEL") or OPENAI_MODEL
    return model, (os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")


@lru_cache(maxsize=1)
def machine() -> str:
    """Return processor, number of threads and GPU: all that determines an encoder's speed."""
    import torch

    from kvbench.profiling.device import device_name
    from kvbench.results.environment import cpu_name

    gpu = device_name("cuda:0") if torch.cuda.is_available() else "no GPU"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {gpu}"


def load_sentence_transformer(name: str, path: str) -> Any:
    """Load the model from disk or the hub's cache, or from the hub if it answers.

    Raises:
        ModelError: the model is unavailable; the message names the overrides that help.
    """
    try:
        import sentence_transformers
    except ImportError as error:
        raise ModelError(
            f"method.encoder={name} needs the package sentence-transformers.\n"
            "  hint: run pip install sentence-transformers, or set method.encoder=bm25"
        ) from error
    try:
        return sentence_transformers.SentenceTransformer(path, local_files_only=True)
    except Exception as error:
        reason: Exception = error
    if not os.path.isdir(path) and hub_answers():
        try:
            fetch_weights(path, lambda files: say(f"encoder {name}: {amount(files.missing_bytes)} to download"))
            return sentence_transformers.SentenceTransformer(path, local_files_only=True)
        except HubError as error:
            raise cannot_load(name, path, error.reason) from error
        except Exception as error:
            reason = error
    raise cannot_load(name, path, type(reason).__name__) from reason


def cannot_load(name: str, path: str, reason: str) -> ModelError:
    """Return the error for missing weights, with the overrides that help."""
    return ModelError(
        f"the encoder '{name}' ({path}) cannot be loaded ({reason}). Either its weights are not on this machine, "
        "or the hub cannot be reached.\n  hint: set method.encoder=bm25, which needs no weights, or "
        "method.encoder=DIR with a "
        "sentence-transformers model"
    )


def hub_answers() -> bool:
    """Return True if the hub's host accepts a connection at once (the client would retry for a minute)."""
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

    thread = threading.Thread(target=probe, daemon=True)  # name resolution has no timeout
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answered)


@lru_cache(maxsize=8)
def encoder(name: str) -> Encoder:
    """Return the encoder of that name (:data:`NAMED`, or a sentence-transformers id or folder), one per process.

    Raises:
        ConfigError: `name` is neither known nor a model's id or folder.
    """
    if name == "bm25":
        return BM25()
    store = EmbeddingStore.default()
    if name == "openai":
        return OpenAI(store)
    check_name(name)
    return SentenceTransformer(stored_name(name), HUB.get(name, name), store)


def stored_name(name: str) -> str:
    """Return the name under which vectors are stored; for a folder it depends on the files, which training changes."""
    if name in NAMED or not os.path.isdir(name):
        return name
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    seen = [f"{path.relative_to(name)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return f"{os.path.realpath(name)} {hashlib.sha256(chr(10).join(seen).encode()).hexdigest()[:16]}"


def packages(name: str) -> tuple[Package, ...]:
    """Return the packages that the encoder of that name needs."""
    module = {"bm25": "bm25s", "openai": "httpx"}.get(name, "sentence_transformers")
    hint = "pip install 'kvbench[retrieval]'" if name == "bm25" else f"pip install {module.replace('_', '-')}"
    return (Package(module, "method.encoder", name, f"run {hint}, or choose another method.encoder"),)


def check_name(name: str) -> None:
    """Raise ConfigError for a name that is neither known, nor a hub id (``org/model``), nor a folder."""
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,95}", name, flags=re.ASCII)
    if name not in NAMED and not hub_id and not (name and exists(name, "method.encoder") and os.path.isdir(name)):
        raise ConfigError(
            "method.encoder",
            name,
            "is not a known encoder",
            allowed=[*NAMED, "ORG/MODEL or DIR of a sentence-transformers model"],
        )


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine similarity in double precision; 0 if a vector is zero."""
    norm = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
