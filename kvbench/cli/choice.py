"""``--help GROUP=CHOICE``: the options of one choice of a configuration group (``method=cocktail``), and their text.

The keys, their defaults and their comments are those of the choice's YAML file; the types and explanations are those of
the dataclass that checks the group.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.cli.usage import group_text
from kvbench.config.logger_config import LOGGERS
from kvbench.config.run_config import DecodingConfig, RuntimeConfig
from kvbench.errors import ConfigError, few, nearest
from kvbench.models.endpoint_config import KEYS, EndpointModel
from kvbench.models.spec import ModelConfig
from kvbench.quantizers.spec import QuantizerSpec, taken
from kvbench.util.confdir import (
    choice_summary,
    choice_text,
    comments,
    conf_dir,
    config_groups,
    field_descriptions,
    group_options,
)
from kvbench.util.schema import describe_type, load_class

#: keys of a YAML file that are not options: Hydra's, and those that only the file itself may set
NOT_OPTIONS = frozenset({"defaults", "_target_", "takes"})
#: dataclasses of the groups whose class does not depend on the choice
SCHEMAS: Mapping[str, type] = {"model": ModelConfig, "quantizer": QuantizerSpec, "runtime": RuntimeConfig}
#: groups whose files set keys of any group
WHOLE = ("experiment", "launcher")
#: texts that need no quotes on the command line, as a value and in a list
_PLAIN, _PLAIN_ITEM = re.compile(r"[\w./:@{}*!+-]+"), re.compile(r"[\w./-]+")
#: from this number on, a bound only catches typing errors, and is not shown
_LARGE = 2**16


@dataclass(frozen=True)
class Option:
    """One key that can be set on the command line.

    Args:
        key: dotted key, such as ``method.alpha``.
        default: default of this choice, as it is typed.
        type: type and bounds in words.
        meaning: explanation from the docstring of the dataclass; may be empty.
        comment: comment of the key in the YAML file; may be empty.
    """

    key: str
    default: str
    type: str
    meaning: str
    comment: str


@dataclass(frozen=True)
class Choice:
    """A choice of a configuration group with its options, in the order of its YAML file.

    Args:
        summary: description in one line.
        target: the class that the choice constructs; None if it constructs none.
        takes: for a method, the quantizers that it accepts.
        sets: choices of other groups that it makes, such as ``quantizer=int2``.
    """

    group: str
    name: str
    summary: str
    path: Path
    target: type | None
    takes: tuple[str, ...]
    sets: tuple[str, ...]
    options: tuple[Option, ...]


def choice(group: str, name: str, extra: Path | None = None) -> Choice:
    """Return a choice of a configuration group with its options.

    Raises:
        ConfigError: the group has no such choice, or the class that its file names cannot be imported.
    """
    files = group_options(group, extra)
    if name not in files:
        near = nearest(name, files)
        hint = f"did you mean '{near}'?" if near else f"python -m kvbench --help {group} lists them"
        raise ConfigError(group, name, f"no such {group}", allowed=few(list(files), name), hint=hint)
    data, notes = _file(group, files[name], files)
    if group == "method" and not NOT_OPTIONS.issuperset(data):
        data, notes = _common(data, notes)
    target, cls = _classes(group, data)
    sets = tuple(_overrides(data.get("defaults") or ()))
    rows = {key: value for key, value in data.items() if key not in NOT_OPTIONS and not _fixed(group, key)}
    prefix = "" if group in WHOLE else f"{group}."
    return Choice(
        group,
        name,
        choice_summary(files[name]),
        files[name],
        target,
        taken(data.get("takes") or (), extra) if group == "method" else (),
        sets,
        tuple(_nested_options(rows, cls, notes, prefix, "")),
    )


def decoding() -> Choice:
    """Return the options of ``decoding``, a group without choices, which is part of ``conf/config.yaml``."""
    path = conf_dir() / "config.yaml"
    text = path.read_text(encoding="utf-8")
    notes = {key.removeprefix("decoding."): note for key, note in comments(text).items() if key.startswith("decoding.")}
    rows = tuple(_nested_options(yaml.safe_load(text)["decoding"], DecodingConfig, notes, "decoding.", ""))
    return Choice("decoding", "", "how answers are generated", path, None, (), (), rows)


def _common(data: Mapping[str, Any], notes: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys and comments of a method's file, and after them those that every method has."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    keys = yaml.safe_load(text)["method"]
    known = {key.removeprefix("method."): note for key, note in comments(text).items() if key.startswith("method.")}
    return {**data, **{key: keys[key] for key in keys if key not in data}}, {**known, **notes}


def _file(group: str, path: Path, files: Mapping[str, Path]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys and comments of a file, after those of the files of its group that its ``defaults`` name."""
    text = choice_text(path)
    own = yaml.safe_load(text) or {}
    data: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for base in own.get("defaults") or ():
        if isinstance(base, str) and base in files:
            inherited, its_notes = _file(group, files[base], files)
            data, notes = data | inherited, notes | its_notes
    return data | own, notes | comments(text)


def _classes(group: str, data: Mapping[str, Any]) -> tuple[type | None, type | None]:
    """Return the class that a choice constructs, and the dataclass that checks its keys; None if there is none."""
    if "_target_" in data:
        target = load_class(f"{group}._target_", data["_target_"], "kvbench.methods.kivi.Kivi")
        return target, target
    if group == "model" and data.keys() & KEYS:
        return None, EndpointModel
    return None, LOGGERS.get(str(data.get("name"))) if group == "logger" else SCHEMAS.get(group)


