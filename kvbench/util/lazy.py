"""Modules that are imported on first use, so that a configuration can be checked without importing torch."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class LazyModule:
    """Object that stands for a module, such as ``torch.nn``, and imports it when an attribute is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Return an attribute of the module, which is imported first if necessary."""
        module = sys.modules.get(self._name) or importlib.import_module(self._name)
        return getattr(module, attribute)

    def __repr__(self) -> str:
        return f"<lazy module {self._name!r}>"


def lazy(name: str) -> Any:
    """Return an object to use like the module `name`, which is imported only when an attribute is first read.

    To let type checkers see the module itself, write::

        if TYPE_CHECKING:
            import torch
        else:
            torch = lazy("torch")
    """
    return LazyModule(name)
