"""Modules imported on first use."""

import sys

import pytest

from kvbench.util.lazy import lazy


def test_a_module_is_imported_when_it_is_first_read(tmp_path, monkeypatch):
    (tmp_path / "kvbench_lazily_read.py").write_text("NUMBER = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = lazy("kvbench_lazily_read")
    assert repr(module) == "<lazy module 'kvbench_lazily_read'>" and "kvbench_lazily_read" not in sys.modules
    assert module.NUMBER == 7 and sys.modules.pop("kvbench_lazily_read").NUMBER == 7


def test_what_is_missing_raises_what_an_import_would():
    with pytest.raises(ModuleNotFoundError, match="kvbench_is_not_here"):
        print(lazy("kvbench_is_not_here").anything)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        print(lazy("json").nothing_of_this_name)
