"""Base classes of encoders, which score the similarity of a context's chunks to a query, and a store of vectors.

Vectors are stored by encoder and text, so that a sweep over thresholds encodes each text only once.

The store also records how long the encoding of each text took on each machine. A search that uses a stored vector adds
this time to its own, so that its reported time is that of a search without the store.
"""

from __future__ import annotations

import array
import hashlib
import math
import os
import sqlite3
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from kvbench.errors import ModelError

#: name under which vectors are recorded that were stored before names were
ANY = "*"


class EmbeddingStore:
    """Store of embedding vectors in an SQLite file, which several processes may use at the same time.

    If the file cannot be opened or created, or `path` is None, the vectors are kept in memory instead.
    """

    def __init__(self, path: Path | None) -> None:
        target = ":memory:"
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                target = str(path)
            except OSError:
                target = ":memory:"
        try:
            self._db = self._open(target)
        except sqlite3.Error:  # a damaged file or a read-only folder costs time, not the run
            self._db = self._open(":memory:")
        weakref.finalize(self, _close, self._db)

    @staticmethod
    def _open(target: str) -> sqlite3.Connection:
        db = sqlite3.connect(target, timeout=30)
        db.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB NOT NULL)")
        columns = "key BLOB, machine TEXT, seconds REAL NOT NULL, PRIMARY KEY (key, machine)"
        with suppress(sqlite3.Error):  # a read-only file from before costs or names were recorded
            db.execute(f"CREATE TABLE IF NOT EXISTS costs ({columns})")
            db.execute("CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY)")
        db.commit()
        return db

    @classmethod
    def default(cls) -> EmbeddingStore:
        """Open this user's store, the file `embeddings.sqlite` in kvbench's cache folder.

        The environment variable ``KVBENCH_CACHE`` names that folder; without it, it is `kvbench` in the user's cache
        folder.
        """
        root = os.environ.get("KVBENCH_CACHE") or os.path.join(
            os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "kvbench"
        )
        return cls(Path(root) / "embeddings.sqlite")

    def get(self, name: str, texts: Sequence[str]) -> dict[str, list[float]]:
        """Return the vectors, in fp32, that are stored for texts as the encoder `name` encoded them.

        The result lacks texts whose vector is not stored or is damaged.
        """
        vectors = {}
        for text in set(texts):
            try:
                row = self._db.execute("SELECT vector FROM vectors WHERE key = ?", (_text_key(name, text),)).fetchone()
                vector = array.array("f")
                vector.frombytes(row[0] if row else b"")
            except (sqlite3.Error, ValueError, TypeError):
                continue
            if vector and all(map(math.isfinite, vector)):
                vectors[text] = list(vector)
        return vectors

    def knows(self, name: str) -> bool:
        """Return True if vectors of the encoder `name` are stored.

        A store that was made before names were recorded may have vectors of any encoder, so it knows every name.
        """
        try:
            names = {row[0] for row in self._db.execute("SELECT name FROM names")}
        except sqlite3.Error:
            names = set()
        if names:
            return name in names or ANY in names
        try:
            return self._db.execute("SELECT 1 FROM vectors LIMIT 1").fetchone() is not None
        except sqlite3.Error:
            return False

    def costs(self, name: str, texts: Sequence[str], machine: str) -> dict[str, float]:
        """Return how many seconds an encoder took to encode each text on a machine, as far as they were timed there."""
        seconds = {}
        for text in set(texts):
            try:
                row = self._db.execute(
                    "SELECT seconds FROM costs WHERE key = ? AND machine = ?", (_text_key(name, text), machine)
                ).fetchone()
            except sqlite3.Error:
                continue
            if row and isinstance(row[0], float) and 0 <= row[0] < math.inf:
                seconds[text] = row[0]
        return seconds

    def put(self, name: str, vectors: Mapping[str, Sequence[float]], machine: str, seconds: float) -> None:
        """Store the vectors of texts that were encoded together, and an equal share of the time that this took."""
        rows = [(_text_key(name, text), array.array("f", vector).tobytes()) for text, vector in vectors.items()]
        seconds_each = seconds / max(len(rows), 1)
        costs = [(key, machine, seconds_each) for key, _ in rows]
        try:
            old = self.knows(ANY)  # vectors whose encoder is not recorded
            self._db.executemany("INSERT OR IGNORE INTO names VALUES (?)", [(name,), *([(ANY,)] if old else [])])
            self._db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)
            self._db.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?, ?)", costs)
            self._db.commit()
        except sqlite3.Error:
            self._db.rollback()  # a full disk: the vectors are used, but not stored


def _text_key(name: str, text: str) -> bytes:
    return hashlib.sha256(f"{name}\0{text}".encode()).digest()


def _close(db: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):  # another thread may have collected the store
        db.close()


class Encoder(ABC):
    """Base class of encoders. An encoder scores how similar texts are to a query."""

    #: seconds that the searches so far would have taken in addition, had no vector been stored, less those that only
    #: the first search of a process takes (loading of weights)
    unspent_s: float = 0.0
    #: stored vectors used so far without a known encoding time on this machine
    uncharged: int = 0
    #: True if a text's first and last word must be whole: to a comparison of words, half a word is another word
    whole_words: ClassVar[bool] = False

    @abstractmethod
    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the similarity of each text to the query, in the order of the texts; larger means more similar."""

    @abstractmethod
    def ready(self) -> None:
        """Raise ModelError if the encoder lacks what it needs: weights, an API key or a package. Nothing is loaded."""


class Embedding(Encoder):
    """Base class of encoders that score a text by the cosine similarity of embedding vectors (Cocktail, eq. 1).

    Vectors are stored under the encoder's name and used again, by later processes too.
    """

    batch = 64

    def __init__(self, name: str, store: EmbeddingStore) -> None:
        self.name, self.store = name, store

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embedding vector of each text, in order. Raises ModelError if the texts cannot be encoded."""

    def prepare(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return the strings to encode, the query first, with the instructions that the encoder expects before them."""
        return [query, *texts]

    def load(self) -> None:
        """Prepare for :meth:`embed`: load the weights, or check the API key. Raises ModelError if they are missing."""

    def machine(self) -> str:
        """Return a description of this machine; encoding times are stored under it (:meth:`EmbeddingStore.costs`)."""
        return machine()

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the cosine similarity of each text to the query, in the order of the texts, in double precision.

        Texts without a stored vector are encoded. A text with a stored vector is encoded again only if its encoding
        time on this machine is unknown, because the reported time of a search includes it; even then, the stored vector
        is used.

        Raises:
            ModelError: a vector is not stored, and the text cannot be encoded.
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


@lru_cache(maxsize=1)
def machine() -> str:
    """Return the hardware that decides an encoder's speed, as text: processor, number of torch threads, and GPU."""
    import torch

    from kvbench.profiling.device import device_name
    from kvbench.results.environment import cpu_name

    gpu = device_name("cuda:0") if torch.cuda.is_available() else "no GPU"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {gpu}"


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine similarity of two vectors in double precision; 0 if one of them is zero."""
    norm = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
