"""Errors of attention as cells: Table 4, by distance (Figure 8), and coverage (Figure 4) of LogQuant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments import published
from experiments.data import Plan
from experiments.fold.analyses import analysis, notes
from experiments.fold.cells import FORMAT_ONLY, Cell, Folded, Heading, Verdict, known_error, mean_cell
from experiments.fold.claims import bound, decided, decided_mean
from experiments.item import Computed, Model
from kvbench.analysis.outcome import Outcome, mean_and_error

#: a figure of all prompts of a setting, ``[N]``
Figure = Callable[[Outcome, str], np.ndarray]
#: (model, row, column) -> the figures of all prompts
Numbers = dict[tuple[str, str, str], np.ndarray]


def attention_errors(item: Computed, plan: Plan) -> Folded:
    """Return the L1 error, its share of the largest possible one, the KL divergence and the error of the outputs."""
    columns: dict[Heading, Figure] = {
        Heading("L1 error", digits=3): lambda o, s: o.figures(s, "l1"),
        Heading("of its maximum", unit="%", digits=2): lambda o, s: 100 * o.figures(s, "l1_share"),
        Heading("KL", unit="nats", digits=4): lambda o, s: o.figures(s, "kl"),
        Heading("output error", unit="%", digits=2): lambda o, s: 100 * o.figures(s, "output_error"),
        Heading("dropped attention", unit="%", digits=2): lambda o, s: 100 * o.figures(s, "lost"),
    }
    return _folded(item, plan, columns)


def by_distance(item: Computed, plan: Plan) -> Folded:
    """Return the L1 error per head by distance, as a share of its maximum."""
    from kvbench.analysis.bins import Bins

    bins, columns = Bins(), {}
    newest = bins.newest(128)

    def share(part: slice) -> Figure:
        return lambda o, s: 100 * o.errors[s]["l1"][..., part].sum(-1).mean((1, 2)) / 2

    last = bins.sinks + 13
    for number, name in enumerate(bins.names()[:last]):
        distance = bins.edges[number - bins.sinks] if number >= bins.sinks else 0
        heading = Heading(name, unit="%", digits=3, x=distance or None)
        columns[heading] = share(slice(number, number + 1))
    columns[Heading("newest 128", unit="%", digits=3)] = share(newest)
    columns[Heading("128 and more", unit="%", digits=3)] = share(slice(newest.stop, None))
    folded = _folded(item, plan, columns)
    empty = {cell.column for cell in folded.cells if cell.ours == 0.0} - {c.column for c in folded.cells if c.ours}
    return replace(  # no prompt is long enough for these distances
        folded,
        headings=[heading for heading in folded.headings if heading.name not in empty],
        cells=[cell for cell in folded.cells if cell.column not in empty],
    )


def coverage(item: Computed, plan: Plan) -> Folded:
    """Return the attention per token held exact and by LogQuant's eq. 2, for each method and reserved length."""
    lengths = item.options["lengths"]
    settings, columns = {}, {}
    for length in lengths:
        for name, text in item.options["settings"].items():
            settings[f"{name} {length}"] = text.replace("{R4}", str(length + 4)).replace("{R}", str(length))
        columns[Heading(f"R = {length}", unit="1e-3", digits=3, x=float(length))] = _coverage_at(length)
    for length in lengths:
        columns[Heading(f"R = {length}, eq. 2", unit="1e-3", digits=3)] = _coverage_at(length, 3 * (length // 3))
    return _folded(item, plan, columns, settings)


def _coverage_at(length: int, count: int = 0) -> Figure:
    """Return the figure of one reserved length: attention per token held exact, or divided by `count`."""
    if count:
        return lambda o, s: 1000 * o.figures(f"{s} {length}", "coverage") / count
    return lambda o, s: 1000 * o.figures(f"{s} {length}", "coverage_per_token")


def _folded(
    item: Computed,
    plan: Plan,
    columns: Mapping[Heading, Figure],
    settings: Mapping[str, str] | None = None,
) -> Folded:
    """Return the cells of all models: a row for each of the item's settings, a column for each heading and its figure.

    `settings` are analysed, by name; None: those of the item.
    """
    options, models = item.options, plan.models_of(item)
    chosen, size = settings or options["settings"], {key: options[key] for key in ("prompts", "steps")}
    analyses = {model.title: analysis(model, options["data"], chosen, plan, **size) for model in models}
    cells: list[Cell] = []
    numbers: Numbers = {}
    for model in models:
        made = analyses[model.title]
        for row in options["settings"]:
            for heading, figure in columns.items():
                paper = _published(item, plan, model, row, heading)
                place = (model.title, row, heading.name)
                if made.outcome is None:
                    cells.append(Cell(*place, paper=paper, reason=made.reason))
                    continue
                own = numbers[place] = figure(made.outcome, row)
                base = None if row == options["base"] else numbers.get((model.title, options["base"], heading.name))
                gap = None if base is None else mean_and_error(own - base)
                cells.append(mean_cell(place, *mean_and_error(own), len(own), gap, paper=paper, runs=(made.id,)))
    return Folded(
        list(columns),
        list(options["settings"]),
        [model.title for model in models],
        cells,
        verdicts=[_judged(item, plan, claim, model, numbers) for model in models for claim in options["claims"]],
        notes=notes(item, plan, *analyses.values()),
        marks=[FORMAT_ONLY] if plan.data == "standin" else [],
    )


def _published(item: Computed, plan: Plan, model: Model, row: str, heading: Heading) -> float | None:
    """Return the paper's number of the first column, if our model and data are the paper's."""
    if not item.published or heading.name != "L1 error" or not plan.compares(item, model):
        return None
    return published.lookup(item.published, {**item.options["keys"], "method": row}, item.value)


def _judged(item: Computed, plan: Plan, claim: Any, model: Model, numbers: Numbers) -> Verdict:
    """Return what the figures of one model say to a claim: the difference of two rows over the same prompts."""
    first, second = (numbers.get((model.title, row, claim.column)) for row in (claim.first, claim.second))
    low, high = bound(item.paper, claim.low), bound(item.paper, claim.high)
    printed = None
    if item.published:
        one, two = (
            published.lookup(item.published, {**item.options["keys"], "method": row}, item.value)
            for row in (claim.first, claim.second)
        )
        printed = None if one is None or two is None else one - two
    return judged(claim.text, model.title, first, second, low, high, paper=printed)


def judged(
    text: str,
    model: str,
    first: np.ndarray | None,
    second: np.ndarray | Sequence[float] | float | None,
    low: float,
    high: float,
    *,
    paper: float | None = None,
    unit: str = "",
) -> Verdict:
    """Return the verdict on the mean of ``first - second`` over prompts; without any the claim was not run."""
    if first is None or second is None or not len(first):
        return decided(text, model, None, low, high, unit=unit, paper=paper)
    difference, error = mean_and_error(first - np.asarray(second))
    return decided_mean(text, model, difference, known_error(error), len(first), low, high, unit=unit, paper=paper)
