"""The numbers of the documents, each with the file that it comes from (:mod:`experiments.check`)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import Rule


def rules() -> Iterator[Rule]:
    """Yield all rules, one document's or folder's after the other."""
    from experiments.checks import analysis, efficiency, h200, h200x2, methods, mini, quantspec, readme, tiny

    for module in (readme, methods, mini, tiny, quantspec, efficiency, analysis, h200, h200x2):
        yield from module.rules()
