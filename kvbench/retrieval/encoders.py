"""The encoders that ``method.encoder`` names, and loading of their weights.

An encoder whose weights or API key are missing is never replaced by another: the run stops with an error that names
overrides.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from kvbench.errors import ConfigError, ModelError
from kvbench.hub.repository import HubError, Repository
from kvbench.hub.transfer import Plan, amount, fetch, plan
from kvbench.retrieval.embedding import Embedding, EmbeddingStore, Encoder
from kvbench.retrieval.packaged import PACKAGES, source
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
NO_BM25S = "method.encoder=bm25 needs the package bm25s.\n  hint: run pip install 'kvbench[retrieval]'"
#: seconds that the hub may take to answer before it counts as out of reach
PROBE_SECONDS = 1.5


class BM25(Encoder):
    """Encoder that scores texts by keyword search: Lucene's variant of BM25 over lower-cased words.

    The package bm25s computes the scores.

    A word is a sequence of letters, digits and underscores. A single character is a word too, because keys in retrieval
    tasks may be single characters. In scripts without spaces between words, each character is a word, as in Lucene's
    standard analyzer.

    English stop words are left out, as in bm25s and Lucene's English analyzer. Otherwise the "is", "the" and "of" of a
    question would give any prose a higher score than a list of records. A key that consists of the letter "a" is
    therefore not found.
    """

    whole_words = True
    #: incremented when the words change; part of a run's identity (2: cut words whole, no stop words, Han by character)
    version: ClassVar[int] = 2

    def ready(self) -> None:
        """Raise ModelError unless bm25s is installed."""
        if find_spec("bm25s") is None:
            raise ModelError(NO_BM25S)

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the BM25 score of each text, in order; 0 for a text that contains no word of the query."""
        bm25s = import_bm25s()
        corpus = bm25s.tokenize(list(texts), stopwords="english", token_pattern=WORD, show_progress=False)
        words = bm25s.tokenize([query], stopwords="english", token_pattern=WORD, show_progress=False)
        if not any(len(ids) for ids in corpus.ids) or not words.ids[0]:
            return [0.0] * len(texts)
        index = bm25s.BM25(method="lucene")
        index.index(corpus, show_progress=False)
        names = {number: word for word, number in words.vocab.items()}
        return [float(s) for s in index.get_scores([names[i] for i in words.ids[0]])]


def import_bm25s() -> Any:
    """Return the module bm25s, imported so that JAX stays off the GPU. Raises ModelError if it is not installed."""
    before = os.environ.get("JAX_PLATFORMS")
    # where JAX is installed, bm25s calls it while it is imported (bm25s/selection.py), and on a GPU JAX takes three
    # quarters of the memory at its first call; it reads this variable when it is imported itself, and then never again
    first = "jax" not in sys.modules and "bm25s" not in sys.modules
    if first:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for a JAX that was imported before
    try:
        import bm25s

        return bm25s
    except ImportError as error:
        raise ModelError(NO_BM25S) from error
    finally:
        if first and before is None:
            del os.environ["JAX_PLATFORMS"]
        elif first:
            os.environ["JAX_PLATFORMS"] = str(before)


