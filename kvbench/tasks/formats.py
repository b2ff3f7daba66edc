"""Contents of files: bytes, text or records, unpacked, and never more of them than a limit.

A file of a few megabytes can unpack to more than a machine's memory, and a damaged one can be a single endless line. So
files are unpacked piece by piece, and reading ends with a message once a limit is passed. Two environment variables
raise the limits: :data:`MAX_FILE` and :data:`MAX_LINE`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvbench.errors import ConfigError, DataError
from kvbench.tasks.records import Kind, Record, check_record

#: most MiB that a file may have once unpacked
MAX_FILE = "KVBENCH_MAX_FILE_MB"
#: most MiB that a line of JSON may have
MAX_LINE = "KVBENCH_MAX_LINE_MB"
#: what holds where the variable is not set. The largest file of a known data set has 1.5 GB: Multi-LexSum's documents
DEFAULT_MB = {MAX_FILE: 2048, MAX_LINE: 64}

#: bytes that a record or line takes beside its texts, and a value of JSON that is read whole: they count as content
_RECORD, _VALUE = 512, 32
#: bytes that are unpacked at a time
_PIECE = 1 << 20
#: rows of a parquet file that are unpacked at a time: few, because all may point to one long text
_ROWS = 16
#: what reading a damaged or unreadable file may raise
_DAMAGE = (
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,
    IndexError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class Found:
    """A file on this machine, and the member of it where it is an archive."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}!{self.member}"

    def content(self) -> bytes:
        """Return the unpacked bytes.

        Raises:
            DataError: the file is damaged, cannot be read, or holds more than :data:`MAX_FILE`.
        """
        try:
            return b"".join(_pieces(self))
        except MemoryError as error:
            raise _no_memory(self) from error

    @property
    def ending(self) -> str:
        """Ending of the unpacked file: ``.jsonl``, ``.json``, ``.parquet``, ``.txt`` ..."""
        return Path((self.member or self.path.name).removesuffix(".gz")).suffix


def read_records(
    found: Found,
    fields: Iterable[str] | Mapping[str, Kind] = (),
    problem: Callable[[Record], str | None] | None = None,
) -> list[Record]:
    """Return the records of a file: JSON lines, a JSON list, CSV, or parquet.

    Args:
        found: where.
        fields: keys that every record must have; where it is a mapping, with the kind of their values, and nothing else
            of a record is kept.
        problem: says what is wrong with a record whose fields are right, or None.

    Raises:
        DataError: a damaged file, a line that is no JSON, a field that is missing or of another kind, no records.
    """
    records = []
    for place, record in placed_records(found):
        check_record(record, fields, place)
        if problem is not None and (reason := problem(record)):
            raise DataError(f"{place}: {reason}.")
        records.append({field: record[field] for field in fields} if isinstance(fields, Mapping) else record)
    return records


def placed_records(found: Found) -> Iterator[tuple[str, Record]]:
    """Yield each record after its place (file and line, or number from 0), as messages name it."""
    empty, most, total = True, limit(MAX_FILE), 0
    try:
        for place, record in _numbered(found):
            empty = False
            total += _RECORD
            if total > most:
                raise _too_large(found)
            if not isinstance(record, dict):
                raise DataError(f"{place}: is no object with fields but {type(record).__name__}.")
            yield place, record
    except MemoryError as error:
        raise _no_memory(found) from error
    if empty:
        raise DataError(f"{found} holds no records.\n  hint: fetch it again, or name another file")


def read_json(found: Found) -> Any:
    """Return a file as one JSON value."""
    try:
        return _whole(found.content(), found)
    except MemoryError as error:
        raise _no_memory(found) from error


def read_text(found: Found) -> str:
    """Return a file as UTF-8 text.

    Raises:
        DataError: a damaged file, another encoding, or NUL characters, which no text has.
    """
    text = _utf8(found.content(), str(found))
    if "\0" in text:
        raise DataError(f"{found} is no text: character {text.index(chr(0))} is NUL.\n  hint: fetch it again")
    return text


