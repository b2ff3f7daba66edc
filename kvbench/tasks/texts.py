"""Texts of perplexity and continuation, as the papers take them: WikiText-2, C4, PG-19, any files, Python's own."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.errors import ConfigError, DataError
from kvbench.tasks import data
from kvbench.tasks.data import Found, HubSource
from kvbench.tasks.records import TEXT

#: endings of texts in a folder
_TEXTS = (".txt", ".txt.gz", ".raw", ".md", ".py")


def wikitext2(source: HubSource, path: str | None) -> list[str]:
    """Return WikiText-2 raw test as GPTQ, Atom and KVQuant join it: rows (lines) with two line feeds between them."""
    if path is not None:
        place, single = data.local(path, "dataset wikitext2")
        names = ("test.raw.txt.gz", "test.raw.txt", "wiki.test.raw", "test.txt", "test.txt.gz")
        there = [place] if single else [place / name for name in names if data.is_file(place / name, "")]
        if len(there) > 1:
            raise DataError(
                f"dataset wikitext2: {place} holds several files that could be the text: "
                f"{', '.join(file.name for file in there)}.\n  hint: name one: dataset.path={there[0]}"
            )
        if there and there[0].suffix != ".parquet":
            lines = _filled(data.read_text(Found(there[0])), there[0]).splitlines(keepends=True)
            # the hub's rows are the file's lines, blank ones empty
            return ["\n\n".join(line if line.strip() else "" for line in lines)]
    return ["\n\n".join(_column(source, path, "test", "dataset wikitext2"))]


def c4(source: HubSource, path: str | None) -> list[str]:
    """Return the documents of C4's first validation shard."""
    return _column(source, path, "c4-validation.00000-of-00008", "dataset c4")


def c4_joined(source: HubSource, path: str | None) -> list[str]:
    """Return GPTQ's "c4_new": the first 1,100 documents of that shard, a blank between them."""
    return [" ".join(c4(source, path)[:1100])]


def pg19(source: HubSource, path: str | None) -> list[str]:
    """Return books, one document each: the hub's test split, or the text files of a folder in the order of their names.

    Books that are PG-19's in another transcript give a PG-19-like figure; name the result so.
    """
    if path is not None and not data.local(path, "dataset pg19")[1]:
        return files(path, "dataset pg19")
    return _column(source, path, "test", "dataset pg19")


def files(path: str | None, what: str = "dataset text", key: str = "dataset.path") -> list[str]:
    """Read a text file, or the text files of a folder in the order of their names; messages name `what` and `key`.

    Raises:
        ConfigError: no path.
        DataError: nothing is there, or no text.
    """
    check_text("text", path)
    place, single = data.local(str(path), what, key)
    paths = [place] if single else sorted(p for p in place.glob("*") if p.name.endswith(_TEXTS))
    if not paths:
        raise DataError(f"{what}: {place} holds no text.\n  hint: a file, or a folder of {', '.join(_TEXTS)}")
    texts = [data.read_text(Found(file)) for file in paths]
    _filled("".join(texts), place)
    return texts


def python() -> list[str]:
    """Return English and code of this version of Python that the bundled model was not trained on.

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
    file = data.find(source, name, path, what)
    texts = [record["text"] for record in data.read_records(file, {"text": TEXT})]
    _filled("".join(texts), file)
    return texts


def _filled(text: str, place: object) -> str:
    """Return `text`. Raises DataError where it is blank."""
    if not text.strip():
        raise DataError(f"{place} holds no text.\n  hint: fetch it again, or name another file")
    return text
