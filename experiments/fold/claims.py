"""Claims of a paper against the cells: bounds on a paired difference, and the one rule that decides them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from experiments import published
from experiments.fold.cells import Cell, Verdict
from experiments.item import Claim, Column
from kvbench.metrics import intervals
from kvbench.metrics.intervals import Interval

HOLDS, FAILS, OPEN, APART, NOT_RUN = "holds", "does not hold", "undecided", "not comparable", "not run"
#: label of a claim that all rows at hand would leave undecided, if difference and variance stay as they are
ALL_ROWS = "needs more rows than are at hand"
#: of scores that fp16 has no better than an answer that knows nothing
FLOOR = "at the floor"
#: verdicts in the order of lists
VERDICTS = (HOLDS, FAILS, OPEN, FLOOR, APART, NOT_RUN)
#: the rule of :func:`decided`, as documents print it
RULE = """A claim *holds* where the 95 % interval of the difference lies within the claim's bounds, *does not hold*
where it lies outside, and is *undecided* where a bound lies in it: then it is named about how many samples would
decide it, if difference, variance and the shares of several sets stay as they are. Differences of shares of right
answers have Newcombe's paired interval, those of other scores a bootstrap (below 30 samples no narrower than Student's
t), other figures Student's t; that of a mean over sets is made of its sets' intervals, squared and added. What was
measured once has no interval: it decides nothing, and is labelled *one measurement*. What is *computed* from a model's
dimensions is exact. *Not comparable*: the two sides, or the paper's models and ours, differ in more than the claim is
about, as named. Differences of scores and of shares are in points, relative ones in percent; a factor is a ratio."""


def bound(paper: str, value: float | str) -> float:
    """Return a bound as a number; a text names a published claim (:func:`experiments.published.claim`)."""
    return published.claim(paper, value) if isinstance(value, str) else value


def decided(
    claim: str,
    model: str,
    ours: float | None,
    low: float,
    high: float,
    *,
    interval: Interval | None = None,
    stderr: float | None = None,
    n: int = 0,
    unit: str = "",
    digits: int = 2,
    paper: float | None = None,
    computed: bool = False,
    incomparable: str = "",
    widest: float = 100.0,
) -> Verdict:
    """Return what a number says to a claim, by :data:`RULE`.

    Args:
        claim, model: the claim in words, and the model's name.
        ours: our difference or ratio, in `unit`, printed with `digits` decimals; None if there is none.
        low, high: bounds of the numbers with which the claim holds.
        interval, stderr, n: 95 % interval of `ours`, None without one; standard error, and number of samples.
        paper: the paper's own difference.
        computed: True for a number without any error.
        incomparable: why `ours` says nothing about the claim.
        widest: the most that a single sample can differ.
    """
    word, label, needed = OPEN, "", None
    if ours is None:
        word, interval, stderr, n = NOT_RUN, None, None, 0
    elif computed:
        word, label = (HOLDS if low < ours < high else FAILS), "computed"
    elif interval is None:
        label = "one measurement" if n < 2 else "no spread"
    elif low < interval[0] and interval[1] < high:
        word = HOLDS
    elif interval[1] < low or high < interval[0]:
        word = FAILS
    else:
        needed = intervals.deciding(ours, stderr, n, low, high, widest)
    if ours is not None and incomparable:
        word, needed = APART, None
    least, most = interval or (None, None)
    return Verdict(
        claim=claim,
        model=model,
        paper=paper,
        ours=ours,
        stderr=stderr,
        n=n,
        low=low,
        high=high,
        unit=unit,
        verdict=word,
        digits=digits,
        least=least,
        most=most,
        needed=needed,
        reason=incomparable if word == APART else "",
        label=label,
    )


def decided_mean(
    claim: str, model: str, mean: float, stderr: float | None, n: int, low: float, high: float, **more: Any
) -> Verdict:
    """Return what a mean over `n` prompts says to a claim, by its Student's interval; NaN: it was not run."""
    if math.isnan(mean):
        return decided(claim, model, None, low, high, **more)
    interval = intervals.of_moments(mean, stderr, n)
    return decided(claim, model, mean, low, high, interval=interval, stderr=stderr, n=n, widest=math.inf, **more)


def judge(
    claim: Claim,
    paper: str,
    model: str,
    column: Column,
    cell: Callable[[str], Cell | None],
    difference: tuple[float, float | None, Interval | None] | None,
    published_values: Sequence[float | None],
    standing_in: bool = False,
) -> Verdict:
    """Return what the cells of one model say to a claim.

    Args:
        claim, paper, model: the claim, and the names of the paper and of the model.
        column: the claim's column, or the first of its group: it has the unit and the scale.
        cell: the cell of a row by name, in the claim's column.
        difference: our paired difference, first less second, with its standard error and interval; None without one.
        published_values: the paper's numbers of the first and the second row; None where it prints none.
        standing_in: True if time and memory of this model are not those of the paper's models.
    """
    first, second = cell(claim.first), cell(claim.second)
    printed = None
    one, two = published_values
    if one is not None and two is not None:
        printed = 100 * (one / two - 1) if claim.relative else one - two
    if claim.relative and difference is not None:
        assert second is not None
        difference = (100 * difference[0] / second.ours, None, None) if second.ours else None
    incomparable = ""
    if standing_in:
        incomparable = f"{model} stands in for the paper's models, and shares of time and memory depend on the model"
    elif claim.relative and first is not None and second is not None and first.note != second.note:
        incomparable = f"{claim.first}: {first.note}; {claim.second}: {second.note}"
    ours, stderr, interval = difference or (None, None, None)
    return decided(
        claim.text,
        model,
        ours,
        bound(paper, claim.low),
        bound(paper, claim.high),
        interval=interval,
        stderr=stderr,
        n=first.n if first is not None else 0,
        unit="percent" if claim.relative else unit_of(column.unit),
        digits=2 if claim.relative else max(2, column.digits),
        paper=printed,
        incomparable=incomparable,
        widest=column.scale,
    )


def unit_of(unit: str) -> str:
    """Return the unit of a difference of two figures of a column."""
    return {"%": "points", "x": "(difference of factors)"}.get(unit, unit)
