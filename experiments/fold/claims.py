"""Claims of a paper against the cells: bounds on a paired difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from experiments import published
from experiments.fold.cells import Cell, Verdict
from experiments.item import Claim, Column

#: standard errors on both sides of a difference
WIDTH = 2.0
#: fewest samples from which the standard error of a figure other than a score is believed
FEWEST = 10


def bound(paper: str, value: float | str) -> float:
    """Return a bound as a number; a text names a published claim (:func:`experiments.published.claim`)."""
    return published.claim(paper, value) if isinstance(value, str) else value


def verdict(difference: float, stderr: float | None, low: float, high: float, least: float = 0.0) -> str:
    """Return ``holds``, ``does not hold`` or ``cannot be seen``.

    Args:
        difference: the difference.
        stderr: its standard error; None: unknown, as with one sample.
        low: lower bound of the differences with which the claim holds.
        high: upper bound.
        least: smallest standard error to believe: where no sample differs, the samples are too few to say that none
            would (one sample in n).
    """
    if stderr is None:
        return "cannot be seen"
    spread = WIDTH * max(stderr, least)
    if low < difference - spread and difference + spread < high:
        return "holds"
    if difference + spread < low or high < difference - spread:
        return "does not hold"
    return "cannot be seen"


def judge(
    claim: Claim,
    paper: str,
    model: str,
    column: Column,
    cell: Callable[[str], Cell | None],
    difference: tuple[float, float | None] | None,
    published_values: Sequence[float | None],
) -> Verdict:
    """Return what the cells of one model say to a claim.

    Args:
        claim: the claim.
        paper: the paper's name.
        model: the model's name.
        column: the claim's column, or the first of its group: it has the unit and the scale.
        cell: the cell of a row by name, in the claim's column.
        difference: our paired difference, first less second, with its standard error; None if there is none.
        published_values: the paper's numbers of the first and the second row; None where it prints none.
    """
    first, second = cell(claim.first), cell(claim.second)
    low, high = bound(paper, claim.low), bound(paper, claim.high)
    printed = None
    one, two = published_values
    if one is not None and two is not None:
        printed = 100 * (one / two - 1) if claim.relative else one - two
    n = first.n if first is not None else 0
    ours = difference
    if claim.relative and ours is not None:
        assert second is not None
        ours = (100 * ours[0] / second.ours, None) if second.ours else None
    if ours is None:
        word = "not run"
    elif claim.relative and first is not None and second is not None and first.note != second.note:
        word = "cannot be seen"  # another device, or eager steps against captured ones: no difference of methods
    elif claim.relative:  # a point of time or memory is one number: it lies within the bounds or it does not
        word = "holds" if low <= ours[0] <= high else "does not hold"
    else:
        word = verdict(ours[0], ours[1], low, high, _least(column, n))
    return Verdict(
        claim=claim.text,
        model=model,
        paper=printed,
        ours=None if ours is None else ours[0],
        stderr=None if ours is None else ours[1],
        n=n,
        low=low,
        high=high,
        unit="%" if claim.relative else column.unit,
        digits=2 if claim.relative else max(2, column.digits),
        verdict=word,
    )


def _least(column: Column, n: int) -> float:
    """Return the smallest standard error to believe; for scores, that of a single sample in n that differs."""
    if column.figure == "score":
        return column.scale / n if n else math.inf
    return 0.0 if n >= FEWEST else math.inf
