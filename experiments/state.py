"""The results of an item on this machine: models, data and limits, and whether the runs behind them still hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.item import Item
from experiments.plan import Plan
from kvbench.errors import DataError
from kvbench.results import code as codes
from kvbench.results.store import DONE, RunStore

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
    """Return models, data and limits of a result, for example ``tiny, mini, limit 4``.

    Args:
        item: the item.
        folder: folder of the result.
        content: content of its ``cells.json``. Files of older versions have no ``options``; their models are those of
            the folder's name.
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
    """Yield what is wrong with the runs and files that a result was folded from; nothing if all is well.

    Args:
        names: ids of runs, names of analyses, and names of files with points of another machine.
        runs: folder of the runs.
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
