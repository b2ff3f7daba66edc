"""The text of `mini_text`: help texts and source files that come with Python and were kept out of training."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import DataError

#: modules of the standard library, paths below ``Lib``; all are in Python 3.11 to 3.14 (``string`` is a package there)
MODULES = tuple(
    f"{name}.py"
    for name in """
argparse ast base64 bisect calendar cmd codecs collections/__init__ configparser contextlib copy csv dataclasses difflib
dis doctest enum fileinput fnmatch fractions ftplib functools getopt glob gzip hashlib heapq html/parser http/client
inspect ipaddress json/decoder json/encoder linecache locale mailbox mimetypes netrc optparse pdb pickle platform
plistlib poplib pprint queue random sched selectors shelve shlex shutil smtplib socketserver statistics string
subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback turtle uuid weakref zipapp
""".split()
)

#: the help texts of Python's keywords and types, plain English with some code
TOPICS = "pydoc_data/topics.py"

#: files that the training corpus must not contain
EXCLUDED = frozenset((*MODULES, TOPICS))


@dataclass(frozen=True)
class LibraryText:
    """One text of `mini_text`, the perplexity data that needs no download.

    Args:
        name: ``topics`` for Python's help texts, the path of a module in the standard library, or the name of a user's
            file.
        kind: ``prose`` or ``code``.
        sha256: SHA-256 of the text in UTF-8, as hexadecimal digits.
    """

    name: str
    kind: str
    text: str
    sha256: str


def _document(name: str, kind: str, text: str) -> LibraryText:
    return LibraryText(name, kind, text, hashlib.sha256(text.encode("utf-8")).hexdigest())


def python_documents(library: Path | None = None) -> list[LibraryText]:
    """Read the texts of `mini_text` from the Python installation.

    First come all of Python's help texts as one document, then one document for each module that was kept out of the
    bundled model's training data (:data:`kvbench.tasks.mini.text.MODULES`). `library` is the folder of a standard
    library for the source files; None for that of the running Python.

    Raises:
        DataError: the installation lacks the source files or the help texts, as some distributions of Python do.
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


def own(path: Path) -> LibraryText:
    """Read a user's text file (UTF-8) as a document of prose, in place of the texts of `mini_text`.

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


def identity(texts: list[LibraryText]) -> dict[str, str]:
    """Return what results record about the texts: ``sha256``, a checksum over all, and ``python``, the running version.

    The texts of `mini_text` change with the version of Python.
    """
    joined = hashlib.sha256("".join(document.sha256 for document in texts).encode())
    return {"sha256": joined.hexdigest(), "python": platform.python_version()}
