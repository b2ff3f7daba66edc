"""The runs of a grid, and the rows of those runs behind each of its cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.data import POINTS, Plan, columns_of, data_overrides, point_overrides, runs_here, scaled
from experiments.fold import forced
from experiments.fold.claims import APART
from experiments.fold.figures import FIGURES
from experiments.fold.grid import Source, Sources
from experiments.fold.points import point_source
from experiments.item import Column, Grid, Model
from experiments.item import Row as Setting
from experiments.runs import Run, RunOutcome, identify, run_of, samples, unfilled

Place = tuple[str, str, str]


@dataclass(frozen=True)
class Choice:
    """Runs of which a cell shows the one with the shortest time per token."""

    runs: tuple[Run, ...]


def runs_of(item: Grid, plan: Plan, *, missing: bool = False) -> dict[Place, Run | Choice | Source]:
    """Return the run behind each cell: (model title, row, column) -> run, or an empty source that says why not.

    With `missing`, the run of a point measures only those that were not measured elsewhere. It is the same run: which
    points it measures is no part of its id.
    """
    by_place: dict[Place, Run | Choice | Source] = {}
    columns = columns_of(item, plan)
    for model in plan.models_of(item):
        here = {column.name: runs_here(column, plan, model) for column in columns}
        runnable = [c for c in columns if c.data == POINTS and c.figure not in forced.FIGURES and not here[c.name]]
        runnable = [c for c in runnable if not (c.only and model in item.models and model.preset not in c.only)]
        for row in item.rows:
            for column in columns:
                place = (model.title, row.name, column.name)
                if row.setting is None:
                    by_place[place] = Source({}, reason=row.absent)
                elif column.only and model in item.models and model.preset not in column.only:
                    by_place[place] = Source({}, reason="not in the paper's table")
                elif column.figure in forced.FIGURES:
                    by_place[place] = Source({}, reason=f"not measured: {forced.COMMAND}")
                elif here[column.name]:
                    by_place[place] = Source({}, reason=here[column.name])
                elif column.data == POINTS:
                    wanted = [c for c in runnable if not missing or _elsewhere(model, row, c, plan) is None]
                    points = [scaled(c, plan, model) for c in wanted]
                    own = conditions(scaled(column, plan, model))
                    same = [c for c in points if conditions(c) == own]
                    if not same:
                        by_place[place] = Source({}, reason="measured elsewhere")
                        continue
                    data = point_overrides(same, model)
                    by_place[place] = run_of(row.timed or row.setting, model.preset, data, plan, row.options)
                else:
                    data = data_overrides(column, plan, model)
                    settings = row.choices or (setting_of(row, plan),)
                    runs = tuple(run_of(setting, model.preset, data, plan, row.options) for setting in settings)
                    by_place[place] = Choice(runs) if row.choices else runs[0]
    return by_place


def missing_runs(item: Grid, plan: Plan) -> list[Run]:
    """Return the runs of an item, each once, in the order of its cells; points measured elsewhere need none."""
    columns = {column.name: column for column in columns_of(item, plan)}
    models = {model.title: model for model in plan.models_of(item)}
    rows = {row.name: row for row in item.rows}
    wanted = []
    for (model, row, column), run in runs_of(item, plan, missing=True).items():
        if isinstance(run, Choice):
            wanted += run.runs
        elif isinstance(run, Run) and _elsewhere(models[model], rows[row], columns[column], plan) is None:
            wanted.append(run)
    return list(dict.fromkeys(wanted))


def conditions(column: Column) -> tuple[object, ...]:
    """Return what the points of one run share."""
    return column.options, column.new_tokens, column.memory_gb


def setting_of(row: Setting, plan: Plan) -> str:
    """Return the setting of a row's answers under a plan."""
    assert row.setting is not None
    return {"paper": "", "real": row.real}.get(plan.data, row.small) or row.setting


def sources_of(item: Grid, plan: Plan, outcomes: Mapping[Run, RunOutcome]) -> Sources:
    """Return the rows behind each cell.

    Points that were measured elsewhere (``results/h200/papers``) come before runs of this machine, where the plan asks
    for the paper's models. Runs that are not among the `outcomes` of this session are looked for on disk.
    """
    columns = {column.name: column for column in columns_of(item, plan)}
    models = {model.title: model for model in plan.models_of(item)}
    rows = {row.name: row for row in item.rows}
    sources: dict[Place, Source] = {}
    for place, run in runs_of(item, plan).items():
        model, row, column = models[place[0]], rows[place[1]], columns[place[2]]
        elsewhere = _elsewhere(model, row, column, plan)
        if elsewhere is not None:
            sources[place] = elsewhere
        elif isinstance(run, Source):
            sources[place] = run
        elif isinstance(run, Choice):
            sources[place] = _fastest(run, row, outcomes, plan, column)
        else:
            sources[place] = _of_run(run, outcomes.get(run), plan, scaled(column, plan, model))
    return sources


