"""The meaning of ``--data paper|real|mini|standin`` for the columns of an item, as overrides of kvbench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from experiments import standin
from experiments.fold.figures import SPEEDS
from experiments.item import Column, Grid, Group, Item, Model
from experiments.runs import given_of
from kvbench.util.confdir import group_options

DataChoice = Literal["paper", "real", "mini", "standin"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choices of a command line.

    Args:
        models: ``model=`` values in place of the item's models; empty: the paper's models.
        data: ``paper``: the paper's data sets; ``real``: the same for another trained model, without times and at
            its own context; ``mini``: the bundled tasks in place of an item's data sets; ``standin``: generated
            records in each benchmark's layout, to try the format only.
        limit: samples per data set (with mini: per task); None: all.
        max_new_tokens: limit of an answer; None: each data set's own.
        paths: ``dataset.path`` of data sets by their choice, for files that are on this machine.
        lengths: prompt lengths in place of a data set's or item's; empty: those that fit the model.
        device: ``runtime.device``.
        batch: prompts at a time, where nothing is timed or drafted; the papers have 1.
        rerun: True to make samples of older code anew (``runtime.rerun``).
        fold_only: make tables of what exists, and compute nothing.
        runs: folder of the runs, which the main command line shares (``runtime.results_dir``).
        out: folder of tables and figures.
        write: True to write them below results/, and docs/reproduce.md; else they are trials.
        replace: True to replace tables of more samples, too.
    """

    models: tuple[str, ...] = ()
    data: DataChoice = "paper"
    limit: int | None = None
    max_new_tokens: int | None = None
    paths: tuple[tuple[str, str], ...] = ()
    lengths: tuple[int, ...] = ()
    device: str = "auto"
    batch: int = 1
    rerun: bool = False
    fold_only: bool = False
    runs: Path = Path("results/runs")
    out: Path = Path("results")
    write: bool = False
    replace: bool = False

    def models_of(self, item: Item) -> tuple[Model, ...]:
        """Return the models of an item: those of the command line, or the paper's."""
        if not self.models:
            return item.models
        own = {model.preset: model for model in item.models}
        return tuple(own.get(name, Model(name)) for name in self.models)

    def compares(self, item: Item, model: Model) -> bool:
        """Return True if figures of `model` may be set against the paper's: its own model on its own data."""
        return self.data == "paper" and model in item.models

    def folder(self, item: Item) -> Path:
        """Return the folder of an item's table and figure: the item's own, or one below it for other models or data."""
        if not self.models and self.data == "paper":
            return self.out / item.id
        name = "+".join(text.replace("/", "_") for text in self.models) or "paper-models"
        return self.out / item.id / f"{name}-{self.data}"


#: choice of ``conf/dataset`` for points of time and memory
POINTS = "efficiency"
#: option of points whose times count: steps are compiled, as an engine's would be (not those of tiny, on a CPU)
COMPILED = "runtime.compile=true"
#: tokens of a point's prompt and answer with tiny
SHORT_PROMPT, SHORT_NEW = 1024, 16
#: largest batch of a point with tiny
SMALL_BATCH = 4


def columns_of(item: Grid, plan: Plan) -> tuple[Column, ...]:
    """Return the columns of an item under a plan.

    With ``mini`` its data sets are replaced by the bundled tasks; with ``real`` the columns of time and memory are
    left out, which are of the lengths and sizes of other models.
    """
    if plan.data == "real":
        kept = item.columns if item.real is None else item.real
        return tuple(column for column in kept if column.data != POINTS and column.figure not in SPEEDS)
    if plan.data != "mini":
        return item.columns
    points = tuple(column for column in item.columns if column.data == POINTS and not item.no_points)
    if item.no_points:
        return item.mini
    return (*item.mini, *points) if len(points) < len(item.columns) else points


