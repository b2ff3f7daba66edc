"""The rule for README.md's table of ``make run``: its lines are those that :mod:`experiments.quickstart` writes."""

from __future__ import annotations

from collections.abc import Iterator

from experiments import quickstart
from experiments.checks.rules import Block, Rule


def rules() -> Iterator[Rule]:
    """Yield the rule."""
    yield Block("README.md", "results", quickstart.block(), quickstart.FOLDER)
