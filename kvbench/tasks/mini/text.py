"""The text of `mini_text`: help texts and source files that come with Python and were kept out of training."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import DataError
from kvbench.tasks.mini.heldout import MODULES


@dataclass(frozen=True)
class Document:
    """One text of `mini_text`.

    Args:
        name: ``topics`` for the help texts, a module's path in the standard library, or a file's name.
        kind: ``prose`` or ``code``.
        text: the text itself.
        sha256: SHA-256 of the text in UTF-8.
    """

    name: str
    kind: str
    text: str
    sha256: str


def _document(name: str, kind: str, text: str) -> Document:
    return Document(name, kind, text, hashlib.sha256(text.encode("utf-8")).hexdigest())


def documents(library: Path | None = None) -> list[Document]:
    """Return the texts of `mini_text`: Python's help texts as one document, then one document per held-out module.

    Args:
        library: folder with the sources of a standard library; None for the running Python's own.

    Raises:
        DataError: this Python comes without its sources or help texts (some distributions strip them).
    """
    folder = library or Path(sysconfig.get_paths()["stdlib"])
    documents = [_document("topics", "prose", "\n\n".join(text for _, text in _topics()))]
    for name in MODULES:
        path = folder / name
        if not path.is_file() and (package := folder / name.removesuffix(".py") / "__init__.py").is_file():
            path = package  # some modules have become packages since: string in Python 3.14
        try:
            documents.append(_document(name, "code", path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"mini_text: {path} cannot be read ({error}). mini_text consists of the source files of "
                "Python's standard library.\n"
                "  hint: set dataset.path=FILE to use your own text"
            ) from error
    return documents


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            f"mini_text: this installation of Python does not include its help texts ({error}).\n"
            "  hint: set dataset.path=FILE to use your own text"
        ) from error
    return iter(sorted(topics.items()))


def own(path: Path) -> Document:
    """Return a user's UTF-8 text file as one document of prose.

    Raises:
        DataError: the file cannot be read or is blank.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"dataset.path={path}: cannot be read as UTF-8 text ({error}).\n"
            "  hint: set dataset.path to a readable text file in UTF-8, or leave it out for the bundled texts"
        ) from error
    if not text.strip():
        raise DataError(
            f"dataset.path={path}: the file contains no text.\n"
            "  hint: set dataset.path to another file, or leave it out for the bundled texts"
        )
    return _document(path.name, "prose", text)


def identity(texts: list[Document]) -> dict[str, str]:
    """Return data that identifies the texts in a result.

    Returns:
        ``sha256``, a checksum over all texts, and ``python``, the version of the running Python, which provides them.
    """
    joined = hashlib.sha256("".join(document.sha256 for document in texts).encode())
    return {"sha256": joined.hexdigest(), "python": platform.python_version()}
