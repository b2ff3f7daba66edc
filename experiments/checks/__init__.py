"""The numbers of the documents, each with the file that it comes from (:mod:`experiments.check`).

Every module here but ``numbers`` and ``rules`` has a function ``rules()``: the rules of one document or folder. They
import no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from experiments.checks.rules import Rule


def rules() -> Iterator[Rule]:
    """Yield all rules, module by module."""
    for module in iter_modules(__path__):
        if module.name not in ("numbers", "rules"):
            yield from import_module(f"{__name__}.{module.name}").rules()
