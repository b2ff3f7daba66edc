"""``--dry-run``: the runs of items, their commands, and what they are expected to take."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.item import Item
from experiments.plan import Plan
from experiments.session import item_runs


def predicted(items: Sequence[Item], plan: Plan) -> str:
    """Return the commands of all runs of the items, each once."""
    lines: list[str] = []
    seen = set()
    for item in items:
        runs = item_runs(item, plan)
        fresh = [run for run in runs if run not in seen]
        seen |= set(fresh)
        lines.append(f"{item.id}: {len(runs)} runs, {len(runs) - len(fresh)} of which are shared with items above")
        lines += [f"  {run.command}" for run in fresh]
    return "\n".join(lines)
