"""What people wrote about an option: comments of YAML files, which parsers drop, and ``Args:`` of docstrings."""

from __future__ import annotations

import inspect
import re
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


_SECTION = re.compile(r"^Args:\n(?P<body>(?:(?:[ \t].*)?\n?)*)", re.MULTILINE)
_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*)$")


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the description of each field that the docstring of `cls` or of a base class explains, on one line.

    An entry for several names (``project, entity: ...``) describes each of them. A class's own entry replaces that of
    its base.
    """
    descriptions: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        descriptions |= _arguments(inspect.cleandoc(part.__doc__ or ""))
    return descriptions


def _arguments(docstring: str) -> dict[str, str]:
    section = _SECTION.search(docstring)
    if section is None:
        return {}
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc("\n" + section["body"]).splitlines():
        entry = _ENTRY.match(line)
        if entry is not None:
            names = entry["names"].split(", ")
            entries |= dict.fromkeys(names, entry["text"])
        elif line.strip():
            for name in names:
                entries[name] += f" {line.strip()}"
    return entries
