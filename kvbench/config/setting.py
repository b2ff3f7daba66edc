"""Settings: a method, its quantizer and their options as one string, for use on command lines.

The grammar is ``METHOD[:QUANTIZER][:KEY=VALUE]...``, for example ``fp16``, ``kivi:int4:residual=64`` or
``cocktail:encoder=bm25``. A key names an option of the method (``residual``) or, with a prefix, of the quantizer
(``quantizer.key.bits``). A value that contains a colon or a comma needs brackets (``layers=[0-1:fp16,2-29:int4]``) or
quotes; ``10/30/60`` is a list of numbers. Options may also be separated by commas. This module imports neither torch
nor Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.methods.load import load_method, true_name
from kvbench.util.confdir import group_options, read_choice

#: the grammar in one line, for help texts
SYNTAX = (
    "METHOD[:QUANTIZER][:KEY=VALUE]...: fp16, kivi:int4_g128, kivi:int2:residual=64:quantizer.value.group_size=64, "
    "logquant:int2_g128:window=64:reserved=192, cocktail:split=[10,30,60]:encoder=bm25"
)
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_INT = re.compile(r"[+-]?(0|[1-9]\d*)")
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
#: strings that need no quotes on Hydra's command line
_PLAIN = re.compile(r"[A-Za-z0-9_./\-+%@*?|$:]+")


@dataclass(frozen=True)
class Setting:
    """A method with its quantizer and hyper-parameters, parsed from a string such as ``kivi:int4:residual=64``.

    Args:
        text: the string as it was typed.
        name: name of a preset in ``conf/method``.
        quantizer: name of a preset in ``conf/quantizer``; None for the method's default.
        fields: hyper-parameters of the method that the string sets, by key (``residual``).
        formats: options of the quantizer that the string sets, by dotted key (``quantizer.key.bits``).
    """

    text: str
    name: str
    quantizer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    formats: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def overrides(self) -> list[str]:
        """Return this setting as command-line overrides: ``method=``, ``quantizer=``, ``method.KEY=``."""
        chosen = [f"method={self.name}", *([f"quantizer={self.quantizer}"] if self.quantizer else [])]
        keys = {**{f"method.{key}": value for key, value in self.fields.items()}, **self.formats}
        return [*chosen, *(f"{key}={written(value)}" for key, value in keys.items())]

    def load(self) -> Method:
        """Return a new instance of the method that this setting describes.

        Raises:
            ConfigError: there is no such method, quantizer or key, or the method rejects a value or combination.
        """
        formats: dict[str, Any] | str | None = self.quantizer
        if self.formats:
            formats = _quantizer_data(self.quantizer or _default_quantizer(self.name))
            for key, value in self.formats.items():
                _change(formats, key, value)
            formats["name"] = true_name(formats)
        return load_method(self.name, quantizer=formats, **self.fields)


def parse_setting(text: str) -> Setting:
    """Parse the string of one setting.

    Only the syntax is checked here. Whether the names exist is checked when the method is built (:meth:`Setting.load`).

    Raises:
        ConfigError: the text does not begin with a method, a part is empty, a bracket is not closed, or a key or the
            quantizer is given twice.
    """
    name, *parts = (
        piece.strip() for whole in split_outside_brackets(text, ":") for piece in split_outside_brackets(whole, ",")
    )
    if not name or "=" in name or not isinstance(typed_value(name), str):
        problem = (
            "must begin with the name of a method"
            if not name or "=" in name
            else "begins with a value instead of the name of a method"
        )
        raise ConfigError(
            "setting",
            text,
            problem,
            hint=f"put a method in front, for example setting=kivi:{'' if '=' in text else 'KEY='}{text.lstrip(':')}",
        )
    quantizer: str | None = None
    fields: dict[str, Any] = {}
    formats: dict[str, Any] = {}
    for part in parts:
        key, assigned, value = part.partition("=")
        if not part or (assigned and not key):
            raise ConfigError("setting", text, f"has a part without a key: '{part}'", hint=SYNTAX)
        if not assigned:
            if isinstance(typed_value(part), int | float):
                raise ConfigError(
                    "setting",
                    text,
                    f"has a value without a key: {part}",
                    hint=f"name the key: setting={name}:KEY={part}",
                )
            if quantizer is not None:
                raise ConfigError(
                    "setting", text, f"has two quantizers, {quantizer} and {part}", hint=f"keep one: {name}:{part}"
                )
            quantizer = part
        elif key in {**formats, **fields}:
            raise ConfigError("setting", text, f"sets {key} twice", hint=f"set it once: {name}:{part}")
        else:
            (formats if key.startswith("quantizer.") else fields)[key] = typed_value(value, text)
    return Setting(text, name, quantizer, fields, formats)


def parse_list(text: str) -> list[Setting]:
    """Parse a comma-separated list of settings, and return the settings in order.

    If ``KEY=VALUE`` follows a comma, it does not begin a new setting but is an option of the previous one.

    Raises:
        ConfigError: a setting is invalid (see :func:`parse_setting`) or is listed twice.
    """
    texts: list[str] = []
    for piece in split_outside_brackets(text, ","):
        if texts and "=" in piece.split(":", 1)[0]:
            texts[-1] += f",{piece}"
        else:
            texts.append(piece)
    settings = [parse_setting(piece.strip()) for piece in texts]
    for number, setting in enumerate(settings):
        if setting in settings[:number] or setting.overrides() in [other.overrides() for other in settings[:number]]:
            raise ConfigError("setting", text, f"lists {setting} twice", hint="list each setting once")
    return settings


def split_outside_brackets(text: str, mark: str) -> list[str]:
    """Split a text at each occurrence of the character `mark` that is outside brackets and quotes.

    Raises:
        ConfigError: brackets or quotes are unbalanced.
    """
    parts, expected, quote = [""], [], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _CLOSING:
            expected.append(_CLOSING[char])
        elif char in _CLOSING.values() and (not expected or expected.pop() != char):
            raise ConfigError(
                "setting",
                text,
                f"closes a bracket that was not opened: {char}",
                hint="balance the brackets, as in split=[10,30,60]",
            )
        if char == mark and not expected and not quote:
            parts.append("")
        else:
            parts[-1] += char
    if expected or quote:
        raise ConfigError("setting", text, "leaves a bracket or quote open", hint="close it, as in split=[10,30,60]")
    return parts


def typed_value(text: str, setting: str = "") -> Any:
    """Convert the text of a value to a Python value: number, bool, None, list, dict or string.

    The rules are Hydra's, with one addition: ``10/30/60`` is a list of numbers. Other text with slashes is a string,
    such as a path. `setting` is the complete setting, for messages.

    Raises:
        ConfigError: a mapping has an entry without a colon, or brackets or quotes are unbalanced.
    """
    text = text.strip()
    if text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1:
        return text[1:-1]
    if text[:1] == "[" and text[-1:] == "]":
        return (
            [typed_value(item, setting) for item in split_outside_brackets(text[1:-1], ",")]
            if text[1:-1].strip()
            else []
        )
    if text[:1] == "{" and text[-1:] == "}":
        pairs = [item.partition(":") for item in split_outside_brackets(text[1:-1], ",")] if text[1:-1].strip() else []
        if not all(colon for _, colon, _ in pairs):
            raise ConfigError(
                "setting",
                setting or text,
                f"has a mapping with an entry that is not KEY:VALUE: {text}",
                hint="write {key:value}",
            )
        return {key.strip(): typed_value(value, setting) for key, _, value in pairs}
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    numbers = [typed_value(item) for item in text.split("/")] if re.fullmatch(r"[\d.eE+-]+(/[\d.eE+-]+)+", text) else []
    return numbers if numbers and all(isinstance(number, int | float) for number in numbers) else text


def written(value: Any) -> str:
    """Convert a Python value to text that :func:`typed_value`, and Hydra in an override, convert back to it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if not isinstance(value, str) or (_PLAIN.fullmatch(text) and "${" not in text and typed_value(text) == text):
        return text
    quote = '"' if "'" in text else "'"
    return f"{quote}{text}{quote}"


def _change(formats: dict[str, Any], key: str, value: Any) -> None:
    """Set ``quantizer.key.FIELD`` or ``quantizer.value.FIELD`` in place; raise ConfigError for an unknown key."""
    *path, last = key.split(".")[1:]
    node: Any = formats
    for step in path:
        node = node.get(step) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        fields = [f"quantizer.{side}.{name}" for side in ("key", "value") for name in formats.get(side, ())]
        raise ConfigError(key, value, f"the quantizer {formats.get('name')} has no such key", allowed=fields)
    node[last] = value


def _quantizer_data(name: str) -> dict[str, Any]:
    """Return a quantizer of ``conf/quantizer`` as plain data; raise ConfigError for an unknown name."""
    presets = group_options("quantizer")
    if name not in presets:
        raise ConfigError("quantizer", name, "no such quantizer", allowed=presets)
    return read_choice(presets[name])


def _default_quantizer(method: str) -> str:
    """Return the name of the default quantizer of a method; ``none`` if it has none."""
    quantizer = load_method(method).quantizer
    return quantizer.name if quantizer else "none"
