"""All items: every module of ``experiments/{cocktail,logquant,quantspec}`` that has an ``ITEM``."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

from experiments.item import Item
from kvbench.errors import ConfigError

PAPERS = ("cocktail", "logquant", "quantspec")
_ITEM = re.compile(r"(table|figure)\d+")


@cache
def items() -> dict[str, Item]:
    """Return all items by id, in the order of the papers, tables before figures.

    Raises:
        TypeError: a module has no ``ITEM``, or its id is not the module's path.
    """
    by_id = {}
    for paper in PAPERS:
        names = [path.stem for path in Path(__file__).with_name(paper).glob("*.py") if _ITEM.fullmatch(path.stem)]
        for name in sorted(names, key=lambda text: (not text.startswith("table"), int(re.sub(r"\D", "", text)))):
            item = getattr(importlib.import_module(f"experiments.{paper}.{name}"), "ITEM", None)
            if not isinstance(item, Item) or item.id != f"{paper}/{name}":
                raise TypeError(f"experiments/{paper}/{name}.py: ITEM must be an item whose id is {paper}/{name}")
            by_id[item.id] = item
    return by_id


def chosen_items(names: list[str]) -> list[Item]:
    """Return the items that a command line names: ids, papers (all their items) or ``all``.

    Raises:
        ConfigError: a name is neither.
    """
    known = items()
    picked: dict[str, Item] = {}
    for name in names:
        matches = [item for item in known.values() if name in ("all", item.id, item.paper)]
        if not matches:
            raise ConfigError("ITEM", name, "no such item", allowed=[*PAPERS, *known, "all"])
        picked |= {item.id: item for item in matches}
    return list(picked.values())
