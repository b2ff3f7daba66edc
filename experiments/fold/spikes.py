"""Exact attention as cells and arrays: spikes by distance, from step to step, and sinks (LogQuant's Figures 1 to 3)."""

from __future__ import annotations

import math
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from experiments.fold.analyses import Analysis, analysis, notes
from experiments.fold.attention import judged, marks
from experiments.fold.cells import Cell, Folded, Heading, Verdict, interval_fields
from experiments.fold.claims import decided
from experiments.item import Column, Computed, Model
from experiments.logquant.attention import FOUR
from experiments.plan import Plan
from kvbench.analysis.outcome import Outcome, mean_and_error
from kvbench.metrics import intervals


def density(item: Computed, plan: Plan) -> Folded:
    """Return the exponent with which the density of spikes falls with distance; the densities as panels."""
    headings = [
        Heading(name="exponent", digits=2),
        Heading(name="spikes per head and step", digits=1),
        Heading(name="within 128 tokens", unit="% of spikes", digits=1),
    ]
    low, high = item.options["low"], item.options["high"]
    cells: list[Cell] = []
    verdicts: list[Verdict] = []
    panels: list[dict[str, Any]] = []
    analyses = {}
    for model in plan.models_of(item):
        run = analyses[model.title] = _analysis(item, plan, model)
        if run.outcome is None:
            cells += [Cell(model=model.title, row="spikes", column=h.name, reason=run.reason) for h in headings]
            continue
        spikes, visible, distances = _by_distance(run.outcome)
        exponent, error = jackknifed(spikes, visible, distances)
        count = spikes.sum(1)
        near = 100 * spikes[:, distances < 128].sum(1) / np.maximum(count, 1e-9)
        figures = [(exponent, error), mean_and_error(count), mean_and_error(near)]
        cells += [
            _spike_cell(model, "spikes", heading, number, spread, len(spikes), run)
            for heading, (number, spread) in zip(headings, figures, strict=True)
        ]
        for text, bounds in (
            ("spikes become sparser with distance", (-math.inf, 0.0)),
            (f"their density falls as 1 / distance ({low:g} to {high:g})", (low, high)),
        ):
            known = None if math.isnan(error) else error
            verdicts.append(_verdict(text, model, exponent, known, len(spikes), *bounds))
        panels += _density_panels(model, run.outcome, spikes, visible, distances, exponent)
    return Folded(
        headings=headings,
        rows=["spikes"],
        models=[model.title for model in plan.models_of(item)],
        cells=cells,
        verdicts=verdicts,
        notes=notes(item, plan, *analyses.values()),
        marks=marks(plan),
        arrays={"panels": panels} if panels else {},
    )


def spikes_by_step(item: Computed, plan: Plan) -> Folded:
    """Return the share of a step's highest tokens that are among the highest of the next step; the steps as panels."""
    highest, high = item.options["highest"], item.options["high"]
    heading = Heading(name=f"highest {highest} tokens shared by consecutive steps", unit="%", digits=1)
    cells: list[Cell] = []
    verdicts: list[Verdict] = []
    drawn: list[list[dict[str, Any]]] = []
    analyses: list[Analysis] = []
    data: tuple[Column, ...] = item.options["data"]
    columns = (Column(name="mini", data="mini"),) if plan.data == "mini" else data
    for model in plan.models_of(item):
        for column in columns:
            run = analysis(model, (column,), {}, plan, prompts=item.options["prompts"], steps=item.options["steps"])
            analyses.append(run)
            if run.outcome is None:
                cells.append(Cell(model=model.title, row=column.name, column=heading.name, reason=run.reason))
                continue
            shares = [shared_share(of_steps, highest, tokens) for of_steps, tokens in _positions(run.outcome, 2)]
            numbers = 100 * np.array(shares)
            figure = mean_and_error(numbers) if shares else (math.nan, math.nan)
            cells.append(_spike_cell(model, column.name, heading, *figure, len(numbers), run))
            text = f"high positions change from step to step ({column.name}: fewer than {high:g} % are shared)"
            verdicts.append(judged(text, model.title, numbers, 0.0, -math.inf, high, unit="% of them"))
            drawn.append(_step_panels(run.outcome, highest, f"{model.title}, {column.name}"))
    across = max(1, min(2, len(drawn)))
    panels = [
        panel
        for pair in (drawn[i : i + across] for i in range(0, len(drawn), across))
        for line in zip_longest(*pair)
        for panel in line
        if panel
    ]
    return Folded(
        headings=[heading],
        rows=[column.name for column in columns],
        models=[model.title for model in plan.models_of(item)],
        cells=cells,
        verdicts=verdicts,
        notes=notes(item, plan, *analyses),
        marks=marks(plan),
        arrays={"panels": panels, "across": across} if panels else {},
    )


def sinks(item: Computed, plan: Plan) -> Folded:
    """Return the medians over heads of the attention of the sinks and of the newest tokens; the heads as box plots."""
    newest = item.options["newest"]
    names = ["token 0", "token 1", "tokens 0 and 1", f"newest {newest}", "all others"]
    heading = Heading(name="median over heads", digits=4)
    cells: list[Cell] = []
    verdicts: list[Verdict] = []
    boxes: dict[str, Any] = {}
    analyses = {}
    for model in plan.models_of(item):
        run = analyses[model.title] = _analysis(item, plan, model)
        if run.outcome is None:
            cells += [Cell(model=model.title, row=name, column=heading.name, reason=run.reason) for name in names]
            continue
        mass = run.outcome.exact["mass"]  # [N, L, Hq, K]
        near = mass[..., run.outcome.bins.newest(newest)].sum(-1)
        first = mass[..., :2].sum(-1)
        parts = [mass[..., 0], mass[..., 1], first, near, 1 - first - near]
        medians = {}
        for name, part in zip(names, parts, strict=True):
            medians[name] = np.median(part.reshape(len(part), -1), axis=1)
            cells.append(_spike_cell(model, name, heading, *mean_and_error(medians[name]), len(part), run))
            label = name if len(plan.models_of(item)) == 1 else f"{model.title}\n{name}"
            boxes[label] = _five_digits(part.mean(0).ravel())
        text = f"the sinks' median is greater than that of the newest {newest} tokens' sum"
        verdicts.append(judged(text, model.title, medians[names[2]], medians[names[3]], 0.0, math.inf))
    return Folded(
        headings=[heading],
        rows=names,
        models=[model.title for model in plan.models_of(item)],
        cells=cells,
        verdicts=verdicts,
        notes=notes(item, plan, *analyses.values()),
        marks=marks(plan),
        arrays={"boxes": boxes} if boxes else {},
    )


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


def _spike_cell(
    model: Model, row: str, heading: Heading, number: float, error: float, count: int, run: Analysis
) -> Cell:
    place: dict[str, Any] = {"model": model.title, "row": row, "column": heading.name}
    if math.isnan(number):
        return Cell(**place, reason="too few spikes, or too few decode steps, for this figure", runs=(run.id,))
    known = None if math.isnan(error) else error
    return Cell(**place, ours=number, stderr=known, n=count, runs=(run.id,), **interval_fields(number, known, count))


def _verdict(
    text: str, model: Model, number: float, error: float | None, count: int, low: float, high: float
) -> Verdict:
    ours = None if math.isnan(number) else number
    interval = None if ours is None else intervals.of_moments(ours, error, count)
    more = {"interval": interval, "stderr": error, "n": count, "widest": math.inf}
    return decided(text, model.title, ours, low, high, **more)


def _five_digits(numbers: np.ndarray) -> list[float]:
    return [float(f"{number:.5g}") for number in numbers]
