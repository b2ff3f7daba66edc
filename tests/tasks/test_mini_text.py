"""mini_text's provider: held-out texts of the running Python, in order, with their hashes."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import pytest

from kvbench.errors import DataError
from kvbench.tasks.mini import text
from kvbench.tasks.mini.text import EXCLUDED, MODULES


def test_documents_of_this_python():
    computed = text.python_documents()
    assert [d.name for d in computed] == ["topics", *MODULES]
    assert len(MODULES) >= 60
    assert len(set(MODULES)) == len(MODULES)
    assert {d.kind for d in computed} == {"prose", "code"}
    assert len(computed[0].text) > 100_000
    assert all(hashlib.sha256(d.text.encode()).hexdigest() == d.sha256 for d in computed)
    assert set(MODULES) < EXCLUDED
    assert text.identity(computed) == text.identity(text.python_documents())


def test_modules_that_became_packages_are_found(tmp_path):
    """In Python 3.14 `string` is a package; its document keeps its name."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        source = library / name if (library / name).is_file() else library / name.removesuffix(".py") / "__init__.py"
        place = tmp_path / (name if name != "string.py" else "string/__init__.py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)
    assert text.python_documents(tmp_path) == text.python_documents()


def test_missing_sources_are_explained(tmp_path):
    with pytest.raises(DataError, match=r"dataset\.path=FILE"):
        text.python_documents(tmp_path)


def test_a_text_of_ones_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Some words.\n", encoding="utf-8")
    assert text.own(path).text == "Some words.\n"
    assert text.identity([text.own(path)])["sha256"] != text.identity([])["sha256"]
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="UTF-8"):
        text.own(path)
    path.write_text("  \n")
    with pytest.raises(DataError, match="no text"):
        text.own(path)
    with pytest.raises(DataError, match="cannot be read"):
        text.own(tmp_path / "absent.txt")
