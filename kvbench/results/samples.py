"""`samples.jsonl`, a file with one line per sample. Reading skips lines that are damaged or incomplete."""

from __future__ import annotations

import base64
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
from kvbench.results.packed import packed_row, unpacked_row
from kvbench.util import atomic

Row = dict[str, Any]

#: keys that every row must have, with their types
REQUIRED = {"id": str, "task": str, "prediction": str, "scores": dict, "scorer_version": int}


#: key of a row for what varies between repetitions and machines: times, memory peaks, device
MEASURED = "measured"


def outputs(row: Mapping[str, Any]) -> Row:
    """Return the part of a row that a repetition must reproduce: all except times, memory peaks and device.

    It includes the prediction and the scores, which do not depend on whether the run was interrupted and resumed.
    """
    return {key: value for key, value in row.items() if key != MEASURED}


#: beginning of the sealed prediction of a private sample
_SEAL = "sealed:"


def sealed(text: str) -> str:
    """Return a text in a form that cannot be read or searched as plain text, for answers to private samples.

    Some data sets ask that their questions appear nowhere in plain text, and answers repeat questions. Equal texts have
    equal seals. It is no encryption: :func:`unsealed` undoes it.
    """
    return _SEAL + base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode()


def unsealed(text: str) -> str:
    """Return the text that :func:`sealed` was given; a text that is not sealed is returned unchanged."""
    if not text.startswith(_SEAL):
        return text
    try:
        return zlib.decompress(base64.b64decode(text.removeprefix(_SEAL))).decode("utf-8", "surrogatepass")
    except (ValueError, zlib.error):  # an answer that begins with this word
        return text


_AGAIN = "run the same command again; it runs only the missing samples."
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class DiskError(KvbenchError):
    """Error raised if a result cannot be written, for example because the disk is full; earlier results stay."""

    def __init__(self, path: Path, error: OSError) -> None:
        if error.errno == errno.ENOENT:
            super().__init__(
                f"{path}: cannot be written, because its folder was removed during the run.\n"
                "  hint: run the same command again; it repeats the samples of the removed folder."
            )
            return
        full = error.errno in _FULL
        problem = "no space left on the disk" if full else (error.strerror or str(error))
        hint = f"free some space (or set runtime.results_dir=DIR) and {_AGAIN}"
        if error.errno in _FORBIDDEN:
            hint = f"make the file writable (or set runtime.results_dir=DIR) and {_AGAIN}"
        elif not full:
            hint = f"move the file away (or set runtime.results_dir=DIR) and {_AGAIN}"
        super().__init__(
            f"{path}: cannot be written: {problem}.\n"
            "  Earlier results are still on disk; only the unfinished sample is lost.\n"
            f"  hint: {hint}"
        )


class UnreadableError(KvbenchError):
    """Error raised if a results file exists but cannot be read, for example for lack of permission."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path}: cannot be read: {error.strerror or error}.\n"
            f"  hint: move the file away (or set runtime.results_dir=DIR) and {_AGAIN}"
        )


@dataclass
class StoredSamples:
    """The rows of a `samples.jsonl`, and the lines of it that are damaged.

    Attributes:
        rows: the last valid row of each sample, by sample id, in the order of the file.
        damaged: line number, content and defect of each invalid line. Unless the sample has another, valid line, it has
            to be run again.
        torn: True if the last line is incomplete, because its writer was killed. It is then also in `damaged`.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    damaged: list[tuple[int, bytes, str]] = field(default_factory=list)
    torn: bool = False


def read_samples(path: Path) -> StoredSamples:
    """Read a `samples.jsonl`, skipping damaged lines; a file that does not exist has no rows.

    If a sample has several rows, the last one counts: scoring a stored prediction again appends a row.

    Raises:
        UnreadableError: `path` exists but is not a readable file.
    """
    samples = StoredSamples()
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
            row = decode_row(line)
        except ValueError as error:
            samples.damaged.append((number, line, str(error)))
        else:
            samples.rows[row["id"]] = row
    if tail:
        samples.torn = True
        samples.damaged.append((len(lines) + 1, tail, "incomplete line"))
    return samples


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a `samples.jsonl`, encoded by :func:`encode_row`. See :func:`append_bytes`."""
    append_bytes(path, b"".join(encode_row(row) for row in rows))


def append_bytes(path: Path, data: bytes) -> None:
    """Append encoded rows to a `samples.jsonl`, which is created if need be, and wait until they are on disk (fsync).

    Raises:
        DiskError: the rows could not be written; the file is unchanged.
    """
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
            with suppress(OSError):  # works on a full disk; if it fails, readers skip the incomplete line
                os.ftruncate(descriptor, before)
            raise DiskError(path, error) from error
    finally:
        os.close(descriptor)


def repair(path: Path, samples: StoredSamples) -> None:
    """Move the damaged lines that :func:`read_samples` found in a file to another one with the suffix ``.damaged``.

    Do this before appending to a file whose last line is incomplete; otherwise the new row would continue that line.
    The file is rewritten with one row per sample.
    """
    aside = path.with_suffix(".damaged")
    with aside.open("ab") as handle:
        handle.writelines(line + b"\n" for _, line, _ in samples.damaged)
    write_atomically(path, b"".join(encode_row(row) for row in samples.rows.values()))


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Encode a row as a line of `samples.jsonl`: JSON whose last key, ``crc``, is a checksum of the rest (CRC-32).

    The checksum reveals edits and damage that leave the JSON valid. Long lists of ``fidelity`` are packed
    (:mod:`kvbench.results.packed`).
    """
    row = packed_row({k: v for k, v in row.items() if k != "crc"})
    body = json.dumps(row, ensure_ascii=False, allow_nan=False)
    crc = zlib.crc32(body.encode("utf-8", "surrogatepass"))
    # a lone surrogate (half an emoji in a prediction) has no UTF-8 encoding: such a row is written with escapes
    if not _encodable(body):
        body = json.dumps(row, ensure_ascii=True, allow_nan=False)
        crc = zlib.crc32(body.encode())
    return f'{body[:-1]}, "crc": "{crc:08x}"}}\n'.encode()


def decode_row(line: bytes) -> Row:
    """Decode one line of `samples.jsonl` after verifying its checksum; return the row without it.

    Raises:
        ValueError: the line is not JSON, a required key is missing, or the checksum is missing or wrong (the line was
            edited, or not written by :func:`encode_row`).
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError("it is not valid JSON") from error
    except RecursionError:
        raise ValueError("the sample's JSON is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    crc = row.pop("crc", None)
    for key, kind in REQUIRED.items():
        if not isinstance(row.get(key), kind):
            raise ValueError(f"'{key}' is missing")
    if crc is None:  # hand-written numbers must not be mixed with measured ones
        raise ValueError("it has no checksum, so it was written or edited by hand")
    # the bytes that were hashed: JSON written anew might differ from them
    body = line.rstrip()[: line.rstrip().rfind(b', "crc": ')] + b"}"
    if f"{zlib.crc32(body):08x}" != crc:
        raise ValueError("its checksum is wrong")
    return unpacked_row(row)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the complete old or the complete new content.

    Raises:
        DiskError: the file could not be written; the old one is unchanged.
    """
    try:
        atomic.replace_file(path, data)
    except OSError as error:
        raise DiskError(path, error) from error


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
