"""Descriptions of dataclass fields, read from the ``Args`` sections of the classes' docstrings (Google's style)."""

from __future__ import annotations

import inspect
import re

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