def groups_of(item: Grid, plan: Plan) -> tuple[Group, ...]:
    """Return the groups of an item under a plan; with ``real`` those of which all columns are there."""
    if plan.data == "real":
        names = {column.name for column in columns_of(item, plan)}
        return tuple(group for group in item.groups if names.issuperset(group.columns))
    return item.groups if plan.data != "mini" or item.mini_groups is None else item.mini_groups


def data_overrides(column: Column, plan: Plan, model: Model) -> list[str]:
    """Return the overrides that choose a column's data set, other than points of time and memory."""
    if column.over:
        return [f"dataset={column.data}", *_answers_of(column, plan, model)]
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
    if plan.batch > 1 and column.figure not in (*SPEEDS, "acceptance"):
        texts.append(f"runtime.batch_size={plan.batch}")
    return texts


def _answers_of(column: Column, plan: Plan, model: Model) -> list[str]:
    """Return the overrides that have fp16's answers to the prompts of another data set decoded.

    Their limit and their files are options of that data set.
    """
    inner = data_overrides(replace(column, data=column.over, over=""), plan, model)[1:]
    prefix = "dataset."
    options = [text.removeprefix(prefix).replace("=", ": ", 1) for text in inner if text.startswith(prefix)]
    others = [text for text in inner if not text.startswith(prefix)]
    return [f"dataset.over={column.over}", f"dataset.options={{{', '.join(options)}}}", *others]


def _fitted(texts: list[str], column: Column, plan: Plan, model: Model) -> list[str]:
    """Return overrides whose prompt lengths, or windows of perplexity, fit the model's context.

    Lengths of the command line come first; longer ones than the context are scaled to fit (with tiny, which is for
    small scales, to :data:`SHORT_PROMPT`).
    """
    data = choice_data("dataset", column.data)
    given = given_of(texts)
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
    given = given_of(texts)
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
    given = given_of(texts)
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


def runs_here(column: Column, plan: Plan, model: Model) -> str:
    """Return the reason why a column is not run with a model; empty if it is."""
    if longer := too_long(column, plan, model):
        return f"not comparable: {longer}"
    if column.data == POINTS and model.preset == "tiny" and column.batch > SMALL_BATCH:
        return f"with tiny, batches up to {SMALL_BATCH} are run"
    return ""


def too_long(column: Column, plan: Plan, model: Model) -> str:
    """Return in what a column's prompts exceed a model's context with ``real``; empty if they do not.

    A prompt as long as the context is shortened by the answer that has to fit behind it; a longer one is not run.
    """
    texts = given_of(column.options).get("dataset.lengths")
    if plan.data != "real" or not texts or plan.lengths:
        return ""
    longest, context = max(yaml.safe_load(texts)), context_of(model.preset)
    return f"prompts of {longest:,} tokens, and {model.title} reads {context:,}" if longest > context else ""


def point_overrides(columns: Sequence[Column], model: Model) -> list[str]:
    """Return the overrides of the one run that measures the points of `columns`, all under the same conditions."""
    first = columns[0]
    prompts, batches = (sorted({getattr(column, key) for column in columns}) for key in ("prompt", "batch"))
    texts = [f"dataset={POINTS}", *first.options]
    texts += [f"dataset.prompts={_list(prompts)}", f"dataset.batches={_list(batches)}"]
    texts += [f"dataset.new_tokens={first.new_tokens}", "dataset.repeats=1"]
    if first.memory_gb is not None:
        texts.append(f"runtime.memory_limit_gb={first.memory_gb:g}")
    if model.preset == "tiny":
        return [text for text in texts if text != COMPILED]
    return [*texts, "model.weights=random", "model.dtype=bfloat16"]  # neither time nor memory depends on the weights


@cache
def choice_data(group: str, choice: str) -> dict[str, Any]:
    """Return a choice of ``conf/`` as plain data; empty for anything else that ``model=`` takes."""
    path: Path | None = group_options(group).get(choice)
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
    return content


def context_of(model: str) -> int:
    """Return the context of a model in tokens; 4096 where its files would have to be read."""
    return int(choice_data("model", model).get("max_length") or 4096)
