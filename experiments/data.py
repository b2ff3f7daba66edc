"""The meaning of ``--data paper|mini|standin`` for the columns of an item, as overrides of kvbench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from experiments import standin
from experiments.item import Column, Grid, Model
from experiments.plan import Plan
from kvbench.util.confdir import options

#: choice of ``conf/dataset`` for points of time and memory
POINTS = "efficiency"
#: tokens of a point's prompt and answer with tiny
SHORT_PROMPT, SHORT_NEW = 1024, 16
#: largest batch of a point with tiny
SMALL_BATCH = 4


def columns_of(item: Grid, plan: Plan) -> tuple[Column, ...]:
    """Return the columns of an item under a plan: with ``mini`` its data sets are replaced by the bundled tasks."""
    if plan.data != "mini":
        return item.columns
    points = tuple(column for column in item.columns if column.data == POINTS)
    return (*item.mini, *points) if len(points) < len(item.columns) else points


def data_overrides(column: Column, plan: Plan, model: Model) -> list[str]:
    """Return the overrides that choose a column's data set, other than points of time and memory."""
    texts = [f"dataset={column.data}", *column.options]
    if column.data == "mini":  # one run for all its columns: they share the five tasks of the preset
        if plan.lengths:
            texts.append(f"dataset.lengths=[{','.join(map(str, plan.lengths))}]")
    elif column.task:
        texts.append(f"dataset.tasks=[{column.task}]")
    if plan.data == "standin" and column.data in standin.LAYOUTS:
        texts += standin.overrides(column, plan, context_of(model.preset))
    elif column.data in dict(plan.paths):
        texts.append(f"dataset.path={dict(plan.paths)[column.data]}")
    if plan.limit is not None:
        texts.append(f"dataset.limit={plan.limit}")
    if plan.max_new_tokens is not None:
        texts.append(f"decoding.max_new_tokens={plan.max_new_tokens}")
    return texts


def scaled(column: Column, plan: Plan, model: Model) -> Column:
    """Return a column of time and memory as it is for a model: with tiny, short prompts, and MiB in place of GiB."""
    if column.data != POINTS:
        return column
    prompt, new = column.prompts.get(model.preset, column.prompt), column.new_tokens
    small = model.preset == "tiny"
    limit = column.memory_gb
    if small:
        prompt, new, limit = min(prompt, SHORT_PROMPT), min(new, SHORT_NEW), None
    if plan.lengths:
        prompt = min(prompt, max(plan.lengths))
    if plan.max_new_tokens is not None:
        new = max(2, min(new, plan.max_new_tokens))
    changed = replace(column, prompt=prompt, new_tokens=new, memory_gb=limit)
    if small and column.unit == "GiB":
        changed = replace(changed, unit="MiB", scale=1024 * column.scale)
    return changed


def runs_here(column: Column, model: Model) -> str:
    """Return the reason why a point is not run with a model; empty if it is."""
    if column.data == POINTS and model.preset == "tiny" and column.batch > SMALL_BATCH:
        return f"with tiny, batches up to {SMALL_BATCH} are run"
    return ""


def point_overrides(columns: Sequence[Column], model: Model) -> list[str]:
    """Return the overrides of the one run that measures the points of `columns`, all under the same conditions."""
    first = columns[0]
    prompts, batches = (sorted({getattr(column, key) for column in columns}) for key in ("prompt", "batch"))
    texts = [f"dataset={POINTS}", *first.options]
    texts += [f"dataset.prompts=[{','.join(map(str, prompts))}]", f"dataset.batches=[{','.join(map(str, batches))}]"]
    texts += [f"dataset.new_tokens={first.new_tokens}", "dataset.repeats=1"]
    if first.memory_gb is not None:
        texts.append(f"runtime.memory_limit_gb={first.memory_gb:g}")
    if model.preset != "tiny":  # neither time nor memory depends on the weights
        texts.append("model.weights=random")
    return texts


@cache
def preset(group: str, choice: str) -> dict[str, Any]:
    """Return a choice of ``conf/`` as plain data; empty for anything else that ``model=`` takes."""
    path: Path | None = options(group).get(choice)
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
    return content


def context_of(model: str) -> int:
    """Return the context of a model in tokens; 4096 where its files would have to be read."""
    return int(preset("model", model).get("max_length") or 4096)
