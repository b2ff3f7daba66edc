"""Texts whose perplexity is measured, as the papers take them: WikiText-2, C4, PG-19, any files, Python's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench import data
from kvbench.data import Found, HubSource
from kvbench.errors import ConfigError, DataError

#: endings of texts in a folder
_TEXTS = (".txt", ".txt.gz", ".raw", ".md", ".py")


def wikitext2(source: HubSource, path: str | None) -> list[str]:
    """WikiText-2 raw test as GPTQ, Atom and KVQuant join it: rows (lines) with two line feeds between them."""
    local = Path(path).expanduser() if path else None
    if local is not None and local.is_dir():
        names = ("test.raw.txt.gz", "test.raw.txt", "wiki.test.raw", "test.txt", "test.txt.gz")
        local = next((local / name for name in names if (local / name).is_file()), local)
    if local is not None and local.is_file() and local.suffix != ".parquet":
        lines = data.read_text(Found(local)).splitlines(keepends=True)
        # the hub's rows are the file's lines, blank ones empty
        return ["\n\n".join(line if line.strip() else "" for line in lines)]
    records = data.read_records(data.find(source, "test", path, "dataset wikitext2"), ("text",))
    return ["\n\n".join(record["text"] for record in records)]


def c4(source: HubSource, path: str | None) -> list[str]:
    """Documents of C4's first validation shard."""
    return _column(source, path, "c4-validation.00000-of-00008", "dataset c4")


def c4_joined(source: HubSource, path: str | None) -> list[str]:
    """GPTQ's "c4_new": the first 1,100 documents of that shard, a blank between them."""
    return [" ".join(c4(source, path)[:1100])]


def pg19(source: HubSource, path: str | None) -> list[str]:
    """Books, one document each: the hub's test split, or the text files of a folder in the order of their names.

    Books that are PG-19's in another transcript give a PG-19-like figure; name the result so.
    """
    if path is not None and Path(path).expanduser().is_dir():
        return files(path)
    return _column(source, path, "test", "dataset pg19")


def files(path: str | None) -> list[str]:
    """A text file, or the text files of a folder in the order of their names.

    Raises:
        ConfigError: no path.
        DataError: no text there.
    """
    check_text("text", path)
    place = Path(str(path)).expanduser()
    found = [place] if place.is_file() else sorted(p for p in place.glob("*") if p.name.endswith(_TEXTS))
    if not found:
        raise DataError(f"dataset text: {place} holds no text.\n  hint: a file, or a folder of {', '.join(_TEXTS)}")
    return [data.read_text(Found(file)) for file in found]


def python() -> list[str]:
    """English and code that come with Python and that the bundled model was not trained on; differs between versions.

    Raises:
        DataError: this Python has no sources.
    """
    from kvbench.tasks.mini.text import documents

    return [document.text for document in documents()]


#: name of a text -> its documents
DOCUMENTS: dict[str, Callable[[HubSource, str | None], list[str]]] = {
    "wikitext2": wikitext2,
    "c4": c4,
    "c4_new": c4_joined,
    "pg19": pg19,
    "text": lambda source, path: files(path),
    "mini_text": lambda source, path: python(),
}


def check_text(text: str, path: str | None) -> None:
    """Raise ConfigError where the texts are files and none are named."""
    if text == "text" and path is None:
        raise ConfigError("dataset.path", None, "no text is named", hint="dataset.path=FILE_OR_FOLDER")


def _column(source: HubSource, path: str | None, name: str, what: str) -> list[str]:
    records: Sequence[data.Record] = data.read_records(data.find(source, name, path, what), ("text",))
    return [record["text"] for record in records]
