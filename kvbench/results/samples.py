"""`samples.jsonl`: one line per sample, appended and fsynced; reading it survives torn and damaged lines."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.util import atomic

Row = dict[str, Any]

#: a line without these is not a result
REQUIRED = {"id": str, "task": str, "prediction": str, "scores": dict, "scorer_version": int}


#: what differs from one time or machine to the next: times, peaks, the device; everything else is the run's output
MEASURED = "measured"


def outputs(row: Mapping[str, Any]) -> Row:
    """Return a row without times and peaks: equal in a resumed and in an undisturbed run."""
    return {key: value for key, value in row.items() if key != MEASURED}


_AGAIN = "start the same command again: it does only what is missing."
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class DiskError(KvbenchError):
    """A result could not be written (disk full, quota, I/O error); everything written before stays readable."""

    def __init__(self, path: Path, error: OSError) -> None:
        if error.errno == errno.ENOENT:
            super().__init__(
                f"{path}: cannot write: its folder was removed while the run went on.\n"
                "  hint: start the same command again; the samples that were in the folder are done anew."
            )
            return
        full = error.errno in _FULL
        problem = "no space left on the disk" if full else (error.strerror or str(error))
        hint = f"free some space (or set runtime.results_dir=DIR) and {_AGAIN}"
        if error.errno in _FORBIDDEN:
            hint = f"make it writable (or set runtime.results_dir=DIR) and {_AGAIN}"
        elif not full:
            hint = f"move it out of the way (or set runtime.results_dir=DIR) and {_AGAIN}"
        super().__init__(
            f"{path}: cannot write: {problem}.\n"
            "  Everything written before stays readable; only the sample in flight is lost.\n"
            f"  hint: {hint}"
        )


class UnreadableError(KvbenchError):
    """A file of results is there and cannot be read: a folder, a loop of links, no permission, an I/O error."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path}: cannot be read: {error.strerror or error}.\n"
            f"  hint: move it out of the way (or set runtime.results_dir=DIR) and {_AGAIN}"
        )


@dataclass
class Samples:
    """The content of `samples.jsonl`.

    Attributes:
        rows: sample id -> its last good row, in the order of the file.
        damaged: ``(line number, line, problem)`` of each line that is not a result; its sample is to be done again.
        torn: whether the last line was cut off in writing (a killed process); it is among `damaged`.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    damaged: list[tuple[int, bytes, str]] = field(default_factory=list)
    torn: bool = False


def read(path: Path) -> Samples:
    """Read every good row; a later row of the same sample replaces an earlier one (re-scoring appends).

    Raises:
        UnreadableError: there is something of that name that is no readable file.
    """
    samples = Samples()
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return samples
    except OSError as error:
        raise UnreadableError(path, error) from error
    lines = content.split(b"\n")
    tail = lines.pop()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except ValueError as error:
            samples.damaged.append((number, line, str(error)))
        else:
            samples.rows[row["id"]] = row
    if tail:
        samples.torn = True
        samples.damaged.append((len(lines) + 1, tail, "cut off in writing"))
    return samples


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows with one write, flushed and fsynced; on an error the file is cut back to where it was.

    Raises:
        DiskError: the rows could not be written; the file holds what it held before.
    """
    data = b"".join(encode(row) for row in rows)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiskError(path, error) from error
    try:
        before = os.fstat(descriptor).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError as error:
            with suppress(OSError):  # needs no space, so it works on a full disk; else the next reader skips the line
                os.ftruncate(descriptor, before)
            raise DiskError(path, error) from error
    finally:
        os.close(descriptor)


def repair(path: Path, samples: Samples) -> None:
    """Take damaged lines out of the file (they are kept beside it, in ``samples.damaged``).

    A torn last line must go before anything is appended, or it would swallow the next row.
    """
    aside = path.with_suffix(".damaged")
    with aside.open("ab") as handle:
        handle.writelines(line + b"\n" for _, line, _ in samples.damaged)
    write_atomically(path, b"".join(encode(row) for row in samples.rows.values()))


def encode(row: Mapping[str, Any]) -> bytes:
    """Return one line of JSON ending in its own CRC-32, which shows a flipped byte even if the JSON still parses."""
    body = json.dumps({k: v for k, v in row.items() if k != "crc"}, ensure_ascii=False, allow_nan=False)
    crc = zlib.crc32(body.encode("utf-8", "surrogatepass"))
    # a lone surrogate (half an emoji in a prediction) is no UTF-8: such a row is written with escapes
    if not _encodable(body):
        body = json.dumps({k: v for k, v in row.items() if k != "crc"}, ensure_ascii=True, allow_nan=False)
        crc = zlib.crc32(body.encode())
    return f'{body[:-1]}, "crc": "{crc:08x}"}}\n'.encode()


def decode(line: bytes) -> Row:
    """Return the row of one line.

    Raises:
        ValueError: no JSON, a key is missing, or the line was not written by :func:`encode`, or changed since.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError("not JSON") from error
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    crc = row.pop("crc", None)
    for key, kind in REQUIRED.items():
        if not isinstance(row.get(key), kind):
            raise ValueError(f"'{key}' is missing")
    if crc is None:  # numbers that somebody typed must not stand beside measured ones
        raise ValueError("no checksum, so it was written or edited by hand")
    body = line.rstrip()[: line.rstrip().rfind(b', "crc": ')] + b"}"
    if f"{zlib.crc32(body):08x}" != crc:
        raise ValueError("checksum differs")
    return row


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Raises:
        DiskError: nothing was changed.
    """
    try:
        atomic.write(path, data)
    except OSError as error:
        raise DiskError(path, error) from error


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