def is_file(path: Path, what: str) -> bool | None:
    """Return True for a file, False for a folder, None where nothing exists.

    Raises:
        DataError: it is neither (a fifo, a device), or cannot be looked at; `what` begins the message.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = str(path) if len(str(path)) < 200 else f"{str(path)[:100]}..."
        raise DataError(f"{what}{shown} cannot be read: {reason}.") from error
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return stat.S_ISREG(mode)
    kinds = {stat.S_IFIFO: "a fifo", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "something else")
    raise DataError(f"{what}{path} is no regular file but {kind}.\n  hint: write what it gives into a file")


def limit(name: str) -> int:
    """Return the bytes that :data:`MAX_FILE` or :data:`MAX_LINE` allow. Raises ConfigError for a malformed value."""
    value = os.environ.get(name, "")
    if not value:
        return DEFAULT_MB[name] << 20
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(name, value, "is no number of MiB", allowed="whole numbers from 1 on")
    return int(value) << 20


# -- bytes -----------------------------------------------------------------------------------------------------------


def _pieces(found: Found) -> Iterator[bytes]:
    """Yield the unpacked content, a piece at a time."""
    most = limit(MAX_FILE)
    try:
        if not is_file(found.path, ""):
            raise DataError(f"{found.path} is no file.")
        total = 0
        for piece in _unpacked(found, most):
            total += len(piece)
            if total > most:
                raise _too_large(found)
            yield piece
    except _DAMAGE as error:
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise DataError(f"{found} cannot be read: {reason or type(error).__name__}.\n  hint: fetch it again") from error


def _unpacked(found: Found, most: int) -> Iterator[bytes]:
    if found.member is not None:
        with zipfile.ZipFile(found.path) as archive:
            if archive.namelist().count(found.member) > 1:
                raise DataError(f"{found.path} has several members named {found.member}.\n  hint: keep one of them")
            if archive.getinfo(found.member).file_size > most:
                raise _too_large(found)
            with archive.open(found.member) as stream:
                yield from _read(stream)
    elif found.path.suffix == ".gz":
        with gzip.open(found.path) as stream:
            yield from _read(stream)
    else:
        with found.path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size > most:
                raise _too_large(found)
            yield from _read(stream)


def _read(stream: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while piece := stream.read(_PIECE):
        yield piece


def _too_large(found: Found) -> DataError:
    most = limit(MAX_FILE) >> 20
    return DataError(
        f"{found} holds more than {most} MiB once unpacked and parsed; more is not read.\n"
        f"  hint: {MAX_FILE}={4 * most} in the environment, if it is meant to be so large"
    )


def _no_memory(found: Found) -> DataError:
    return DataError(f"{found}: what it holds does not fit into memory.")


# -- formats ---------------------------------------------------------------------------------------------------------


def _numbered(found: Found) -> Iterator[tuple[str, Any]]:
    if found.ending == ".parquet":
        values: Iterable[Any] = _parquet(found)
    elif found.ending == ".json" and (content := found.content()).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        values = _whole(content, found)
    elif found.ending == ".csv":
        yield from _csv(found)
        return
    else:
        for number, line in enumerate(_lines(found), start=1):
            place = f"{found} line {number}"
            text = _utf8(line, place)
            if text.strip():
                yield place, _json(text, place)
        return
    for number, value in enumerate(values):
        yield f"{found} record {number}", value


def _lines(found: Found) -> Iterator[bytes]:
    """Yield the lines without their line feeds."""
    most, most_content = limit(MAX_LINE), limit(MAX_FILE)
    begun: list[bytes] = []
    size = number = 0
    for piece in _pieces(found):
        for place, part in enumerate(piece.split(b"\n")):
            if place:
                yield b"".join(begun)
                number += 1
                if number * _RECORD > most_content:  # blank lines take time
                    raise _too_large(found)
                begun, size = [], 0
            begun.append(part)
            size += len(part)
            if size > most:
                raise DataError(
                    f"{found} line {number + 1}: has more than {most >> 20} MiB; more is not read.\n"
                    f"  hint: {MAX_LINE}={4 * (most >> 20)} in the environment, if it is meant to be so long"
                )
    if begun:
        yield b"".join(begun)


def _utf8(content: bytes, place: str) -> str:
    """Return the text without the byte order mark that some editors write."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text: {error}.") from error


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DataError(f"{place}: JSON that is nested too deeply to be read.") from error
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error}).") from error


def _whole(content: bytes, found: Found) -> Any:
    """Parse a file that is one JSON value, unless it has far more values than bytes of text."""
    if _VALUE * sum(map(content.count, (b",", b"[", b"{"))) > limit(MAX_FILE):
        raise _too_large(found)
    return _json(_utf8(content, str(found)), str(found))


def _csv(found: Found) -> Iterator[tuple[str, Record]]:
    """Yield the rows below a line of names, each after its place; all values are texts."""
    before = csv.field_size_limit(limit(MAX_LINE))
    try:
        reader = csv.reader(io.StringIO(_utf8(found.content(), str(found)), newline=""), strict=True)
        names = next(reader, [])
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise DataError(f"{found} line 1: expected different names of columns: {', '.join(map(repr, names))}.")
        begin = reader.line_num + 1
        for row in reader:
            place, begin = f"{found} line {begin}", reader.line_num + 1
            if row and len(row) != len(names):
                raise DataError(f"{place}: has {len(row)} values for {len(names)} columns.")
            if row:
                yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{found} line {reader.line_num}: not CSV ({error}).") from error
    finally:
        csv.field_size_limit(before)


def _parquet(found: Found) -> Iterator[Record]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{found}: reading parquet needs pyarrow.\n  hint: pip install pyarrow") from error
    most, total = limit(MAX_FILE), 0
    content = io.BytesIO(found.content())
    try:
        file = parquet.ParquetFile(content, page_checksum_verification=True)
        for batch in file.iter_batches(batch_size=_ROWS, use_threads=False):
            for place, column in enumerate(batch.columns):
                if pyarrow.types.is_dictionary(column.type):
                    batch = batch.set_column(place, batch.schema.names[place], column.dictionary_decode())
            total += batch.nbytes
            if total > most:
                raise _too_large(found)
            yield from batch.to_pylist()
    except (*_DAMAGE, pyarrow.ArrowException, TypeError, OverflowError) as error:
        if isinstance(error, MemoryError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{found} cannot be read: {reason}.\n  hint: fetch it again") from error
