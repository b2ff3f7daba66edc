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
#: tokens of a point's prompt with a model whose context is shorter than the paper's points
SHORT_PROMPT, SHORT_NEW = 1024, 16


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
    if plan.limit is not None:
        texts.append(f"dataset.limit={plan.limit}")
    if plan.max_new_tokens is not None:
        texts.append(f"decoding.max_new_tokens={plan.max_new_tokens}")
    return texts


def scaled(column: Column, plan: Plan, model: Model) -> Column:
    """Return a column of time and memory whose point fits the model's context; a long one is shortened."""
    prompt, new = column.prompt, column.new_tokens
    if plan.lengths:
        prompt = plan.lengths[-1] if prompt > plan.lengths[-1] else prompt
    elif model.preset == "tiny" and prompt > SHORT_PROMPT:
        prompt = SHORT_PROMPT
    if model.preset == "tiny":
        new = min(new, SHORT_NEW)
    if plan.max_new_tokens is not None:
        new = max(2, min(new, plan.max_new_tokens))
    return replace(column, prompt=prompt, new_tokens=new)


def point_overrides(columns: Sequence[Column], plan: Plan, model: Model) -> list[str]:
    """Return the overrides of the one run that measures the points of `columns`, all with as many new tokens."""
    prompts, batches = (sorted({getattr(column, key) for column in columns}) for key in ("prompt", "batch"))
    texts = [f"dataset={POINTS}", *columns[0].options]
    texts += [f"dataset.prompts=[{','.join(map(str, prompts))}]", f"dataset.batches=[{','.join(map(str, batches))}]"]
    texts += [f"dataset.new_tokens={columns[0].new_tokens}", "dataset.repeats=1"]
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
