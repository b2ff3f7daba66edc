"""The cells of an item: what a fold returns, and what is drawn and written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.metrics import intervals
from kvbench.metrics.intervals import Interval

#: mark of a table of generated records
FORMAT_ONLY = "format only: generated records, no result"
#: how the reason of a point that did not fit into memory begins
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Heading:
    """A column or group as the table shows it.

    Args:
        name: heading.
        unit: unit of its numbers.
        digits: decimals.
        x: position on a figure's axis; None: a category.
        panel: panel of a picture with several; empty: the only one.
        mean: True for a mean over columns.
    """

    name: str
    unit: str = ""
    digits: int = 2
    x: float | None = None
    panel: str = ""
    mean: bool = False


@dataclass(frozen=True)
class Cell:
    """One number of the paper and ours.

    Args:
        model, row, column: names of the cell's place.
        paper: the published number; None if the paper prints none for this model and data.
        ours: our number; None if there is none, for the `reason`.
        stderr: its standard error; None if unknown.
        n: number of samples.
        to_base: paired difference to the row's base over the same samples, ours less base; None without a base.
        to_base_stderr: its standard error.
        low, high: 95 % interval of our number; None if unknown.
        to_base_low, to_base_high: 95 % interval of the paired difference.
        runs: ids of the runs, or names of the files, that the number is folded from.
        reason: why there is no number.
        note: what differs from the other cells, for example the device of a point.
    """

    model: str
    row: str
    column: str
    paper: float | None = None
    ours: float | None = None
    stderr: float | None = None
    n: int = 0
    to_base: float | None = None
    to_base_stderr: float | None = None
    runs: tuple[str, ...] = ()
    reason: str = ""
    note: str = ""
    low: float | None = None
    high: float | None = None
    to_base_low: float | None = None
    to_base_high: float | None = None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.ours is None or self.paper is None else self.ours - self.paper


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict of our cells on a claim.

    Args:
        claim: the claim in words.
        model: the model.
        paper: the paper's own difference; None if it prints no such numbers.
        ours: our difference; None if it cannot be computed.
        stderr: its standard error.
        n: number of samples.
        low, high: bounds within which the claim holds.
        unit: unit of the difference: ``points`` (of scores in percent), ``percent`` (relative), ``factor`` (a ratio, no
            difference), or that of the figure.
        digits: decimals that are printed of the difference and its interval.
        verdict: ``holds``, ``does not hold``, ``undecided``, ``not comparable`` or ``not run``
            (:func:`experiments.fold.claims.decided`).
        least, most: 95 % interval of the difference; None without one.
        needed: about how many samples would decide an undecided claim; None if unknown.
        reason: why the two rows are not comparable.
        label: what the number is where it has no interval (``one measurement``, ``computed``), the sets that it is
            without, and whether all rows at hand would leave the claim undecided.
    """

    claim: str
    model: str
    paper: float | None
    ours: float | None
    stderr: float | None
    n: int
    low: float
    high: float
    unit: str
    verdict: str
    digits: int = 2
    least: float | None = None
    most: float | None = None
    needed: int | None = None
    reason: str = ""
    label: str = ""


@dataclass(frozen=True)
class Folded:
    """An item folded.

    Args:
        headings: the columns, in order.
        rows: names of the rows, in order.
        models: names of the models, in order.
        cells: all cells.
        base: name of the row that paired differences are taken to; empty: none.
        verdicts: what the cells say to the claims.
        notes: remarks below the table (versions, devices, lengths that were shortened).
        marks: words at the head of the table, for example "format only".
        arrays: further data of a picture, by name, as plain lists.
    """

    headings: Sequence[Heading]
    rows: Sequence[str]
    models: Sequence[str]
    cells: Sequence[Cell]
    base: str = ""
    verdicts: Sequence[Verdict] = ()
    notes: Sequence[str] = ()
    marks: Sequence[str] = ()
    arrays: Mapping[str, Any] = field(default_factory=dict)

    def at(self, model: str, row: str, column: str) -> Cell | None:
        """Return the cell at a place; None if there is none."""
        return next((c for c in self.cells if (c.model, c.row, c.column) == (model, row, column)), None)


def interval_fields(interval: Interval | None, name: str = "") -> dict[str, Any]:
    """Return a 95 % interval as fields of a cell; none without one."""
    return {} if interval is None else {f"{name}low": interval[0], f"{name}high": interval[1]}


def mean_cell(
    place: tuple[str, str, str], mean: float, stderr: float | None, n: int, base: Any = None, **more: Any
) -> Cell:
    """Return the cell of a mean over `n` prompts, with Student's interval.

    Args:
        place: model, row and column.
        stderr: standard error of the mean; None or NaN where it has none.
        base: paired difference to the base and its standard error; None without a base.
    """
    known = known_error(stderr)
    if base is not None:
        gap, error = base[0], known_error(base[1])
        more |= {
            "to_base": gap,
            "to_base_stderr": error,
            **interval_fields(intervals.of_moments(gap, error, n), "to_base_"),
        }
    return Cell(*place, ours=mean, stderr=known, n=n, **interval_fields(intervals.of_moments(mean, known, n)), **more)


def known_error(stderr: float | None) -> float | None:
    """Return a standard error; None for NaN, which that of a single prompt is."""
    return None if stderr is None or math.isnan(stderr) else stderr
