"""Evaluations of a search in one file, a JSON line each, which a killed search goes on from and others may share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvbench.errors import KvbenchError
from kvbench.tune.measure import ChunkScore

#: incremented when the content changes its meaning
FORMAT = 1


class Evaluations:
    """The file of evaluations for one model, its texts and a machine; other processes may add to it meanwhile.

    Args:
        header: what the evaluations depend on; the file's first line.

    Raises:
        KvbenchError: the file is one of other evaluations, not one of kvbench's, or cannot be read or written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, {"kvbench": FORMAT, "kind": "tune", **header}
        self._lock = FileLock(f"{path}.lock")
        self._scores: dict[tuple[str, int], ChunkScore] = {}
        self._read = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                if path.exists():
                    self._update()  # refuses a file of others before a byte of it is changed
                self._mend()
                if not path.exists() or not path.stat().st_size:
                    path.write_bytes(_line(self.header))
        except OSError as error:
            raise _disk_error(path, error) from error
        self._update()

    def _mend(self) -> None:
        """Drop the last line if its writer was killed before its end; the lock is held.

        Raises:
            KvbenchError: it is the only line, and not the beginning of the header.
        """
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if not whole and not _line(self.header).startswith(content):
            raise self._foreign(content)
        if whole < len(content):
            with self.path.open("r+b") as handle:
                handle.truncate(whole)

    def _update(self) -> None:
        """Read what has been added to the file; an unfinished line is left for later."""
        with self.path.open("rb") as handle:
            handle.seek(self._read)
            content = handle.read()
        content = content[: content.rfind(b"\n") + 1]
        first = not self._read
        self._read += len(content)
        for line in content.splitlines():
            try:
                record = json.loads(line)
                if first:
                    self._check(record)
                else:
                    kl, top = (tuple(map(float, record[key])) for key in ("kl", "top"))
                    score = ChunkScore(kl, top, int(record["count"]))
                    self._scores[record["recipe"], int(record["chunk"])] = score
            except (ValueError, KeyError, TypeError) as error:
                raise self._foreign(line) from error
            first = False

    def _foreign(self, line: bytes) -> KvbenchError:
        return KvbenchError(
            f"{self.path}: a line is not an evaluation of kvbench.tune: {line[:80].decode(errors='replace')}\n"
            "  hint: remove the file, or choose another --out"
        )

    def _check(self, record: Any) -> None:
        if record == self.header:
            return
        keys = sorted(key for key in self.header if not isinstance(record, dict) or record.get(key) != self.header[key])
        raise KvbenchError(
            f"{self.path}: its evaluations differ from this search's in: {', '.join(keys)}\n"
            "  hint: choose another --out, or remove the file"
        )

    def __len__(self) -> int:
        return len(self._scores)

    def find(self, recipe: str, chunk: int) -> ChunkScore | None:
        """Return the score of a recipe (a value of ``method.layers``) on a batch of windows; None: not evaluated."""
        if (recipe, chunk) not in self._scores:
            self._update()
        return self._scores.get((recipe, chunk))

    def add(self, recipe: str, chunk: int, score: ChunkScore) -> None:
        """Append a score.

        Raises:
            KvbenchError: it cannot be written.
        """
        record = {"recipe": recipe, "chunk": chunk, "kl": score.kl, "top": score.top, "count": score.count}
        try:
            with self._lock:
                self._mend()
                with self.path.open("ab") as handle:
                    handle.write(_line(record))
                    handle.flush()
        except OSError as error:
            raise _disk_error(self.path, error) from error
        self._scores[recipe, chunk] = score


def _disk_error(path: Path, error: OSError) -> KvbenchError:
    return KvbenchError(
        f"{error.filename or path}: cannot be read or written: {error.strerror or error}.\n  hint: free some space, "
        "mend the folder's permissions or choose another --out; the same command goes on from what is on disk"
    )


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
