"""The meaning of ``--data paper|mini|standin`` for the columns of an item, as overrides of kvbench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from experiments import standin
from experiments.item import Column, Grid, Group, Model
from experiments.plan import Plan
from kvbench.util.confdir import group_options

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
    points = tuple(column for column in item.columns if column.data == POINTS and not item.no_points)
    if item.no_points:
        return item.mini
    return (*item.mini, *points) if len(points) < len(item.columns) else points


def groups_of(item: Grid, plan: Plan) -> tuple[Group, ...]:
    """Return the groups of an item under a plan."""
    return item.groups if plan.data != "mini" or item.mini_groups is None else item.mini_groups


def data_overrides(column: Column, plan: Plan, model: Model) -> list[str]:
    """Return the overrides that choose a column's data set, other than points of time and memory."""
    texts = [f"dataset={column.data}", *column.options]
    if column.data == "mini":  # one run for all its columns: they share the five tasks of the preset
        if plan.lengths:
            texts.append(f"dataset.lengths={_list(plan.lengths)}")
    elif column.task:
        texts.append(f"dataset.tasks=[{column.task}]")
    texts = _fitted(texts, column, plan, model)
    texts += _unlimited(texts, column, model)
    if plan.data == "standin" and column.data in standin.LAYOUTS:
        texts.append(f"dataset.path={standin.path(column.data, column.task, plan.runs, context_of(model.preset))}")
        if "warm_up" in choice_data("dataset", column.data):
            texts.append("dataset.warm_up=0")
    elif column.data in dict(plan.paths):
        texts.append(f"dataset.path={dict(plan.paths)[column.data]}")
    if plan.limit is not None:
        texts.append(f"dataset.limit={plan.limit}")
    if plan.max_new_tokens is not None and "window" not in choice_data("dataset", column.data):
        texts.append(f"decoding.max_new_tokens={plan.max_new_tokens}")
    return texts


def _fitted(texts: list[str], column: Column, plan: Plan, model: Model) -> list[str]:
    """Return overrides whose prompt lengths, or windows of perplexity, fit the model's context.

    Lengths of the command line come first; longer ones than the context are scaled to fit (with tiny, which is for
    small scales, to :data:`SHORT_PROMPT`).
    """
    data = choice_data("dataset", column.data)
    given = {text.partition("=")[0]: text.partition("=")[2] for text in texts}
    room = context_of(model.preset) - int(plan.max_new_tokens or data.get("max_new_tokens") or 0)
    most = SHORT_PROMPT if model.preset == "tiny" else room
    if column.data != "mini" and "lengths" in data:
        lengths = yaml.safe_load(given.get("dataset.lengths", "null")) or data["lengths"]
        fitting = sorted({min(length, most) for length in plan.lengths or lengths})
        if fitting != list(lengths):
            return [*(t for t in texts if not t.startswith("dataset.lengths=")), f"dataset.lengths={_list(fitting)}"]
    if "window" in data:
        window = int(given.get("dataset.window", data["window"]))
        wanted = min(max(plan.lengths) if plan.lengths else window, most)
        if wanted != window:
            return [*(t for t in texts if not t.startswith("dataset.window=")), f"dataset.window={wanted}"]
    return texts


def _unlimited(texts: list[str], column: Column, model: Model) -> list[str]:
    """Return the override that lets prompts of a fixed length fill the context, where they exceed the prompt limit.

    The limit is LongBench's rule for cutting prompts, which are never cut to a fixed length.
    """
    given = {text.partition("=")[0]: text.partition("=")[2] for text in texts}
    data, limit = choice_data("dataset", column.data), choice_data("model", model.preset).get("prompt_limit")
    if column.data == "mini" or "lengths" not in data or not limit:
        return []
    lengths = yaml.safe_load(given.get("dataset.lengths", "null")) or data["lengths"]
    return ["model.prompt_limit=null"] if max(lengths) > limit else []


def shortened(column: Column, plan: Plan, model: Model) -> str:
    """Return what differs in the lengths of a column's prompts from the paper's; empty if nothing does."""
    if column.data == POINTS:
        ours = scaled(column, plan, model)
        published = column.prompts.get(model.preset, column.prompt)
        if (ours.prompt, ours.new_tokens) == (published, column.new_tokens):
            return ""
        return f"{column.data} {ours.prompt} + {ours.new_tokens} tokens in place of {published} + {column.new_tokens}"
    texts = [f"dataset={column.data}", *column.options]
    fitted = _fitted(texts, column, plan, model)
    if fitted == texts:
        return ""
    given = {text.partition("=")[0]: text.partition("=")[2] for text in texts}
    key, _, value = fitted[-1].partition("=")
    before = given.get(key) or choice_data("dataset", column.data)[key.partition(".")[2]]
    return f"{column.data} {value} tokens in place of {before}"


def _list(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


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
    texts += [f"dataset.prompts={_list(prompts)}", f"dataset.batches={_list(batches)}"]
    texts += [f"dataset.new_tokens={first.new_tokens}", "dataset.repeats=1"]
    if first.memory_gb is not None:
        texts.append(f"runtime.memory_limit_gb={first.memory_gb:g}")
    if model.preset != "tiny":  # neither time nor memory depends on the weights
        texts.append("model.weights=random")
    return texts


@cache
def choice_data(group: str, choice: str) -> dict[str, Any]:
    """Return a choice of ``conf/`` as plain data; empty for anything else that ``model=`` takes."""
    path: Path | None = group_options(group).get(choice)
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
    return content


def context_of(model: str) -> int:
    """Return the context of a model in tokens; 4096 where its files would have to be read."""
    return int(choice_data("model", model).get("max_length") or 4096)
