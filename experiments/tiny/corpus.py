"""The text that tiny is trained on: any folder of text files, read, cleared of held-out modules and tokenized.

A file is ``*.txt``, ``*.txt.gz`` or ``*.txt.xz`` in UTF-8; a line that holds one form feed separates documents. One
that begins with ``# file: NAME`` is a source file of the Python library and is left out where `mini_text` uses it.
"""

from __future__ import annotations

import fnmatch
import gzip
import lzma
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from kvbench.errors import DataError
from kvbench.tasks.mini.text import EXCLUDED
from kvbench.tasks.mini.tokens import encoder

_OPEN: dict[str, Callable[..., IO[str]]] = {".txt": open, ".gz": gzip.open, ".xz": lzma.open}
_SOURCE = re.compile(r"# file: (\S+)\n")


def text_files(folder: Path) -> list[Path]:
    """Return the text files of a folder, by name.

    Raises:
        DataError: the folder is missing or has no text file.
    """
    paths = sorted(p for p in folder.glob("*.txt*") if p.suffix in _OPEN) if folder.is_dir() else []
    if not paths:
        raise DataError(
            f"{folder} does not contain *.txt, *.txt.gz or *.txt.xz files.\n  hint: set corpus.path to "
            "a folder of text files"
        )
    return paths


def training_documents(path: Path) -> Iterator[str]:
    """Return the documents of one file that training may see."""
    with _OPEN[path.suffix](path, "rt", encoding="utf-8") as stream:
        text = stream.read()
    for document in re.split(r"^\f$", text, flags=re.M):
        document = document.strip("\n")
        source = _SOURCE.match(document)
        if source and source[1] in EXCLUDED:
            continue
        if source:
            document = document[source.end() :]
        if document:
            yield document


def is_code(path: Path, patterns: Sequence[str]) -> bool:
    """Return True if a file holds code rather than prose, by its name."""
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)


def chunks(document: str, size: int = 1 << 16) -> Iterator[str]:
    """Return a document in stretches of about `size` characters, each but the first beginning with a line break.

    The stretches are tokenized one by one, to the same tokens as the whole: they end where a non-space meets one.
    """
    start = 0
    border = re.compile(r"(?<=\S)(?=\n)")
    while start < len(document):
        match = border.search(document, start + size)
        end = match.start() if match else len(document)
        yield document[start:end]
        start = end


@dataclass(frozen=True)
class Tokens:
    """The tokenized corpus: two flat arrays of uint16, documents separated by the end-of-text token."""

    prose: np.ndarray
    code: np.ndarray
    characters: int

    def save(self, path: Path) -> None:
        """Keep the arrays in an ``.npz`` file."""
        np.savez(path, prose=self.prose, code=self.code, characters=self.characters)

    @classmethod
    def load(cls, path: Path) -> Tokens:
        """Read the arrays of :meth:`save`."""
        with np.load(path) as data:
            return cls(data["prose"], data["code"], int(data["characters"]))


def _encode_file(job: tuple[Path, Path, int, int, int]) -> tuple[np.ndarray, int]:
    """Tokenize every `step`-th document of a file from `first`."""
    path, tokenizer, end_of_text, first, step = job
    encode = encoder(tokenizer)
    parts: list[np.ndarray] = []
    characters = 0
    for index, document in enumerate(training_documents(path)):
        if index % step != first:
            continue
        characters += len(document)
        parts += [np.asarray(ids, dtype=np.uint16) for ids in encode(list(chunks(document)))]
        parts.append(np.asarray([end_of_text], dtype=np.uint16))
    return (np.concatenate(parts) if parts else np.zeros(0, np.uint16)), characters


def tokenize(folder: Path, code: Sequence[str], tokenizer: Path, end_of_text: int, workers: int) -> Tokens:
    """Return the whole folder as tokens, with `end_of_text` between documents, in an order that is always the same.

    `code` are name patterns of the files that hold code, `tokenizer` is a ``tokenizer.json``.
    """
    step = 4
    jobs = [(path, tokenizer, end_of_text, first, step) for path in text_files(folder) for first in range(step)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        results = pool.map(_encode_file, jobs, chunksize=1)
    empty = [np.zeros(0, np.uint16)]
    kinds = [is_code(job[0], code) for job in jobs]
    prose = np.concatenate(empty + [r[0] for r, c in zip(results, kinds, strict=True) if not c])
    source = np.concatenate(empty + [r[0] for r, c in zip(results, kinds, strict=True) if c])
    return Tokens(prose, source, sum(r[1] for r in results))
