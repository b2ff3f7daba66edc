"""The figures of the documents, each with the file that it comes from (:mod:`experiments.check`).

A module for each folder of results, or for all documents that programs write as a whole. Each has a function
``rules()`` of sentences and of tables (:mod:`~experiments.checks.rules`). They import no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from experiments.checks.rules import Rule

MODULES = ("h200", "h200_tables", "mini", "formats", "latency", "methods", "written")


def rules() -> Iterator[Rule]:
    """Yield all rules, module by module."""
    for name in MODULES:
        yield from import_module(f"{__name__}.{name}").rules()