def _overrides(defaults: Any) -> Iterator[str]:
    """Yield the choices of other groups that a file makes, ``quantizer=int2`` for ``override /quantizer@...: int2``."""
    for item in defaults:
        if isinstance(item, Mapping):
            for key, value in item.items():
                group = str(key).removeprefix("override ").strip("/").partition("@")[0]
                yield f"{group}={value}"


def _fixed(group: str, key: str) -> bool:
    """Return True for a group's ``name``, which its choice determines; only the name of a model is an option."""
    return key == "name" and group in ("dataset", "quantizer", "logger")


def _nested_options(
    rows: Mapping[str, Any], cls: type | None, notes: Mapping[str, str], prefix: str, path: str
) -> Iterator[Option]:
    """Yield the options of nested keys.

    Args:
        cls: dataclass with these keys as fields; None if the keys are not those of a dataclass.
        notes: comments of the file, by dotted key.
        prefix: beginning of the keys on the command line.
        path: beginning of the keys within the file.
    """
    is_class = cls is not None and dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls) if cls is not None and is_class else {}
    fields = {field.name: field for field in dataclasses.fields(cls)} if cls is not None and is_class else {}
    meanings = field_descriptions(cls) if cls is not None and is_class else {}
    for key, value in rows.items():
        inner = _dataclass(hints.get(key))
        if isinstance(value, Mapping) and value and (inner is not None or not fields):
            yield from _nested_options(value, inner, notes, f"{prefix}{key}.", f"{path}{key}.")
            continue
        kind = describe_type(hints[key]) + _bounds(fields[key].metadata) if key in hints else ""
        yield Option(
            f"{prefix}{key}", _typed_default(value), kind, meanings.get(key, ""), notes.get(f"{path}{key}", "")
        )


def _dataclass(hint: Any) -> type | None:
    """Return the dataclass in a type annotation, such as that of ``Architecture | None``; None if there is none."""
    for part in (hint, *typing.get_args(hint)):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def _bounds(limits: Mapping[str, Any]) -> str:
    low, above, high = limits.get("minimum"), limits.get("above"), limits.get("maximum")
    words = [f"at least {low:g}"] if low is not None else []
    words += [f"greater than {above:g}"] if above is not None else []
    words += [f"at most {high:g}"] if high is not None and high < _LARGE else []
    return f", {' and '.join(words)}" if words else ""


def _typed_default(value: Any, plain: re.Pattern[str] = _PLAIN) -> str:
    """Return a value as it is typed on the command line; texts that match `plain` have no quotes."""
    if isinstance(value, str):
        return value if plain.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed_default(part, _PLAIN_ITEM)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_typed_default(part, _PLAIN_ITEM) for part in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


#: columns of the text
WIDTH = 100
#: what Python calls a value, and what one types
_WORDS = {"None": "null", "True": "true", "False": "false"}


def choice_help(words: Sequence[str], extra: Path | None = None) -> str | None:
    """Return the help for the choices that a command line names, such as ``method=kivi`` or ``method=kivi,atom``.

    The name of a group alone, such as ``method``, lists its choices; ``decoding``, a group without choices, has options
    of its own. Other overrides are skipped; the result is None if no override names a group or a choice.

    Raises:
        ConfigError: a group has no such choice.
    """
    known, parts = config_groups(), []
    for word in words:
        group, equals, names = word.partition("=")
        if group == "decoding" or group.startswith("decoding."):
            parts.append(_choice_text(decoding()))
        elif group in known and not equals:
            parts.append(group_text(group, extra))
        elif group in known and not _free(group, names):
            parts += [_choice_text(choice(group, name.strip(), extra)) for name in names.split(",")]
    return "\n".join(dict.fromkeys(parts)) or None


def plain_docstring(docstring: str) -> str:
    """Convert the text of a docstring for a terminal: without markup, and with values as they are typed."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", docstring).replace("``", "").replace("`", "")
    return as_typed(text)


def as_typed(docstring: str) -> str:
    """Convert the values in the text of a docstring to what is typed: None, True, False to null, true, false."""
    return re.sub(r"\b(None|True|False)\b", lambda match: _WORDS[match[0]], docstring)


def _free(group: str, name: str) -> bool:
    """Return True if a choice is a model without a preset (``model=OWNER/NAME``, ``model=./FOLDER``)."""
    return group == "model" and "/" in name


def _choice_text(chosen: Choice) -> str:
    title = f"{chosen.group}={chosen.name}" if chosen.name else chosen.group
    lines = [title, *textwrap.wrap(chosen.summary, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")]
    if chosen.target is not None:
        lines.append(f"  class: {chosen.target.__module__}.{chosen.target.__qualname__}")
    if chosen.takes:
        lines.append(f"  quantizers: {', '.join(chosen.takes)}")
    if chosen.sets:
        lines.append(f"  sets: {' '.join(chosen.sets)}")
    for option in chosen.options:
        lines += ["", *_option(option)]
    if not chosen.options:
        every = " Every method has method.rotation.key, method.rotation.value and method.layers."
        lines.append("  It has no options." + (every if chosen.group == "method" else ""))
    return "\n".join(lines) + "\n"


def _option(option: Option) -> Iterator[str]:
    head = f"  {option.key}={option.default}"
    comment = f"   # {option.comment}" if option.comment else ""
    if len(head + comment) <= WIDTH:
        yield head + comment
    else:
        yield head
        yield from textwrap.wrap(option.comment, WIDTH - 6, initial_indent="    # ", subsequent_indent="    # ")
    text = " ".join(
        part for part in (f"[{option.type}]" if option.type else "", plain_docstring(option.meaning)) if part
    )
    yield from textwrap.wrap(text, WIDTH, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