def _elsewhere(model: Model, row: Setting, column: Column, plan: Plan) -> Source | None:
    """Return a point of the files in ``results/h200/papers``; None if none has it, or models are named."""
    if column.data != POINTS or plan.models or row.setting is None:
        return None
    if column.only and model.preset not in column.only:
        return None
    if column.figure in forced.FIGURES:
        return forced.forced_source(model.preset, forced.case_of(row.setting), scaled(column, plan, model))
    return point_source(model.preset, row.timed or row.setting, scaled(column, plan, model))


def _of_run(run: Run, outcome: RunOutcome | None, plan: Plan, column: Column) -> Source:
    name, reason = (outcome.id, outcome.reason) if outcome else ("", "")
    if plan.data == "real" and (not name or not samples(plan.runs, name)):  # a fold alone has no outcomes
        asked = tuple(text for text in run.overrides if text.startswith(("model", "dataset")))
        short = unfilled(asked) if "dataset.lengths" in run.given else ""
        if short:
            return Source({}, reason=f"{APART}: {short}")
    if not name:
        name, unknown = identify(run)
        reason = reason or unknown
    if not name:
        return Source({}, reason=reason)
    whole = samples(plan.runs, name)
    rows = {key: row for key, row in whole.items() if belongs(row, column)}
    device = sorted({row["measured"]["device"] for row in rows.values() if row.get("measured", {}).get("device")})
    if column.data == POINTS and out_of_memory(whole.values(), column):
        return Source({}, (name,), "out of memory" + (f" on {device[0]}" if device else ""))
    note = " and ".join(device) + (" (some samples each)" if len(device) > 1 else "")
    return Source(rows, (name,) if rows else (), "" if rows else reason or "not run", note)


def _fastest(choice: Choice, row: Setting, outcomes: Mapping[Run, RunOutcome], plan: Plan, column: Column) -> Source:
    """Return the source with the shortest time per token over the samples that one machine made for all of them."""
    sources = [_of_run(run, outcomes.get(run), plan, column) for run in choice.runs]
    shared = _made_together(sources)
    times: dict[int, float] = {}
    for number, source in enumerate(sources):
        figure = FIGURES["seconds_per_token"]([source.rows[key] for key in sorted(shared)]) if shared else None
        if figure is not None:
            times[number] = figure.value
    if len(times) < len(sources):
        return next((source for source in sources if not source.rows), Source({}, reason="no time per token"))
    best = min(times, key=times.__getitem__)
    note = f"best of {len(sources)}: {row.choices[best]}"
    return replace(sources[best], note=f"{note}; {sources[best].note}" if sources[best].note else note)


def _made_together(sources: Sequence[Source]) -> set[str]:
    """Return the samples that all sources have from one machine, the machine with most of them."""
    by_machine: dict[str, set[str]] = {}
    for key in set.intersection(*(set(source.rows) for source in sources)):
        measured = [source.rows[key].get("measured") or {} for source in sources]
        machines = {str(one.get("device", "")) for one in measured}
        if all(measured) and len(machines) == 1:
            by_machine.setdefault(machines.pop(), set()).add(key)
    return max((by_machine[name] for name in sorted(by_machine)), key=len, default=set())


def belongs(row: Mapping[str, Any], column: Column) -> bool:
    """Return True if a row of a run is one of a column: of its task, or its point."""
    if column.data == POINTS:
        record = row["measured"].get("point") or {}
        return (record.get("prompt"), record.get("batch")) == (column.prompt, column.batch)
    return not column.task or row["task"] == column.task


def out_of_memory(rows: Iterable[Mapping[str, Any]], column: Column) -> bool:
    """Return True if a column's point, or a smaller batch of its prompt length, did not fit into memory."""
    records = [row["measured"].get("point") or {} for row in rows]
    ended = [
        record["batch"] for record in records if record.get("status") == "oom" and record["prompt"] == column.prompt
    ]
    return bool(ended) and min(ended) <= column.batch
