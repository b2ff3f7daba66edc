"""Parsers of data files: JSON lines, a JSON list, CSV, parquet and plain text. Errors name the file and the line.

A damaged file can be a single endless line, and a small file can hold more values than fit into memory. Reading
therefore stops with an error when a limit of :mod:`kvbench.tasks.files` is exceeded.

Parquet files are read by the package `datasets` (Lhoest et al. 2021), the shards of a split one after the other. It is
imported on first use, because this takes seconds. As used here, it neither writes to its own cache nor uses the
network.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbench.errors import DataError
from kvbench.tasks.files import DAMAGE, MAX_FILE, MAX_LINE, Found, limit, no_memory, pieces, too_large, utf8
from kvbench.tasks.records import Kind, Record, check_record

#: estimated bytes of memory that count towards the limit: of a record or line, and of a value in a JSON file
_RECORD, _VALUE = 512, 32


def read_records(
    file: Found,
    fields: Iterable[str] | Mapping[str, Kind] = (),
    problem: Callable[[Record], str | None] | None = None,
) -> list[Record]:
    """Return the records of a file: JSON lines, a JSON list, CSV, or parquet.

    Args:
        fields: names of the fields that every record must have. If this is a mapping from names to kinds of values, the
            values are checked too, and the returned records contain only these fields.
        problem: an additional check: it returns what is wrong with a record, or None.

    Raises:
        DataError: the file is damaged or has no records, or a record is malformed or fails a check.
    """
    records = []
    for place, record in placed_records(file):
        check_record(record, fields, place)
        if problem is not None and (reason := problem(record)):
            raise DataError(f"{place}: {reason}.")
        records.append({field: record[field] for field in fields} if isinstance(fields, Mapping) else record)
    return records


def placed_records(file: Found) -> Iterator[tuple[str, Record]]:
    """Yield all records of a file as pairs ``(place, record)``.

    The place is a text for error messages: the file with the number of the line, or with the number of the record,
    counted from 0.

    Raises:
        DataError: the file is damaged, too large or without records, or a record is malformed.
    """
    empty, most, total = True, limit(MAX_FILE), 0
    try:
        for place, record in _numbered(file):
            empty = False
            total += _RECORD
            if total > most:
                raise too_large(file)
            if not isinstance(record, dict):
                raise DataError(f"{place}: expected a JSON object, not {type(record).__name__}.")
            yield place, record
    except MemoryError as error:
        raise no_memory(file) from error
    if empty:
        raise DataError(f"{file} contains no records.\n  hint: download the file again, or name another one")


def read_json(file: Found) -> Any:
    """Return the content of a file that is one JSON value. Raises DataError if it is damaged, too large or not JSON."""
    try:
        return _whole_json(file.content(), file)
    except MemoryError as error:
        raise no_memory(file) from error


def read_text(file: Found) -> str:
    """Return the content of a text file.

    Raises:
        DataError: the file is damaged, too large, not UTF-8, or contains a NUL character, so that it must be binary.
    """
    text = utf8(file.content(), str(file))
    if "\0" in text:
        raise DataError(
            f"{file} is not a text file: character {text.index(chr(0))} is NUL.\n  hint: download the file again"
        )
    return text


def _numbered(file: Found) -> Iterator[tuple[str, Any]]:
    if file.more and file.ending != ".parquet":
        for part in file.each():
            yield from _numbered(part)
        return
    if file.ending == ".parquet":
        values: Iterable[Any] = parquet_records(file)
    elif file.ending == ".json" and (content := file.content()).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        values = _whole_json(content, file)
    elif file.ending == ".csv":
        yield from _csv(file)
        return
    else:
        for number, line in enumerate(_record_lines(file), start=1):
            place = f"{file} line {number}"
            text = utf8(line, place)
            if text.strip():
                yield place, _json(text, place)
        return
    for number, value in enumerate(values):
        yield f"{file} record {number}", value


def _record_lines(file: Found) -> Iterator[bytes]:
    """Yield the lines without their line feeds. Raises DataError if a line or their number exceeds its limit."""
    most, most_content = limit(MAX_LINE), limit(MAX_FILE)
    begun: list[bytes] = []
    size = number = 0
    for piece in pieces(file):
        for place, part in enumerate(piece.split(b"\n")):
            if place:
                yield b"".join(begun)
                number += 1
                if number * _RECORD > most_content:  # blank lines take time
                    raise too_large(file)
                begun, size = [], 0
            begun.append(part)
            size += len(part)
            if size > most:
                raise DataError(
                    f"{file} line {number + 1}: the line exceeds the limit of {most >> 20} MiB.\n"
                    f"  hint: if the line is meant to be that long, set {MAX_LINE}={4 * (most >> 20)} "
                    "in the environment"
                )
    if begun:
        yield b"".join(begun)


def _json(text: str, place: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        DataError: the text is not JSON, or has NaN or Infinity, which Python's parser takes although JSON has no such
            numbers.
    """
    odd: list[str] = []

    def constant(name: str) -> float:
        odd.append(name)
        return math.nan

    try:
        value = json.loads(text, parse_constant=constant)
    except RecursionError as error:
        raise DataError(f"{place}: the JSON is nested too deeply.") from error
    except ValueError as error:
        raise DataError(f"{place}: is not valid JSON ({error}).") from error
    if odd:
        raise DataError(
            f"{place}: field '{_first_nan(value)}' is {odd[0]}, which is no value of JSON.\n"
            "  hint: write a number, a text or null, or leave the field out"
        )
    return value


