"""Store of embedding vectors by encoder and text, so that a sweep over thresholds encodes each text only once.

The store also records how long the encoding of each text took on each machine. A search that uses a stored vector adds
this time to its own, so that its reported time is that of a search without the store.
"""

from __future__ import annotations

import array
import hashlib
import math
import os
import sqlite3
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

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

        Texts whose vector is not stored or is damaged are missing.
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
