"""The navigation of the site: that of mkdocs.yml, in which a folder stands for its pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.site.tree import ROOT, Tree, titles

#: the configuration as people edit it
CONFIG = ROOT / "mkdocs.yml"
Nav = list[dict[str, Any]]


def read(path: Path = CONFIG) -> dict[str, Any]:
    """Return the content of mkdocs.yml."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def complete(nav: Nav, tree: Tree) -> Nav:
    """Return a navigation with every folder (``reference/method/``) replaced by its pages, in the order of their names.

    Args:
        nav: navigation of mkdocs.yml: a list of mappings of one title to a page, a folder or such a list.
        tree: the pages.
    """
    return [{name: _expanded(value, tree) for name, value in entry.items()} for entry in nav]


def _expanded(value: Any, tree: Tree) -> Any:
    if isinstance(value, list):
        return complete(value, tree)
    if not value.endswith("/"):
        return value
    return [{name: page} for page, name in titles(tree.pages, value).items()]


def listed(nav: Nav) -> Iterator[str]:
    """Yield all pages of a completed navigation."""
    for entry in nav:
        for value in entry.values():
            if isinstance(value, list):
                yield from listed(value)
            else:
                yield value


def problems(nav: Nav, tree: Tree) -> Iterator[str]:
    """Yield a line for each page of the navigation that does not exist, and each page that is not in it.

    Pages that show a file of the repository (``files/``) are only linked.
    """
    pages = list(listed(nav))
    for page in sorted({page for page in pages if pages.count(page) > 1}):
        yield f"mkdocs.yml: {page} is in the navigation more than once"
    for page in pages:
        if page not in tree.pages:
            yield f"mkdocs.yml: {page} does not exist"
    for page in sorted(tree.pages):
        if page not in pages and not page.startswith("files/"):
            yield f"{_origin(page, tree.sources)} is not in the navigation: add {page} to nav in mkdocs.yml"


def _origin(page: str, sources: Mapping[str, str]) -> str:
    return sources.get(page, page)