class SentenceTransformer(Embedding):
    """Encoder that uses a sentence-transformers model.

    Checkpoints without a pooling layer get mean pooling, which Contriever needs. `path` is the folder of the
    checkpoint, or its repository on the hub.
    """

    def __init__(self, name: str, path: str, store: EmbeddingStore) -> None:
        super().__init__(name, store)
        self.path = path
        self._model: Any = None

    def prepare(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return the query, then the texts. For LLM-Embedder, each string begins with the model's instruction."""
        if self.name != "llm_embedder":
            return super().prepare(query, texts)
        return [LLM_EMBEDDER["query"] + query, *(LLM_EMBEDDER["text"] + text for text in texts)]

    def ready(self) -> None:
        """Raise ModelError if there is no source of vectors.

        The sources are the weights on this machine, a hub that answers, and stored vectors of this encoder.
        """
        from huggingface_hub import try_to_load_from_cache

        if os.path.isdir(self.path) or isinstance(try_to_load_from_cache(self.path, "config.json"), str):
            return
        if not hub_answers() and not self.store.knows(self.name):
            raise cannot_load(self.name, self.path, "it is neither a folder nor in the hub's cache")

    def load(self) -> None:
        """Load the weights if they are not loaded yet. Raises ModelError if they are unavailable."""
        if self._model is None:
            self._model = load_sentence_transformer(self.path if "/" in self.name else self.name, self.path)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embedding vector of each text, in order, in fp32. Raises ModelError if there are no weights."""
        self.load()
        vectors = self._model.encode(list(texts), batch_size=self.batch, show_progress_bar=False)
        return [[float(x) for x in vector] for vector in vectors]


def load_sentence_transformer(name: str, path: str) -> Any:
    """Load a sentence-transformers model from a folder, the hub's cache or the hub; `name` is for messages.

    Raises:
        ModelError: the package is not installed, or the model is unavailable.
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
    """Return the error for an encoder whose weights cannot be loaded; its hint says what to use instead."""
    package = f"run python -m kvbench.fetch method=cocktail method.encoder={name}, " if name in PACKAGES else ""
    return ModelError(
        f"the encoder '{name}' ({path}) cannot be loaded ({reason}). Either its weights are not on this machine, "
        f"or the hub cannot be reached.\n  hint: {package}set method.encoder=bm25, which needs no weights, or "
        "method.encoder=DIR with a "
        "sentence-transformers model"
    )


def hub_answers() -> bool:
    """Return True if the hub's host accepts a connection within :data:`PROBE_SECONDS`; False in offline mode.

    Without this check, the hub's client would retry for a minute if there is no network.
    """
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
    """Return the encoder that ``method.encoder`` names; the same object for every call with the same name.

    Raises:
        ConfigError: `name` is neither one of :data:`NAMED`, nor a sentence-transformers model on the hub or a folder.
    """
    if name == "bm25":
        return BM25()
    store = EmbeddingStore.default()
    if name == "openai":
        return OpenAI(store)
    check_name(name)
    return SentenceTransformer(stored_name(name), source(name, HUB.get(name, name)), store)


def stored_name(name: str) -> str:
    """Return the name under which an encoder's vectors are stored.

    The name of a folder is extended by a digest of the sizes and modification times of its files, so that vectors of an
    earlier model in the same folder are not used.
    """
    if name in NAMED or not os.path.isdir(name):
        return name
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    seen = [f"{path.relative_to(name)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return f"{os.path.realpath(name)} {hashlib.sha256(chr(10).join(seen).encode()).hexdigest()[:16]}"


def packages(name: str) -> tuple[Package, ...]:
    """Return the Python packages that the encoder called `name` needs."""
    module = {"bm25": "bm25s", "openai": "httpx"}.get(name, "sentence_transformers")
    hint = "pip install 'kvbench[retrieval]'" if name == "bm25" else f"pip install {module.replace('_', '-')}"
    return (Package(module, "method.encoder", name, f"run {hint}, or choose another method.encoder"),)


def check_name(name: str) -> None:
    """Raise ConfigError unless a name is one of :data:`NAMED`, a repository on the hub (``ORG/MODEL``), or a folder."""
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,95}", name, flags=re.ASCII)
    if name not in NAMED and not hub_id and not (name and exists(name, "method.encoder") and os.path.isdir(name)):
        raise ConfigError(
            "method.encoder",
            name,
            "is not a known encoder",
            allowed=[*NAMED, "ORG/MODEL or DIR of a sentence-transformers model"],
        )


#: patterns of the files other than weights that sentence-transformers reads
_SMALL = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")


def fetch_weights(hub_id: str, announce: Callable[[Plan], None] = lambda files: None) -> Path:
    """Download the files of an encoder that the hub's cache does not have, and return the encoder's folder there.

    If a file is missing, `announce` is called before, with the files and their sizes.

    Raises:
        HubError: the hub cannot be reached, or does not provide the encoder.
    """
    repository = Repository(hub_id)
    files = plan(repository, wanted, "config.json")
    if files.missing:
        announce(files)
    return fetch(repository, files)


def wanted(files: Sequence[str]) -> list[str]:
    """Return the paths of the files that sentence-transformers needs from a repository.

    These are the weights (.safetensors, or .bin if there are none), the folders of layers after the model, such as
    ``1_Pooling``, and all small files, such as the configuration and the tokenizer.
    """
    top = [name for name in files if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")] or [n for n in top if n.endswith(".bin")]
    folders = [name for name in files if re.match(r"\d+_[^/]*/", name)]  # pooling and other layers behind the model
    return [*weights, *folders, *(name for name in top if any(fnmatch(name, pattern) for pattern in _SMALL))]


NO_KEY = "method.encoder=openai needs an API key.\n  hint: export OPENAI_API_KEY=KEY, or set method.encoder=bm25"
#: the endpoint of ``encoder=openai`` unless the environment names another
OPENAI_MODEL, OPENAI_URL = "text-embedding-ada-002", "https://api.openai.com/v1"


class OpenAI(Embedding):
    """Encoder that gets embedding vectors from OpenAI's API or a compatible server.

    Environment variables configure it: ``OPENAI_API_KEY``, which is never logged, ``OPENAI_BASE_URL`` for another
    server, and ``OPENAI_EMBEDDING_MODEL`` for a model other than ``text-embedding-ada-002``.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self.model, base = openai_endpoint()
        self.url = base + "/embeddings"
        super().__init__(f"openai/{self.model}" + ("" if base == OPENAI_URL else f" {base}"), store)

    def load(self) -> None:
        """Raise ModelError unless ``OPENAI_API_KEY`` is set. There are no weights to load."""
        if not os.environ.get("OPENAI_API_KEY"):
            raise ModelError(NO_KEY)

    def ready(self) -> None:
        """Raise ModelError if ``OPENAI_API_KEY`` is not set and no vectors of this encoder are stored."""
        if not os.environ.get("OPENAI_API_KEY") and not self.store.knows(self.name):
            raise ModelError(NO_KEY)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embedding vector of each text, in order.

        Raises:
            ModelError: no API key is set, or the endpoint does not return the vectors.
        """
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
    """Return the model name and the base URL for ``encoder=openai``, from environment variables or the defaults."""
    model = os.environ.get("OPENAI_EMBEDDING_MODEL") or OPENAI_MODEL
    return model, (os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
