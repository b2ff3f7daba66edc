"""Exact attention as cells and arrays: spikes by distance, from step to step, and sinks (LogQuant's Figures 1 to 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from experiments.data import Plan
from experiments.fold.analyses import Analysis, analysis, notes
from experiments.fold.attention import judged
from experiments.fold.cells import FORMAT_ONLY, Cell, Folded, Heading, Verdict, known_error, mean_cell
from experiments.fold.claims import decided_mean
from experiments.item import Column, Computed, Model
from experiments.logquant.attention import FOUR
from kvbench.analysis.outcome import Outcome, mean_and_error

#: why a figure has no number
TOO_FEW = "too few spikes, or too few decode steps, for this figure"


class _Figure:
    """The cells and claims of a figure of exact attention, model by model."""

    def __init__(self, item: Computed, plan: Plan, headings: Sequence[Heading], rows: Sequence[str]) -> None:
        self.item, self.plan, self.headings, self.rows = item, plan, headings, rows
        self.cells: list[Cell] = []
        self.verdicts: list[Verdict] = []
        self.analyses: list[Analysis] = []

    def outcome(self, run: Analysis, model: Model, rows: Sequence[str]) -> Outcome | None:
        """Return the outcome of an analysis; None, with cells of these rows that say why, if there is none."""
        self.analyses.append(run)
        if run.outcome is None:
            places = ((model.title, row, heading.name) for row in rows for heading in self.headings)
            self.cells += [Cell(*place, reason=run.reason) for place in places]
        return run.outcome

    def add(self, model: Model, row: str, heading: Heading, mean: float, error: float, count: int) -> None:
        """Add the cell of a mean over prompts of the last analysis."""
        place, runs = (model.title, row, heading.name), (self.analyses[-1].id,)
        if math.isnan(mean):
            self.cells.append(Cell(*place, reason=TOO_FEW, runs=runs))
        else:
            self.cells.append(mean_cell(place, mean, error, count, runs=runs))

    def folded(self, **arrays: Any) -> Folded:
        """Return the item folded; without pictures where the first array is empty."""
        models = [model.title for model in self.plan.models_of(self.item)]
        shown = arrays if next(iter(arrays.values())) else {}
        remarks = notes(self.item, self.plan, *self.analyses)
        marks = [FORMAT_ONLY] if self.plan.data == "standin" else []
        return Folded(self.headings, self.rows, models, self.cells, "", self.verdicts, remarks, marks, shown)


def density(item: Computed, plan: Plan) -> Folded:
    """Return the exponent with which the density of spikes falls with distance; the densities as panels."""
    headings = [
        Heading("exponent", digits=2),
        Heading("spikes per head and step", digits=1),
        Heading("within 128 tokens", "% of spikes", 1),
    ]
    low, high = item.options["low"], item.options["high"]
    figure = _Figure(item, plan, headings, ["spikes"])
    panels: list[dict[str, Any]] = []
    for model in plan.models_of(item):
        outcome = figure.outcome(_analysis(item, plan, model), model, ["spikes"])
        if outcome is None:
            continue
        spikes, visible, distances = _by_distance(outcome)
        exponent, error = jackknifed(spikes, visible, distances)
        count, prompts = spikes.sum(1), len(spikes)
        near = 100 * spikes[:, distances < 128].sum(1) / np.maximum(count, 1e-9)
        for heading, numbers in zip(
            headings, ((exponent, error), mean_and_error(count), mean_and_error(near)), strict=True
        ):
            figure.add(model, "spikes", heading, *numbers, prompts)
        for text, bounds in (
            ("spikes become sparser with distance", (-math.inf, 0.0)),
            (f"their density falls as 1 / distance ({low:g} to {high:g})", (low, high)),
        ):
            known = known_error(error)
            figure.verdicts.append(decided_mean(text, model.title, exponent, known, prompts, *bounds))
        panels += _density_panels(model, outcome, spikes, visible, distances, exponent)
    return figure.folded(panels=panels)


def spikes_by_step(item: Computed, plan: Plan) -> Folded:
    """Return the share of a step's highest tokens that are among the highest of the next step; the steps as panels."""
    options = item.options
    highest, high = options["highest"], options["high"]
    heading = Heading(f"highest {highest} tokens shared by consecutive steps", "%", 1)
    drawn: list[list[dict[str, Any]]] = []
    columns: tuple[Column, ...] = (Column("mini", "mini"),) if plan.data == "mini" else options["data"]
    figure = _Figure(item, plan, [heading], [column.name for column in columns])
    for model in plan.models_of(item):
        for column in columns:
            run = analysis(model, (column,), {}, plan, prompts=options["prompts"], steps=options["steps"])
            outcome = figure.outcome(run, model, [column.name])
            if outcome is None:
                continue
            shares = [shared_share(of_steps, highest, tokens) for of_steps, tokens in _positions(outcome, 2)]
            numbers = 100 * np.array(shares)
            figure.add(
                model,
                column.name,
                heading,
                *(mean_and_error(numbers) if shares else (math.nan, math.nan)),
                len(numbers),
            )
            text = f"high positions change from step to step ({column.name}: fewer than {high:g} % are shared)"
            figure.verdicts.append(judged(text, model.title, numbers, 0.0, -math.inf, high, unit="% of them"))
            drawn.append(_step_panels(outcome, highest, f"{model.title}, {column.name}"))
    across = max(1, min(2, len(drawn)))
    panels = [
        panel
        for pair in (drawn[i : i + across] for i in range(0, len(drawn), across))
        for line in zip_longest(*pair)
        for panel in line
        if panel
    ]
    return figure.folded(panels=panels, across=across)


