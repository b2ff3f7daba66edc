"""The configuration folder: ``kvbench/conf`` in an installed package, ``conf`` next to it in a working tree."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import KvbenchError
from kvbench.util.class_choice import class_files, yaml_of


def conf_dir() -> Path:
    """Return kvbench's own configuration folder, which contains ``config.yaml`` and one folder per configuration group.

    Raises:
        KvbenchError: the folder is missing, so the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise KvbenchError(f"kvbench's configuration is missing next to {package}.\n  hint: run pip install -e . again")


def config_groups() -> list[str]:
    """Return the names of the configuration groups, such as ``model``, which are the folders in :func:`conf_dir`."""
    return sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and any(p.rglob("*.yaml")))


def group_options(group: str, extra: Path | None = None) -> dict[str, Path]:
    """Return the values that a configuration group can be set to, in alphabetical order, each with its YAML file.

    A value is the file's path in the group's folder without its ending: ``mini/full`` for ``dataset/mini/full.yaml``.
    The files of `extra`, the user's own configuration folder (``--config-dir``), are added, and replace files of the
    same name. Among them are Python files with the class of a method or data set that have no YAML
    (:mod:`kvbench.util.class_choice`).
    """
    choices: dict[str, Path] = {}
    for folder in (conf_dir() / group, *([extra / group] if extra else [])):
        files = [*folder.rglob("*.yaml"), *(class_files(folder) if extra else [])]
        choices |= {p.relative_to(folder).with_suffix("").as_posix(): p for p in files}
    return dict(sorted(choices.items()))


def choice_text(path: Path) -> str:
    """Return the YAML of a choice: the file's text or, for a Python file, the YAML derived from its class.

    Raises:
        ConfigError: the Python file cannot be imported, or does not hold one dataclass.
    """
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    common = read_choice(conf_dir() / "config.yaml").get(path.parent.name)
    return yaml_of(path, common if isinstance(common, dict) else (), group_options("quantizer", path.parents[1]))


def read_choice(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file of the configuration, which the caller may change; empty if it has none."""
    return deepcopy(_parsed(choice_text(path)))


@lru_cache(maxsize=512)
def _parsed(text: str) -> dict[str, Any]:
    # by text and not by path: parsing takes a hundred times as long as reading, and files may change
    data = yaml.safe_load(text)
    return data if isinstance(data, dict) else {}


def choice_summary(path: Path) -> str:
    """Return the one-line description in a YAML file of the configuration; empty if it has none.

    It is the first line that begins with ``#``, apart from Hydra's ``# @package`` lines.
    """
    for line in choice_text(path).splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
    return ""


def comments(text: str) -> dict[str, str]:
    """Return the comment of each key of a YAML file: the comment after it on its line, else the lines right above it.

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
