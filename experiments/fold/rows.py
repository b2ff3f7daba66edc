"""The rows that a claim is judged on: data sets above the floor, and how many rows of each are at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from experiments.data import Plan
from experiments.item import Column, Model
from experiments.real.files import row_count
from experiments.real.floor_file import ABOVE, AT, set_name, verdicts_of
from kvbench.tasks import data


def floored(columns: Sequence[Column], plan: Plan, model: Model) -> list[str]:
    """Return the names of the columns of scores on which fp16 of a model is at the floor, with ``--data real``."""
    known = (verdicts_of(model.preset) if plan.data == "real" else None) or {}
    return [column.name for column in columns if column.figure == "score" and known.get(set_name(column)) == AT]


def floor_notes(columns: Sequence[Column], plan: Plan, model: Model) -> list[str]:
    """Return notes on the columns of scores that are at the floor, and on those of which that is not known."""
    scores = [column for column in columns if column.figure == "score"]
    if plan.data != "real" or not scores:
        return []
    known = verdicts_of(model.preset)
    if known is None:
        return [f"Claims on scores are judged, but no floors are known for this model ({model.title})."]
    lost = floored(scores, plan, model)
    notes = [f"At the floor, and so without verdicts of their own: {', '.join(lost)}."] if lost else []
    unknown = [column.name for column in scores if known.get(set_name(column)) not in (ABOVE, AT)]
    return [*notes, f"Judged, although their floor is not known: {', '.join(unknown)}."] if unknown else notes


def rows_at_hand(column: Column, plan: Plan, count: int) -> float:
    """Return how many samples of a column there could be without more data; infinite where that is not known.

    Args:
        count: samples so far. Fewer than the plan's limit are all, where no file says otherwise.
    """
    limit = plan.limit
    # of prompts chosen by length, fewer than the limit are left of the first rows alone
    chosen = any("dataset.prompt_tokens=" in option for option in column.options)
    whole = _file_rows(column, plan)
    if whole is not None:
        share = count / limit if chosen and limit and count < limit else 1.0
        return max(count, math.floor(share * whole))
    return count if limit is None or (not chosen and count < limit) else math.inf


def _file_rows(column: Column, plan: Plan) -> int | None:
    """Return the number of records of a column's local file; None for texts, and for data that are not local."""
    choice = column.over or column.data
    place = Path(dict(plan.paths).get(choice, ""))
    files = [place, *(place / f"{column.task or 'test'}{ending}" for ending in data.ENDINGS)]
    names = [file for file in files if file.is_file() and file.name.endswith(data.ENDINGS)]
    return row_count(names[0]) if choice in dict(plan.paths) and names else None