def sinks(item: Computed, plan: Plan) -> Folded:
    """Return the medians over heads of the attention of the sinks and of the newest tokens; the heads as box plots."""
    newest = item.options["newest"]
    names = ["token 0", "token 1", "tokens 0 and 1", f"newest {newest}", "all others"]
    heading = Heading("median over heads", digits=4)
    figure = _Figure(item, plan, [heading], names)
    boxes: dict[str, Any] = {}
    for model in plan.models_of(item):
        outcome = figure.outcome(_analysis(item, plan, model), model, names)
        if outcome is None:
            continue
        mass = outcome.exact["mass"]  # [N, L, Hq, K]
        near = mass[..., outcome.bins.newest(newest)].sum(-1)
        first = mass[..., :2].sum(-1)
        parts = [mass[..., 0], mass[..., 1], first, near, 1 - first - near]
        medians = {}
        for name, part in zip(names, parts, strict=True):
            medians[name] = np.median(part.reshape(len(part), -1), axis=1)
            figure.add(model, name, heading, *mean_and_error(medians[name]), len(part))
            label = name if len(plan.models_of(item)) == 1 else f"{model.title}\n{name}"
            boxes[label] = _five_digits(part.mean(0).ravel())
        text = f"the sinks' median is greater than that of the newest {newest} tokens' sum"
        figure.verdicts.append(judged(text, model.title, medians[names[2]], medians[names[3]], 0.0, math.inf))
    return figure.folded(boxes=boxes)


def jackknifed(spikes: np.ndarray, visible: np.ndarray, distances: np.ndarray) -> tuple[float, float]:
    """Return the exponent of the density of spikes over distance, and its jackknife error over prompts.

    Args:
        spikes: number per prompt and bin, ``[N, K]``.
        visible: number of visible tokens, likewise.
        distances: of the bins, ``[K]``.
    """
    whole = exponent_of(spikes.sum(0), visible.sum(0), distances)
    count = len(spikes)
    if count < 2:
        return whole, math.nan
    without = [
        exponent_of(np.delete(spikes, place, 0).sum(0), np.delete(visible, place, 0).sum(0), distances)
        for place in range(count)
    ]
    return whole, float(np.sqrt((count - 1) / count * np.sum((np.array(without) - np.mean(without)) ** 2)))


def exponent_of(spikes: np.ndarray, visible: np.ndarray, distances: np.ndarray) -> float:
    """Return the slope of log density over log distance by least squares; bins without a spike are left out."""
    known = (spikes > 0) & (visible > 0) & (distances > 0)
    if known.sum() < 2:
        return math.nan
    density_of = spikes[known] / visible[known]
    return float(np.polyfit(np.log(distances[known]), np.log(density_of), 1)[0])


