"""Source files outside the package: relative imports lead to the modules that Python would import."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from kvbench.runner import modules, sources

FILES = {
    "foreign_package/__init__.py": "",
    "foreign_package/beside.py": "def share(rows):\n    return 0.25\n",
    "foreign_package/inner/__init__.py": "from .base import Inner\n",
    "foreign_package/inner/base.py": "from kvbench.methods.kivi import Kivi\nclass Inner(Kivi):\n    x = 1\n",
    "foreign_package/inner/method.py": (
        "from . import numbers\nfrom .base import Inner\nfrom ..beside import share\n"
        "class Foreign(Inner):\n    y = share(numbers.ROWS)\n"
    ),
    "foreign_package/inner/numbers.py": "ROWS = 2\n",
    "foreign_package/numbers.py": "ROWS = 3\n",  # of the same name, but one package further up
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    modules.own.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("foreign_package/beside.py", True),
        ("foreign_package/inner/base.py", True),
        ("foreign_package/inner/numbers.py", True),
        ("foreign_package/numbers.py", False),
    ],
)
def test_an_edit_of_what_is_imported_relatively_counts(folder: Path, name: str, counts: bool) -> None:
    def digest() -> str | None:
        return sources.code(
            {
                "method": {"_target_": "foreign_package.inner.method.Foreign"},
                "quantizer": {"name": "int2"},
                "dataset": {"_target_": "kvbench.tasks.mini.Mini"},
            }
        )["method"]

    before = digest()
    with (folder / name).open("a") as file:
        file.write("further = 1\n")
    assert before is not None and (digest() != before) == counts


def test_bases_are_found_through_relative_imports(folder: Path) -> None:
    assert modules.lineage("foreign_package.inner.method.Foreign")[:3] == [
        "foreign_package.inner.method",
        "foreign_package.inner.base",
        "kvbench.methods.kivi",
    ]
    assert modules.lineage("foreign_package.inner.Inner")[0] == "foreign_package.inner.base"
