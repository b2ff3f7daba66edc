"""Comments of YAML files, by key: YAML parsers drop them, but here they explain the options of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

import yaml


def comments(text: str) -> dict[str, str]:
    """Return the comment of each key of a YAML file: the one behind it on its line, else the lines right above it.

    The keys of nested mappings are dotted (``source.hub_id``). The keys of a mapping in braces on one line share that
    line's comment. The comment at the top of the file describes the file, so it belongs to no key. Keys without a
    comment are missing. A text that is not YAML raises yaml.YAMLError.
    """
    lines = text.splitlines()
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = {key: _behind(lines, place) or _above(lines, place.start_mark.line) for key, place in _keys(node, "")}
    return {key: comment for key, comment in pairs.items() if comment}


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yield each key of nested mappings, dotted, with the node on whose last line its comment is."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key if isinstance(value, yaml.MappingNode) and not value.flow_style else value
        yield from _keys(value, f"{name}.")


def _behind(lines: list[str], node: yaml.Node) -> str:
    """Return the comment that follows a node on its last line; empty if there is none."""
    mark = node.end_mark
    before, hash_sign, comment = (lines[mark.line] if mark.line < len(lines) else "")[mark.column :].partition("#")
    return comment.strip() if hash_sign and before.strip(" :,}") == "" else ""


def _above(lines: list[str], number: int) -> str:
    """Return the comment lines directly above a line, joined; empty if they begin at the top of the file."""
    first = number
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(line.strip("# ") for line in lines[first:number]) if first else ""
