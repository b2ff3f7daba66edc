"""Texts for perplexity and continuation: WikiText-2, C4 and PG-19 as papers use them, any files, and Python's own.

`path` is a local file, or a folder that contains it; None downloads from the hub. All functions raise DataError if a
file is missing, damaged or blank, or if several files of a folder could be meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from kvbench.errors import ConfigError, DataError
from kvbench.tasks import data
from kvbench.tasks.base import TokenTask
from kvbench.tasks.data import Found, HubSource
from kvbench.tasks.records import TEXT

#: endings of the text files that are read from a folder
_TEXTS = (".txt", ".txt.gz", ".raw", ".md", ".py")


def wikitext2(source: HubSource, path: str | None) -> list[str]:
    """Read the test split of WikiText-2 (raw) as a list with one text.

    As in GPTQ, Atom and KVQuant, the lines of the split are joined by two line feeds.
    """
    if path is not None:
        place, single = data.local(path, "dataset wikitext2")
        names = ("test.raw.txt.gz", "test.raw.txt", "wiki.test.raw", "test.txt", "test.txt.gz")
        there = [place] if single else [place / name for name in names if data.is_file(place / name, "")]
        if len(there) > 1:
            raise DataError(
                f"dataset wikitext2: {place} contains several files that could be the text: "
                f"{', '.join(file.name for file in there)}.\n  hint: name one of them: dataset.path={there[0]}"
            )
        if there and there[0].suffix != ".parquet":
            lines = _checked_text(data.read_text(Found(there[0])), there[0]).splitlines(keepends=True)
            # rows on the hub are the lines of this file, and blank lines are empty rows
            return ["\n\n".join(line if line.strip() else "" for line in lines)]
    return ["\n\n".join(_column(source, path, "test", "dataset wikitext2"))]


def c4(source: HubSource, path: str | None) -> list[str]:
    """Read the documents of C4's first validation shard."""
    return _column(source, path, "c4-validation.00000-of-00008", "dataset c4")


def c4_joined(source: HubSource, path: str | None) -> list[str]:
    """Read the first 1,100 documents of C4's first validation shard, joined by spaces, as a list with one text.

    GPTQ's code calls this text "c4_new".
    """
    return [" ".join(c4(source, path)[:1100])]


def pg19(source: HubSource, path: str | None) -> list[str]:
    """Read books, one text each: the test split of PG-19, or the text files of a local folder, sorted by name.

    If a folder holds other editions of the same books, set ``dataset.name`` to another name: results on them are only
    close to those on PG-19, and must not be reported as PG-19. A local file has PG-19's format.
    """
    if path is not None and not data.local(path, "dataset pg19")[1]:
        return local_texts(path, "dataset pg19")
    return _column(source, path, "test", "dataset pg19")


def local_texts(path: str | None, what: str = "dataset text", key: str = "dataset.path") -> list[str]:
    """Read a local text file, or all text files of a folder sorted by name, as one text per file.

    `what`, the data set's name, and `key`, the option that holds `path`, are for error messages.

    Raises:
        ConfigError: `path` is None.
    """
    check_text("text", path)
    place, single = data.local(str(path), what, key)
    paths = [place] if single else sorted(p for p in place.glob("*") if p.name.endswith(_TEXTS))
    if not paths:
        raise DataError(
            f"{what}: {place} contains no text.\n  hint: name a file, or a folder of {', '.join(_TEXTS)} files"
        )
    texts = [data.read_text(Found(file)) for file in paths]
    _checked_text("".join(texts), place)
    return texts


def python() -> list[str]:
    """Read the texts of ``mini_text``, one text each: help texts and source files of the running Python.

    The bundled model was not trained on them. Some installations of Python lack them (DataError).
    """
    from kvbench.tasks.mini.text import python_documents

    return [document.text for document in python_documents()]


#: functions that return the documents of a text, by its name
DOCUMENTS: dict[str, Callable[[HubSource, str | None], list[str]]] = {
    "wikitext2": wikitext2,
    "c4": c4,
    "c4_new": c4_joined,
    "pg19": pg19,
    "text": lambda source, path: local_texts(path),
    "mini_text": lambda source, path: python(),
}


class TextTask(TokenTask):
    """Base class of data sets that are cut from one of :data:`DOCUMENTS`, the `text` of their options."""

    text: Any
    path: str | None
    source: HubSource

    @cached_property
    def documents(self) -> list[str]:
        """The documents of the text, each as one string; read on first use. Raises DataError if they cannot be read."""
        return DOCUMENTS[self.text](self.source, self.path)

    @cached_property
    def checksum(self) -> str:
        """Checksum of all documents (see :func:`kvbench.tasks.data.records_fingerprint`)."""
        return data.records_fingerprint(({"text": text} for text in self.documents), ("text",))

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield the hub file as a pair of the source and the split ``test``; nothing without a repository."""
        return iter(() if self.source.hub_id is None else ((self.source, "test"),))


def check_text(text: str, path: str | None) -> None:
    """Raise ConfigError if the user's own files are to be read (`text` is ``"text"``), but `path` is None."""
    if text == "text" and path is None:
        raise ConfigError("dataset.path", None, "no text is given", hint="dataset.path=FILE_OR_FOLDER")


def _column(source: HubSource, path: str | None, name: str, what: str) -> list[str]:
    file = data.find_records(source, name, path, what)
    texts = [record["text"] for record in data.read_records(file, {"text": TEXT})]
    _checked_text("".join(texts), file)
    return texts


def _checked_text(text: str, place: object) -> str:
    """Return `text`. Raises DataError, which names `place`, if it is blank."""
    if not text.strip():
        raise DataError(f"{place} contains no text.\n  hint: download the file again, or name another one")
    return text
