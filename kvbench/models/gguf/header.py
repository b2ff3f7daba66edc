"""The header of a GGUF file, read with bounds and without other packages.

A GGUF file is a magic number, a version, the numbers of tensors and of keys, the keys with their values, a table of the
tensors, and their data, each tensor at a multiple of ``general.alignment`` (github.com/ggml-org/ggml, docs/gguf.md).
Everything in it may be wrong: each length is compared with a bound and with the size of the file before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvbench.models.checkpoint import DamagedFile

#: versions of the format that are read; version 1 counted in 32 bits
VERSIONS = (2, 3)
#: largest numbers of keys and of tensors, and elements of an array
MOST_KEYS, MOST_TENSORS, MOST_ELEMENTS = 1 << 12, 1 << 17, 1 << 22
#: largest numbers of bytes of a text, of a key's name and of the whole header
MOST_TEXT, MOST_NAME, MOST_HEADER = 1 << 20, 1 << 10, 1 << 28
#: formats of struct by the number of a type; 8 is text, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

Value = str | int | float | bool


class Array(NamedTuple):
    """A key's value that is an array; only its number of elements is stored."""

    length: int


class Tensor(NamedTuple):
    """Entry of the table of tensors: shape, fastest dimension first; number of the type; offset of the data.

    The offset is in bytes from the beginning of all data.
    """

    shape: tuple[int, ...]
    type: int
    place: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file: values by key, tensor entries by name, and the offset at which the data begin."""

    keys: Mapping[str, Value | Array]
    tensors: Mapping[str, Tensor]
    start: int

    @property
    def architecture(self) -> str:
        """Name of the architecture, such as ``llama``, the prefix of its keys; empty if the file does not state it."""
        return str(self.keys.get("general.architecture", ""))


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        DamagedFile: the file cannot be read, is not a GGUF file of a supported version, or its header exceeds a bound
            or contradicts itself or the size of the file.
    """
    try:
        with file.open("rb") as handle:
            return _Reader(file, handle).header()
    except OSError as error:
        raise DamagedFile(file, f"cannot be read ({error.strerror})", _AGAIN) from error


_AGAIN = "copy or download the file again"


class _Reader:
    """Reader of a header from an open file; every method advances the position in the file."""

    def __init__(self, file: Path, handle: BinaryIO) -> None:
        self.file, self.handle = file, handle
        self.size = file.stat().st_size

    def header(self) -> Header:
        """Read everything before the data."""
        if self._bytes(4) != b"GGUF":
            raise self._damaged("does not begin with GGUF, so it is no GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = " (it was written for machines with the other order of bytes)" if version & 0xFFFF == 0 else ""
            raise self._damaged(f"has version {version} of the format{swapped}, not one of {VERSIONS}")
        tensor_count = self._count("tensors", MOST_TENSORS)
        keys: dict[str, Value | Array] = {}
        for _ in range(self._count("keys", MOST_KEYS)):
            name = self._text(MOST_NAME)
            if name in keys:
                raise self._damaged(f"has the key {name!r} twice")
            keys[name] = self._value(name, self._number("I"))
        tensors: dict[str, Tensor] = {}
        for _ in range(tensor_count):
            name = self._text(MOST_NAME)
            if name in tensors:
                raise self._damaged(f"has the tensor {name!r} twice")
            tensors[name] = self._tensor(name)
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in (1 << power for power in range(17)):
            raise self._damaged(f"sets general.alignment={alignment}, which is not a power of two up to 65536")
        start = -(-self.handle.tell() // alignment) * alignment
        for name, tensor in tensors.items():
            if tensor.place % alignment or start + tensor.place >= self.size:
                raise self._damaged(f"places the tensor {name!r} at byte {tensor.place} of its data, outside of them")
        return Header(keys, tensors, start)

    def _value(self, name: str, kind: int) -> Value | Array:
        if kind == _TEXT:
            return self._text(MOST_TEXT)
        if kind in _SCALARS:
            value: Value = self._number(_SCALARS[kind])
            return value
        if kind != _ARRAY:
            raise self._damaged(f"gives {name!r} the type {kind}, which does not exist")
        element, length = self._number("I"), self._count(f"elements of {name!r}", MOST_ELEMENTS)
        if element == _TEXT:
            for _ in range(length):
                self._text(MOST_TEXT)
        elif element in _SCALARS:
            self._bytes(length * struct.calcsize(_SCALARS[element]))
        else:
            raise self._damaged(f"gives the elements of {name!r} the type {element}, which is not read")
        return Array(length)

    def _tensor(self, name: str) -> Tensor:
        dimensions = self._number("I")
        if not 1 <= dimensions <= 4:
            raise self._damaged(f"gives the tensor {name!r} {dimensions} dimensions instead of 1 to 4")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        elements = 1
        for length in shape:
            elements *= length
        # the smallest types have less than 2 bits per element
        if not 1 <= elements <= 8 * self.size:
            raise self._damaged(f"gives the tensor {name!r} the shape {list(shape)}, for which the file is too small")
        return Tensor(shape, self._number("I"), self._number("Q"))

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            raise self._damaged(f"states {count} {what}; at most {most} are read")
        return int(count)

    def _text(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise self._damaged(f"has a text of {length} bytes in its header; at most {most} are read")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("has a text in its header that is not UTF-8") from None

    def _number(self, form: str) -> int:
        """Read a number in one of the formats of Python's `struct`, as an int, a float or a bool."""
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(form)))[0]  # type: ignore[no-any-return]

    def _bytes(self, count: int) -> bytes:
        if self.handle.tell() + count > min(self.size, MOST_HEADER):
            raise self._damaged("ends within its header" if self.size < MOST_HEADER else "has a header above 256 MiB")
        return self.handle.read(count)

    def _damaged(self, problem: str) -> DamagedFile:
        return DamagedFile(self.file, problem, _AGAIN)
