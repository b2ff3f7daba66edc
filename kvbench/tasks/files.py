"""Reading of files, plain, gzipped or inside an archive, up to a limit on their unpacked size.

The limits exist because a file of a few megabytes can unpack to more than a machine's memory. Two environment variables
change them: :data:`MAX_FILE` and :data:`MAX_LINE`.
"""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvbench.errors import ConfigError, DataError

#: environment variable: maximum size of an unpacked file, in MiB
MAX_FILE = "KVBENCH_MAX_FILE_MB"
#: environment variable: maximum size of a line of JSON, in MiB
MAX_LINE = "KVBENCH_MAX_LINE_MB"
#: limits if the variables are not set. The largest file of a known data set has 1.5 GB: Multi-LexSum's documents
DEFAULT_MB = {MAX_FILE: 2048, MAX_LINE: 64}

#: number of bytes unpacked at a time
_PIECE = 1 << 20
#: exceptions that reading a damaged or unreadable file may raise
DAMAGE = (
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
    """A data file on this machine: a plain file, a member of an archive, or a file that is split into shards.

    Args:
        path: the file, the archive, or the first shard.
        member: name of the member in the archive; None if `path` is not an archive.
        more: the other shards, in order.
    """

    path: Path
    member: str | None = None
    more: tuple[Path, ...] = ()

    def __str__(self) -> str:
        if self.more:
            return f"{self.path} and {len(self.more)} more"
        return str(self.path) if self.member is None else f"{self.path}!{self.member}"

    def each(self) -> tuple[Found, ...]:
        """Return each shard as an object of its own, in order; a file that is not split is returned as the only one."""
        return tuple(Found(path, self.member) for path in (self.path, *self.more))

    def check(self) -> None:
        """Raise DataError unless `path` is a regular file whose size on disk is within the limit :data:`MAX_FILE`."""
        try:
            if not is_file(self.path, ""):
                raise DataError(f"{self.path} is not a file.\n  hint: name a file, not a folder")
            if self.path.stat().st_size > limit(MAX_FILE):
                raise too_large(self)
        except OSError as error:
            raise DataError(f"{self} cannot be read: {error}.\n  hint: download the file again") from error

    def content(self) -> bytes:
        """Return the whole content of the file, unpacked.

        Raises:
            DataError: as for :func:`pieces`, or the content does not fit into memory.
        """
        try:
            return b"".join(pieces(self))
        except MemoryError as error:
            raise no_memory(self) from error

    @property
    def ending(self) -> str:
        """Ending of the file's name without ``.gz``: ``.jsonl``, ``.json``, ``.parquet``, ``.txt`` ..."""
        return Path((self.member or self.path.name).removesuffix(".gz")).suffix


def is_file(path: Path, what: str) -> bool | None:
    """Return True if `path` is a file, False if it is a folder, and None if it does not exist.

    Error messages begin with `what`, before the path.

    Raises:
        DataError: `path` is not accessible, or is neither a file nor a folder but, for example, a fifo or a device.
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
    raise DataError(f"{what}{path} is {kind}, not a regular file.\n  hint: copy its content into a file and name that")


def limit(name: str) -> int:
    """Return a size limit in bytes, from the environment variable `name`, which is in MiB, or its default.

    Raises:
        ConfigError: the variable's value is not a positive whole number.
    """
    typed_limit = os.environ.get(name, "")
    if not typed_limit:
        return DEFAULT_MB[name] << 20
    if not typed_limit.isascii() or not typed_limit.isdigit() or int(typed_limit) < 1:
        raise ConfigError(name, typed_limit, "is not a valid size in MiB", allowed="whole numbers, 1 or greater")
    return int(typed_limit) << 20


def utf8(content: bytes, place: str) -> str:
    """Decode UTF-8 text without the byte order mark that some editors write at the beginning of a file.

    Raises:
        DataError: `content` is not UTF-8; the message names `place`.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text: {error}.") from error


def pieces(file: Found) -> Iterator[bytes]:
    """Yield the unpacked content of a file in pieces of at most 1 MiB.

    Raises:
        DataError: the file is damaged, cannot be read, or exceeds the limit :data:`MAX_FILE`.
    """
    most = limit(MAX_FILE)
    try:
        if not is_file(file.path, ""):
            raise DataError(f"{file.path} is not a file.")
        total = 0
        for piece in _unpacked(file, most):
            total += len(piece)
            if total > most:
                raise too_large(file)
            yield piece
    except DAMAGE as error:
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise DataError(
            f"{file} cannot be read: {reason or type(error).__name__}.\n  hint: download the file again"
        ) from error


def _unpacked(file: Found, most: int) -> Iterator[bytes]:
    if file.member is not None:
        with zipfile.ZipFile(file.path) as archive:
            if archive.namelist().count(file.member) > 1:
                raise DataError(f"{file.path} has several members named {file.member}.\n  hint: keep one of them")
            if archive.getinfo(file.member).file_size > most:
                raise too_large(file)
            with archive.open(file.member) as stream:
                yield from _read_pieces(stream)
    elif file.path.suffix == ".gz":
        with gzip.open(file.path) as stream:
            yield from _read_pieces(stream)
    else:
        with file.path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size > most:
                raise too_large(file)
            yield from _read_pieces(stream)


def _read_pieces(stream: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while piece := stream.read(_PIECE):
        yield piece


def too_large(file: Found) -> DataError:
    """Return the error for a file that exceeds the limit :data:`MAX_FILE`."""
    most = limit(MAX_FILE) >> 20
    return DataError(
        f"{file} exceeds the limit of {most} MiB after unpacking and parsing.\n"
        f"  hint: if the file is meant to be that large, set {MAX_FILE}={4 * most} in the environment"
    )


def no_memory(file: Found) -> DataError:
    """Return the error for a file that does not fit into memory."""
    return DataError(f"{file}: its content does not fit into memory.")