def shared_share(of_steps: np.ndarray, highest: int, tokens: int) -> float:
    """Return the mean share of a step's `highest` tokens that are among the next step's; NaN with a single step.

    Args:
        of_steps: probability of each position, ``[steps, n]``.
        highest: number of tokens.
        tokens: only the positions from 2 to this one count (neither sinks nor tokens of the answer).
    """
    sets = [set((np.argsort(step[2:tokens])[-highest:] + 2).tolist()) for step in of_steps]
    return float(np.mean([len(a & b) / highest for a, b in pairwise(sets)])) if len(sets) > 1 else math.nan


def _analysis(item: Computed, plan: Plan, model: Model) -> Analysis:
    """Return the analysis that Figures 1, 3 and 8 and Table 4 share where they have the same model."""
    return analysis(
        model, item.options["data"], FOUR, plan, prompts=item.options["prompts"], steps=item.options["steps"]
    )


def _by_distance(outcome: Outcome) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return spikes and visible tokens per prompt and bin, mean over heads and steps, and the bins' distances."""
    behind = slice(outcome.bins.sinks, None)
    spikes = outcome.exact["spikes"][..., behind].mean((1, 2))
    visible = outcome.exact["visible"][..., behind].mean(1)
    edges = [*outcome.bins.edges, 2 * outcome.bins.edges[-1]]
    distances = np.array([0.0, *(math.sqrt(a * (b - 1)) for a, b in pairwise(edges[1:]))])
    return spikes, visible, distances


def _positions(outcome: Outcome, least: int) -> list[tuple[np.ndarray, int]]:
    """Return for each prompt with at least `least` steps its highest probabilities, and its number of prompt tokens."""
    tokens = {row["id"]: row["prompt_tokens"] for row in outcome.prompts}
    by_id = outcome.positions["highest"]
    return [(by_id[name], tokens[name]) for name in by_id if len(by_id[name]) >= least]


def _density_panels(
    model: Model, outcome: Outcome, spikes: np.ndarray, visible: np.ndarray, distances: np.ndarray, exponent: float
) -> list[dict[str, Any]]:
    of_steps = next(iter(outcome.positions["mean"].values()))
    totals, seen = spikes.sum(0), visible.sum(0)
    known = (totals > 0) & (distances > 0)
    x, y = distances[known], totals[known] / seen[known]
    line = y[0] * x[0] / x
    return [
        {
            "title": f"{model.title}: attention in one decode step",
            "x": "token position",
            "y": "mean attention probability",
            "length": of_steps.shape[1],
            "series": [_stems(of_steps[-1][2:])],
        },
        {
            "title": f"{model.title}: exponent {exponent:.2f}",
            "x": "distance to the query, tokens",
            "y": "spikes per visible token",
            "log": True,
            "series": [
                {"kind": "line", "x": _five_digits(x), "y": _five_digits(y), "label": "measured"},
                {"kind": "dashes", "x": _five_digits(x), "y": _five_digits(line), "label": "1 / distance"},
            ],
        },
    ]


def _step_panels(outcome: Outcome, highest: int, title: str) -> list[dict[str, Any]]:
    pairs = _positions(outcome, 2)
    if not pairs:
        return []
    of_steps, tokens = pairs[0]
    panels = []
    for number, step in enumerate(of_steps[:4]):
        scores = step[2:tokens]
        top = np.sort(np.argsort(scores)[-highest:])
        place = np.arange(2, tokens)
        panels.append(
            {
                "title": f"{title}: decode step {number + 1}",
                "x": "token position" if number == min(3, len(of_steps) - 1) else "",
                "y": "highest prob.",
                "length": tokens,
                "series": [
                    _stems(scores),
                    {"kind": "points", "x": place[top].tolist(), "y": _five_digits(scores[top])},
                ],
            }
        )
    return panels


def _stems(scores: np.ndarray) -> dict[str, Any]:
    """Return the series of the scores of positions 2, 3, ..., without those too small to be seen."""
    seen = np.flatnonzero(scores > 0.005 * scores.max())
    return {"kind": "stems", "x": (seen + 2).tolist(), "y": _five_digits(scores[seen])}


def _five_digits(numbers: np.ndarray) -> list[float]:
    return [float(f"{number:.5g}") for number in numbers]
