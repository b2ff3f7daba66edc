"""Checks of the folder of ``--config-dir`` before Hydra reads its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from kvbench.cli.expand import limit
from kvbench.errors import ConfigError, cut_text
from kvbench.util.class_choice import GROUPS, class_files
from kvbench.util.confdir import choice_text, config_groups, group_options, read_choice

#: maximum number of values in a file, counting aliases at each use, and the environment variable that changes it
MAX_VALUES = 5_000
MAX_VALUES_NAME = "KVBENCH_MAX_YAML_VALUES"
#: maximum nesting depth
MAX_DEPTH = 32
#: maximum size of a file, as bytes per allowed value
BYTES_A_VALUE = 40

OPTION = "--config-dir"


def check_folder(folder: Path) -> None:
    """Check a folder given by ``--config-dir`` and all files in it that add choices to configuration groups.

    Its subfolders are named after groups: ``method/foo.yaml`` adds the choice ``method=foo``.

    Raises:
        ConfigError: `folder` is not a folder, or has no subfolder named after a group; or a file in such a subfolder
            has the name of a built-in choice, or is invalid (:func:`check_file`).
    """
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        raise ConfigError(
            OPTION, folder, f"cannot be read ({error.strerror})", hint="name another folder: --config-dir DIR"
        ) from error
    if not is_folder:
        raise ConfigError(
            OPTION, folder, "is not a folder", hint="name a folder that contains, for example, method/foo.yaml"
        )
    known = config_groups()
    if not any((folder / group).is_dir() for group in known):
        raise ConfigError(
            OPTION,
            folder,
            "has no subfolder with the name of a configuration group",
            allowed=[f"{group}/" for group in known],
            hint=f"create {folder}/method/foo.yaml to be able to choose method=foo",
        )
    for group in known:
        built_in = group_options(group)
        for choice, path in group_options(group, folder).items():
            if folder not in path.parents:
                continue
            if choice in built_in:
                raise _extra_refusal(path, f"has the same name as the built-in {group}={choice}", "rename the file")
            check_file(path, group)


def store_classes(folder: Path) -> None:
    """Tell Hydra of the choices in a folder that are Python files, which it cannot read."""
    for group in GROUPS:
        for path in class_files(folder / group):
            ConfigStore.instance().store(group=group, name=path.stem, node=read_choice(path), provider="kvbench")


def check_file(path: Path, group: str) -> None:
    """Check a YAML file that adds a choice to a configuration group.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, is too large, or sets another group.
    """
    most = limit(MAX_VALUES_NAME, MAX_VALUES)
    try:
        if path.stat().st_size > most * BYTES_A_VALUE:
            raise _too_large(path, most)
        text = choice_text(path)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            size = _size(node, {}, set(), 0, path)
            if size > most:
                raise _too_large(path, most)
        data = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise _extra_refusal(path, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8") from error
    except RecursionError as error:
        raise _extra_refusal(
            path, f"has groups nested more than {MAX_DEPTH} levels deep", "write a flat file of KEY: VALUE lines"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = cut_text(getattr(error, "problem", None) or str(error).splitlines()[0])
        raise _extra_refusal(
            path, f"is not YAML{where}: {problem}", "write KEY: VALUE on each line, indented with spaces, not tabs"
        ) from error
    except (OSError, ValueError) as error:
        raise _extra_refusal(
            path, f"cannot be read: {cut_text(str(error))}", "check that the file exists, is readable and is valid YAML"
        ) from error
    if not isinstance(data, Mapping):
        what = "is empty" if data is None else f"contains a {type(data).__name__}"
        raise _extra_refusal(path, f"{what} instead of keys with values", "write KEY: VALUE on each line")
    for key in data:
        if not isinstance(key, str):
            raise _extra_refusal(path, f"has the key {key!r}, which is not text", "quote the key: 'KEY': VALUE")
    _check_scope(path, group, text, data)


def _size(node: yaml.Node, sizes: dict[int, int], above: set[int], depth: int, path: Path) -> int:
    """Return the number of values in a YAML tree, counting aliases as the nodes that they refer to.

    `sizes` maps the id of each node seen so far to its number; `above` has the ids of the nodes that contain this one.

    Raises:
        ConfigError: a key occurs twice in a mapping, or an alias refers to a node that contains it.
        RecursionError: the tree is nested too deeply.
    """
    if id(node) in above:
        raise _extra_refusal(
            path, "has an alias to a group that contains the alias itself", "replace the alias by the values"
        )
    if id(node) in sizes:
        return sizes[id(node)]
    if depth > MAX_DEPTH:
        raise RecursionError
    above.add(id(node))
    total = 1
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    line = key.start_mark.line + 1
                    raise _extra_refusal(
                        path, f"has the key {key.value} twice; line {line} repeats it", "give each key once"
                    )
                keys.add(key.value)
            total += _size(key, sizes, above, depth + 1, path) + _size(value, sizes, above, depth + 1, path)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_size(item, sizes, above, depth + 1, path) for item in node.value)
    above.discard(id(node))
    sizes[id(node)] = total
    return total


def _check_scope(path: Path, group: str, text: str, data: Mapping[str, Any]) -> None:
    """Raise ConfigError if a choice sets other groups than its own, which only files in experiment/ may do."""
    if group == "experiment":
        return
    package = re.search(r"^#\s*@package\s+(\S+)", text, flags=re.MULTILINE)
    if package and package[1] not in ("_group_", group):
        raise _extra_refusal(
            path,
            f"writes to {package[1]} (# @package), but a choice of {group} may set only {group}",
            "remove that line, or move the file to experiment/, where presets of several groups belong",
        )
    defaults = data.get("defaults", [])
    if not isinstance(defaults, list):
        raise _extra_refusal(path, "its defaults are not a list", "write defaults: [_self_]")
    for item in defaults:
        if isinstance(item, str):  # another choice of the same group
            continue
        for key in item if isinstance(item, Mapping) else ():
            target = str(key).removeprefix("override ").strip().lstrip("/").partition("@")[0]
            mine = target == group or (group, target) in (("method", "quantizer"), ("launcher", "hydra/launcher"))
            if not mine:
                raise _extra_refusal(
                    path,
                    f"chooses {target} in its defaults, but a choice of {group} may set only {group}",
                    "move the file to experiment/, where presets of several groups belong",
                )


def _too_large(path: Path, most: int) -> ConfigError:
    return _extra_refusal(
        path,
        f"has more than {most} values (an alias counts as all the values that it refers to)",
        f"shorten the file, or raise the limit: {MAX_VALUES_NAME}={10 * most} python -m kvbench ...",
    )


def _extra_refusal(path: Path, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {path}", None, problem, hint=hint)
