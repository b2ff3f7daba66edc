"""Cases of a parameterized test of which some run with ``make test-slow`` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], chosen: Callable[[Any], bool] | Iterable[Any], *, single: bool = False) -> list[Any]:
    """Return the cases, of which all but the chosen ones carry the marker ``slow``.

    Args:
        cases: values of one parameter, or tuples of the values of several.
        chosen: the cases that ``make test`` runs, or a predicate of them.
        single: True if there is one parameter, whose values are tuples.
    """
    cases = list(cases)
    wanted = chosen if callable(chosen) else list(chosen).__contains__
    if not any(map(wanted, cases)):
        raise ValueError("none of the cases is among those that make test runs")
    return [case if wanted(case) else _slow(case, single) for case in cases]


def first_of_each(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the first case for each method; the method is the first value of a case."""
    seen: dict[Any, tuple[Any, ...]] = {}
    for case in cases:
        seen.setdefault(case[0], case)
    return list(seen.values())


def _slow(case: Any, single: bool) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) and not single else (case,)), marks=pytest.mark.slow)