def _first_nan(value: Any) -> str | None:
    """Return the dotted name of the first NaN in a JSON value, in the order of the text; None if there is none."""
    if isinstance(value, float):
        return "" if math.isnan(value) else None
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        if (inner := _first_nan(entry)) is not None:
            return f"{name}.{inner}".rstrip(".")
    return None


def _whole_json(content: bytes, file: Found) -> Any:
    """Parse content that is one JSON value. Raises DataError if it has more values than the limit allows."""
    if _VALUE * sum(map(content.count, (b",", b"[", b"{"))) > limit(MAX_FILE):
        raise too_large(file)
    return _json(utf8(content, str(file)), str(file))


def _csv(file: Found) -> Iterator[tuple[str, Record]]:
    """Yield each row with its place; the first line holds the names of the columns, and all values are texts."""
    before = csv.field_size_limit(limit(MAX_LINE))
    try:
        reader = csv.reader(io.StringIO(utf8(file.content(), str(file)), newline=""), strict=True)
        names = next(reader, [])
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise DataError(f"{file} line 1: a column name occurs twice or is empty: {', '.join(map(repr, names))}.")
        begin = reader.line_num + 1
        for row in reader:
            place, begin = f"{file} line {begin}", reader.line_num + 1
            if row and len(row) != len(names):
                raise DataError(f"{place}: the row has {len(row)} values for {len(names)} columns.")
            if row:
                yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{file} line {reader.line_num}: is not valid CSV ({error}).") from error
    finally:
        csv.field_size_limit(before)


#: number of rows unpacked at a time: few, because all of them may refer to the same long text
_ROWS = 16


def parquet_records(file: Found) -> Iterator[Record]:
    """Yield the rows of a parquet file, or of all shards of a split in order, as dicts.

    The files may be gzipped or inside an archive.

    Raises:
        DataError: the package `datasets` is not installed, a shard cannot be read, the shards have different columns,
            or the rows together take more memory than :data:`kvbench.tasks.files.MAX_FILE`.
    """
    try:
        import datasets
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.dataset  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{file}: reading parquet needs {error.name}.\n  hint: pip install datasets") from error
    most, total = limit(MAX_FILE), 0
    try:
        with tempfile.TemporaryDirectory() as folder, silenced(), _on_disk(file, Path(folder)) as files:
            stream = datasets.load_dataset(
                "parquet",
                data_files={"rows": [glob.escape(str(path)) for path in files]},
                split="rows",
                streaming=True,
                cache_dir=folder,
                batch_size=_ROWS,
                fragment_scan_options=pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True),
            )
            for batch in stream.with_format("arrow").iter(batch_size=_ROWS):
                total += batch.nbytes
                if total > most:
                    raise too_large(file)
                yield from batch.to_pylist()
    except (*DAMAGE, pyarrow.ArrowException, TypeError, OverflowError) as error:
        if isinstance(error, MemoryError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file} cannot be read: {reason}.\n  hint: download the file again") from error


@contextmanager
def _on_disk(file: Found, folder: Path) -> Iterator[list[Path]]:
    """Yield the paths of the shards; a member of an archive and a gzipped file are unpacked into `folder`.

    Raises:
        DataError: a file is missing or not regular, cannot be unpacked, or is larger than the limit.
    """
    files = []
    for number, part in enumerate(file.each()):
        if part.member is None and part.path.suffix != ".gz":
            part.check()
            files.append(part.path.absolute())
        else:
            unpacked = folder / f"{number}.parquet"
            unpacked.write_bytes(part.content())
            files.append(unpacked)
    yield files


@contextmanager
def silenced() -> Iterator[None]:
    """Stop the package `datasets` from logging and from reporting its use, inside a ``with`` block.

    Without this, `datasets` sends a report of each use over the network, for which it may wait up to three seconds. Its
    exceptions are raised as usual.
    """
    from datasets import config
    from datasets.utils import logging

    level, counts = logging.get_verbosity(), config.HF_UPDATE_DOWNLOAD_COUNTS
    logging.set_verbosity(logging.CRITICAL)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        logging.set_verbosity(level)
        config.HF_UPDATE_DOWNLOAD_COUNTS = counts
