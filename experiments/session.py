"""A session of ``python -m experiments``: the runs of several items, each made once, and then their folds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.data import POINTS, Plan, columns_of, shortened
from experiments.draw.table import item_markdown
from experiments.fold.cells import Folded
from experiments.fold.grid import Sources, fold_grid, shared_counts
from experiments.fold.sources import missing_runs, setting_of, sources_of
from experiments.item import Computed, Grid, Item
from experiments.real.files import file_notes
from experiments.runs import Launcher, Run, RunOutcome, execute_all
from experiments.write import write_item
from kvbench.errors import ConfigError, DataError, KvbenchError
from kvbench.results import code as codes
from kvbench.results.store import DONE, RunStore

#: encoders that stand in for Contriever, in words
ENCODERS = {"bm25": "BM25, which needs no weights", "minilm": "all-MiniLM-L6-v2"}
#: beginning of the folder's name of an analysis of attention
ANALYSIS = "attention-"


def states(item: Item, plan: Plan) -> list[str]:
    """Return a line for each result of an item below ``plan.out``: those of the paper's models and data first.

    A line has the models, the data and the limits of the result, the number of its cells that have a number, and how
    many of the runs behind it are missing below ``plan.runs``, were not completed, or were made by older code.
    """
    folder = plan.out / item.id
    paths = [folder / "cells.json", *sorted(folder.glob("*/cells.json"))]
    return [_item_state(item, path, plan) for path in paths if path.exists()]


def _item_state(item: Item, path: Path, plan: Plan) -> str:
    try:
        content = stored.content(path)
        cells = content["cells"]
        count = sum(cell["ours"] is not None for cell in cells)
        text = f"{scale(item, path.parent, content)}: {count} of {len(cells)} cell{'s' * (len(cells) != 1)}"
        names = {name for cell in cells for name in cell["runs"]}
    except DataError as error:
        return str(error).splitlines()[0]
    except (KeyError, TypeError, AttributeError) as error:  # JSON, but not a result
        return f"{path} is damaged: not the cells of an item ({type(error).__name__}: {error})."
    return "; ".join([text, *_faults(names, plan.runs)])


def scale(item: Item, folder: Path, content: Mapping[str, Any]) -> str:
    """Return models, data and limits of a result, for example ``tiny, mini, limit 4``, from its ``cells.json``.

    Files of older versions have no ``options``; their models are those of the folder's name.
    """
    options = content.get("options") or {}
    own = folder.name == item.id.partition("/")[2]
    named = "" if own else folder.name.removesuffix(f"-{content['data']}").replace("paper-models", "")
    models = ", ".join(options.get("models") or [named]) or "the paper's models"
    data = "the paper's data" if content["data"] == "paper" else content["data"]
    parts = [models, data]
    if content["limit"] is not None:
        parts.append(f"limit {content['limit']}")
    if options.get("max_new_tokens"):
        parts.append(f"max-new-tokens {options['max_new_tokens']}")
    if options.get("lengths"):
        parts.append(f"lengths {' '.join(map(str, options['lengths']))}")
    return ", ".join(parts)


def _faults(names: Iterable[str], runs: Path) -> Iterator[str]:
    """Yield what is wrong with what a result was folded from; nothing if all is well.

    That are, by name, runs and analyses below `runs`, and files with points of another machine.
    """
    files = {name for name in names if name.endswith(".json")}
    ids = sorted(set(names) - files)
    there = [name for name in ids if (runs / name).is_dir()]
    if len(there) < len(ids):
        yield f"{_of(len(ids) - len(there), len(ids))} not in {runs}"
    ages = [_age(runs, name) for name in there]
    ended = sum(age is None for age in ages)
    if ended:
        yield f"{_of(ended, len(ids))} incomplete"
    older = [age for age in ages if age]
    if older:
        parts = sorted({part for age in older for part in age}, key=codes.order)
        yield f"{_of(len(older), len(ids))} of {codes.older_code_remark(parts)}"
    if files:
        from experiments.fold.points import FOLDERS

        lost = sorted(name for name in files if not any((folder / name).exists() for folder in FOLDERS))
        if lost:
            yield f"missing below results/h200: {', '.join(lost)}"


def _of(count: int, whole: int) -> str:
    """Return ``2 of 7 runs are``, with the verb and noun that fit the numbers."""
    return f"{count} of {whole} run{'s' if whole > 1 else ''} {'is' if count == 1 else 'are'}"


def _age(runs: Path, name: str) -> list[str] | None:
    """Return the parts of the code that have changed since a run was made; None if the run is not complete."""
    if name.startswith(ANALYSIS):
        return _age_of_analysis(runs / name)
    from kvbench.cli.report import marked

    store = RunStore(runs, name)
    metrics = store.metrics()
    if metrics is None or metrics["status"] not in (*DONE, "oom"):
        return None
    older = marked(store, metrics)["older"]
    return list(older["parts"]) if older else []


def _age_of_analysis(folder: Path) -> list[str] | None:
    from experiments.fold.analyses import code_digest

    path = folder / "about.json"
    if not path.exists():
        return None
    try:
        code = stored.content(path).get("code")
    except (DataError, AttributeError):  # damaged, or not the description of an analysis
        return None
    if code is None:
        return [codes.UNKNOWN]
    return [] if code == code_digest() else ["analysis"]


def measurable(items: Sequence[Item], plan: Plan) -> list[Item]:
    """Return the items that a plan can measure, and say which others there are: with ``real``, times and formulas.

    Raises:
        ConfigError: there is none, or no model is named with ``real``.
    """
    if plan.data != "real":
        return list(items)
    if not plan.models:
        raise ConfigError("--data", "real", "is for a model other than the paper's", hint="add --models NAME")
    left_out = [item.id for item in items if not measurable_item(item, plan)]
    if len(left_out) == len(items):
        raise ConfigError(
            "--data",
            "real",
            f"has no score, attention or acceptance for {', '.join(left_out)}",
            hint="their times, memory and formulas are those of the paper's models: leave out --models and --data",
        )
    if left_out:
        print(f"no score, attention or acceptance, so left out: {', '.join(left_out)}", file=sys.stderr)
    return [item for item in items if item.id not in left_out]


def measurable_item(item: Item, plan: Plan) -> bool:
    """Return True if an item has a score, an attention or an acceptance under a plan."""
    if isinstance(item, Grid):
        return bool(columns_of(item, plan))
    assert isinstance(item, Computed)
    return not item.compute.startswith(("analytic:", "forced:", "points:"))


def item_runs(item: Item, plan: Plan) -> list[Run]:
    """Return the runs of an item, each once, in the order of its cells; none for a computed item."""
    return missing_runs(item, plan) if isinstance(item, Grid) else []


def make_items(items: Sequence[Item], plan: Plan, launcher: Launcher, jobs: int, fold_only: bool = False) -> int:
    """Run what is missing, then print and write each item; return 1 if a run or an item failed."""
    waiting = {item.id: set(item_runs(item, plan)) for item in items}
    runs = list(dict.fromkeys(run for item in items for run in item_runs(item, plan)))
    outcomes: dict[Run, RunOutcome] = {}
    good = True
    reasons: set[str] = set()
    left = list(items)
    good &= _finish([item for item in left if fold_only or not waiting[item.id]], left, plan, outcomes)
    for number, outcome in enumerate([] if fold_only else execute_all(runs, launcher, jobs), start=1):
        outcomes[outcome.run] = outcome
        good &= _report(outcome, f"[{number}/{len(runs)}]", reasons)
        good &= _finish([item for item in left if waiting[item.id] <= outcomes.keys()], left, plan, outcomes)
    return 0 if good else 1


def _report(outcome: RunOutcome, place: str, reasons: set[str]) -> bool:
    """Print a line about a run; a reason that came before is not printed again. Return False if the run failed."""
    failed = outcome.status in ("failed", "error")
    if outcome.status != "absent" or outcome.reason not in reasons:
        print(f"{place} {outcome.status} {outcome.id} {outcome.run.command}", file=sys.stderr)
        if outcome.reason:
            print(outcome.reason if failed else f"  {outcome.reason.splitlines()[0]}", file=sys.stderr)
    reasons.add(outcome.reason)
    return not failed


def _finish(ended: Sequence[Item], left: list[Item], plan: Plan, outcomes: dict[Run, RunOutcome]) -> bool:
    """Fold, print and write items whose runs have ended, and take them off the list; False if one failed."""
    good = True
    for item in ended:
        left.remove(item)
        try:
            folded = folded_of(item, plan, outcomes)
        except KvbenchError as error:
            print(f"{item.id}: {error}", file=sys.stderr)
            good = False
            continue
        if not any(cell.ours is not None for cell in folded.cells):
            print(empty(item, folded, plan), file=sys.stderr)
            good = False
            continue
        where, reason = write_item(item, folded, plan)
        print(item_markdown(item, folded))
        if reason:
            print(reason, file=sys.stderr)
        good &= where.say() == 0
    return good


def empty(item: Item, folded: Folded, plan: Plan) -> str:
    """Return why an item has no number, and what to type instead."""
    reasons = list(dict.fromkeys(cell.reason.splitlines()[0] for cell in folded.cells if cell.reason))
    more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
    text = f"{item.id}: nothing was written, as none of its {len(folded.cells)} cells has a number"
    hints = []
    if plan.fold_only:
        hints.append("leave out --fold-only to make its runs")
    if plan.data == "paper" or not plan.models:
        hints.append(f"python -m experiments {item.id} --models tiny --data mini needs no weights, data or network")
    if plan.data == "paper":
        hints.append("--path DATASET=FOLDER names local files of the paper's data")
    if plan.data == "real" and reasons:
        missing = [name for name in plan.models if reasons[0].startswith(f"model {name}:")]
        hints += [f"python -m kvbench.fetch model={name}" for name in missing]
    return f"{text}: {reasons[0] if reasons else 'not run'}{more}" + "".join(f"\n  hint: {hint}" for hint in hints)


def folded_of(item: Item, plan: Plan, outcomes: dict[Run, RunOutcome]) -> Folded:
    """Return the cells of an item."""
    if isinstance(item, Grid):
        sources = sources_of(item, plan, outcomes)
        behind = {column for (_, _, column), source in sources.items() if source.rows}
        files = file_notes((one for one in columns_of(item, plan) if one.name in behind), plan)
        notes = [*notes_of(item, plan, sources), *(files if plan.data == "real" else [])]
        return fold_grid(item, plan, sources, notes)
    assert isinstance(item, Computed)
    module, _, name = item.compute.partition(":")
    compute: Callable[[Computed, Plan], Folded] = getattr(importlib.import_module(f"experiments.fold.{module}"), name)
    return compute(item, plan)


def notes_of(item: Grid, plan: Plan, sources: Sources | None = None) -> list[str]:
    """Return what a table of this plan shows in place of the paper's: models, data, lengths, limits; not its files.

    `sources` are the rows of its cells, of which some may be more than the limit.
    """
    notes = []
    if plan.models:
        notes.append(f"Models here: {', '.join(plan.models)}, in place of {', '.join(m.title for m in item.models)}.")
    answers = any(column.data != POINTS for column in item.columns)
    if plan.data == "mini" and answers:
        bundled = ", ".join(dict.fromkeys(column.data for column in item.mini if column.data != POINTS))
        notes.append(
            f"Data here: bundled ({bundled}), in place of the paper's data sets. The paper's numbers are of other "
            "data: they are shown only as the differences of its claims."
        )
    here = {row.name: setting_of(row, plan) for row in item.rows if row.setting}
    replaced = [row for row in item.rows if row.setting and here[row.name] != row.setting]
    encoder = next((name for name in ENCODERS if all(f"encoder={name}" in here[row.name] for row in replaced)), None)
    if replaced and answers and encoder:
        names = "" if len(replaced) == len(item.rows) else f" ({', '.join(row.name for row in replaced)})"
        notes.append(f"Encoder here{names}: {ENCODERS[encoder]}, in place of Contriever.")
    elif replaced and answers:
        texts = [f"{row.name}: {here[row.name]} in place of {row.setting}" for row in replaced]
        notes.append(f"Settings here: {'; '.join(texts)}.")
    if plan.limit is not None and answers:
        more = [f"{name} ({n})" for name, n in shared_counts(sources or {}).items() if n > plan.limit]
        notes.append(
            f"At most {plan.limit} samples per data set{' and task' if plan.data == 'mini' else ''}"
            + (f"; more, of runs that other tables share: {', '.join(more)}." if more else ".")
        )
    columns, models = columns_of(item, plan), plan.models_of(item)
    lengths = dict.fromkeys(
        shortened(column, plan, model)
        for model in models
        for column in columns
        if not column.only or model not in item.models or model.preset in column.only
    )
    if any(lengths):
        notes.append(f"Lengths here: {'; '.join(text for text in lengths if text)}.")
    if plan.max_new_tokens is not None and answers:
        notes.append(f"Answers end after {plan.max_new_tokens} tokens.")
    return notes


def listing(items: Sequence[Item], plan: Plan) -> str:
    """Return the list of all items: id, number, title, needs, and the results that exist here."""
    width = max(len(item.id) for item in items)
    numbers = max(len(item.number) for item in items)
    lines = []
    for item in items:
        lines.append(f"{item.id:{width}}  {item.number:{numbers}}  {item.title}")
        lines.append(f"{'':{width}}  needs {needs(item)}")
        lines += [f"{'':{width}}  here: {state}" for state in states(item, plan) or ["nothing"]]
    return "\n".join([*lines, "", f"{len(items)} items. `python -m experiments ITEM` makes one, `--dry-run` says how."])


def needs(item: Item) -> str:
    """Return what an item needs beside this package: models and data sets."""
    if isinstance(item, Computed):
        return item.needs or "nothing"
    assert isinstance(item, Grid)
    data = dict.fromkeys(column.data for column in item.columns)
    return f"{', '.join(model.preset for model in item.models)}; {', '.join(data)}"
