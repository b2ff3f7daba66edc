"""The runs of a grid, and the rows of those runs behind each of its cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.data import POINTS, columns_of, data_overrides, point_overrides, scaled
from experiments.fold.grid import Source, Sources
from experiments.fold.points import measured
from experiments.item import Column, Grid, Model
from experiments.item import Row as Setting
from experiments.plan import Plan
from experiments.runs import Outcome, Run, identify, run_of, samples

Place = tuple[str, str, str]


@dataclass(frozen=True)
class Cause:
    """The reason why a cell has no run."""

    reason: str


def runs_of(item: Grid, plan: Plan) -> dict[Place, Run | Cause]:
    """Return the run behind each cell: (model title, row, column) -> run, or the reason why there is none."""
    by_place: dict[Place, Run | Cause] = {}
    columns = columns_of(item, plan)
    for model in plan.models_of(item):
        points = [scaled(column, plan, model) for column in columns if column.data == POINTS]
        for row in item.rows:
            for column in columns:
                place = (model.title, row.name, column.name)
                if row.setting is None:
                    by_place[place] = Cause(row.absent)
                elif column.data == POINTS:
                    alike = [c for c in points if c.options == column.options]
                    data = point_overrides(alike, plan, model)
                    by_place[place] = run_of(row.timed or row.setting, model.preset, data, plan, row.options)
                else:
                    data = data_overrides(column, plan, model)
                    by_place[place] = run_of(setting_of(row, plan), model.preset, data, plan, row.options)
    return by_place


def setting_of(row: Setting, plan: Plan) -> str:
    """Return the setting of a row's answers under a plan."""
    assert row.setting is not None
    return (row.small if plan.data != "paper" else "") or row.setting


def sources_of(item: Grid, plan: Plan, outcomes: Mapping[Run, Outcome]) -> Sources:
    """Return the rows behind each cell.

    Points that were measured elsewhere (``results/h200/papers``) come before runs of this machine, where the plan asks
    for the paper's models.

    Args:
        item: the grid.
        plan: the command line's choices.
        outcomes: what became of the runs of this session; others are looked for on disk.
    """
    columns = {column.name: column for column in columns_of(item, plan)}
    models = {model.title: model for model in plan.models_of(item)}
    rows = {row.name: row for row in item.rows}
    sources: dict[Place, Source] = {}
    for place, run in runs_of(item, plan).items():
        model, row, column = models[place[0]], rows[place[1]], columns[place[2]]
        elsewhere = _elsewhere(model, row, column, plan) if column.data == POINTS else None
        if elsewhere is not None:
            sources[place] = elsewhere
        elif isinstance(run, Cause):
            sources[place] = Source({}, reason=run.reason)
        else:
            sources[place] = _of_run(run, outcomes.get(run), plan, scaled(column, plan, model))
    return sources


def _elsewhere(model: Model, row: Setting, column: Column, plan: Plan) -> Source | None:
    """Return a point of the files in ``results/h200/papers``; None if none has it, or models are named."""
    if plan.models or row.setting is None:
        return None
    return measured(model.preset, row.timed or row.setting, column)


def _of_run(run: Run, outcome: Outcome | None, plan: Plan, column: Column) -> Source:
    name, reason = (outcome.id, outcome.reason) if outcome else ("", "")
    if not name:
        name, unknown = identify(run)
        reason = reason or unknown
    if not name:
        return Source({}, reason=reason)
    rows = {key: row for key, row in samples(plan.runs, name).items() if belongs(row, column)}
    device = sorted({row["measured"]["device"] for row in rows.values() if row.get("measured", {}).get("device")})
    return Source(rows, (name,) if rows else (), "" if rows else reason or "not run", ", ".join(device))


def belongs(row: Mapping[str, object], column: Column) -> bool:
    """Return True if a row of a run is one of a column: of its task, or its point."""
    if column.data == POINTS:
        record = (row.get("measured") or {}).get("point") or {}  # type: ignore[attr-defined]
        return record.get("prompt") == column.prompt and record.get("batch") == column.batch
    return not column.task or row["task"] == column.task
