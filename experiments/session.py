"""A session of ``python -m experiments``: the runs of several items, each made once, and then their folds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from experiments.data import POINTS, columns_of, shortened
from experiments.draw.table import item_markdown
from experiments.fold.cells import Folded
from experiments.fold.grid import fold_grid
from experiments.fold.sources import missing_runs, sources_of
from experiments.item import Computed, Grid, Item
from experiments.plan import Plan
from experiments.runs import Launcher, Run, RunOutcome, execute_all
from experiments.state import states
from experiments.write import write_item
from kvbench.errors import KvbenchError


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
    return f"{text}: {reasons[0] if reasons else 'not run'}{more}" + "".join(f"\n  hint: {hint}" for hint in hints)


def folded_of(item: Item, plan: Plan, outcomes: dict[Run, RunOutcome]) -> Folded:
    """Return the cells of an item."""
    if isinstance(item, Grid):
        return fold_grid(item, plan, sources_of(item, plan, outcomes), notes_of(item, plan))
    assert isinstance(item, Computed)
    module, _, name = item.compute.partition(":")
    compute: Callable[[Computed, Plan], Folded] = getattr(importlib.import_module(f"experiments.fold.{module}"), name)
    return compute(item, plan)


def notes_of(item: Grid, plan: Plan) -> list[str]:
    """Return what a table of this plan shows in place of the paper's: models, data, lengths, limits."""
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
    replaced = [row for row in item.rows if row.small and plan.data != "paper"]
    if replaced and answers and all("encoder=bm25" in row.small for row in replaced):
        names = "" if len(replaced) == len(item.rows) else f" ({', '.join(row.name for row in replaced)})"
        notes.append(f"Encoder here{names}: BM25, which needs no weights, in place of Contriever.")
    elif replaced and answers:
        texts = [f"{row.name}: {row.small} in place of {row.setting}" for row in replaced]
        notes.append(f"Settings here: {'; '.join(texts)}.")
    if plan.limit is not None and answers:
        notes.append(f"At most {plan.limit} samples per data set{' and task' if plan.data == 'mini' else ''}.")
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
