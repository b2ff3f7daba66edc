"""Strict conversion of plain dicts to dataclasses: unknown keys, wrong types and values out of range are errors.

A dataclass is the schema: its annotations are the types, its field metadata the bounds (:func:`bounded`), and its
optional ``check()`` covers what annotations cannot express. This module does not import torch, so checks are fast.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from kvbench.errors import ConfigError, RangeError, cut_text, few, nearest

T = TypeVar("T")

#: names of the bounds in a field's metadata
BOUNDS = frozenset({"minimum", "maximum", "above"})
#: upper bounds of sizes: a larger number is a typing error that would otherwise end in a memory error much later
MOST_TOKENS = 2**24
MOST_ROWS = 2**16
MOST_GIB = 2**20
#: upper bound of seeds, and of every whole number without a bound of its own
MOST = 2**32 - 1


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare a dataclass field for a number within bounds, which :func:`build` enforces.

    In a list of numbers, the bounds apply to each. They do not apply to other values that the field's type allows, such
    as None or a string. `minimum` and `maximum` are allowed values, `above` is not; without a default the field is
    required.
    """
    limits = {"minimum": minimum, "maximum": maximum, "above": above}
    metadata = {name: limit for name, limit in limits.items() if limit is not None}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_bounds(tree: Any, prefix: str) -> None:
    """Raise ConfigError if a field with bounds (:func:`bounded`) has the wrong type or is outside them.

    For dataclasses that were made without :func:`build`. Fields without bounds are not looked at.
    """
    hints = _hints(type(tree))  # type: ignore[arg-type]
    for field in dataclasses.fields(tree):
        if field.init and not BOUNDS.isdisjoint(field.metadata):
            convert(hints[field.name], getattr(tree, field.name), join(prefix, field.name), field.metadata)


def build(cls: type[T], data: Mapping[str, Any], prefix: str = "") -> T:
    """Construct a dataclass from plain data after checking every key and value; nested dicts become nested dataclasses.

    Fields with a default may be missing in the data, which are dicts, lists and scalars as read from YAML. The prefix
    is the dotted key of the data in the whole configuration, for example ``method``.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type, is not one of the allowed values or is
            out of bounds. The message names the dotted key and, where they apply, the value, what is allowed and the
            closest valid name.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(prefix, data, "must be a group of keys, not a single value", allowed=field_names(cls))
    names = field_names(cls)
    for key in data:
        if key not in names:
            raise unknown(join(prefix, str(key)), data[key], f"no such key{_undecorated(cls)}", names)
    hints = _hints(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if not field.init:
            continue
        key = join(prefix, field.name)
        if field.name in data:
            values[field.name] = convert(hints[field.name], data[field.name], key, field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                key, None, "is missing", hint=f"set a value, for example {key}={example(hints[field.name])}"
            )
    return cls(**values)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def unknown(key: str, value: Any, problem: str, names: Iterable[str], hint: str = "") -> ConfigError:
    """Return, for the caller to raise, the ConfigError about a name that does not exist, with the closest valid name.

    The last part of the dotted key is compared with `names`. `problem` is, for example, ``no such key``; a `hint` is
    shown in place of the closest name.
    """
    names = list(names)
    near = nearest(key.rsplit(".", 1)[-1], names)
    hint = hint or (f"did you mean '{near}'?" if near else "run python -m kvbench --help for a list of groups and keys")
    allowed = few(names, key.rsplit(".", 1)[-1]) if names else "nothing"
    return ConfigError(key, _shown_yaml(value), problem, allowed=allowed, hint=hint)


def _undecorated(cls: type) -> str:
    """Return the rest of the message about an unknown key if `cls` or a base lacks its decorator; else empty."""
    for part in cls.__mro__:
        own = [name for name, hint in inspect.get_annotations(part).items() if "ClassVar" not in str(hint)]
        if own and dataclasses.is_dataclass(part) and "__dataclass_fields__" not in vars(part):
            return (
                f"; class {part.__name__} is not decorated with @dataclass(kw_only=True), so its own fields "
                f"({', '.join(own)}) are not read"
            )
    return ""


def load_class(key: str, target: Any, example: str) -> type:
    """Import the class ``package.module.Class`` that a configuration names under `key`, usually ``_target_``.

    Raises:
        ConfigError: `target` is not such a name, cannot be imported, or is not a class. The hint has a valid `example`.
    """
    hint = f"name a class, for example {example}"
    parts = target.split(".") if isinstance(target, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(key, target, "must be the full name of a class: package.module.Class", hint=hint)
    try:
        cls = getattr(importlib.import_module(".".join(parts[:-1])), parts[-1])
    except (ImportError, AttributeError) as error:
        raise ConfigError(key, target, f"cannot be imported ({cut_text(str(error))})", hint=hint) from error
    except Exception as error:  # the module's own code failed
        reason = cut_text(f"{type(error).__name__}: {error}")
        raise ConfigError(key, target, f"importing its module fails ({reason})", hint=hint) from error
    if not isinstance(cls, type):
        raise ConfigError(key, target, "is not a class", hint=hint)
    return cls


def field_names(cls: type) -> list[str]:
    """Return the names of a dataclass's fields that can be passed to its constructor."""
    return [field.name for field in dataclasses.fields(cls) if field.init]


def join(prefix: str, name: str) -> str:
    """Return the dotted key of `name` in the group `prefix`: ``prefix.name``, or `name` alone if `prefix` is empty."""
    return f"{prefix}.{name}" if prefix else name


def convert(hint: Any, value: Any, key: str, limits: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Check that a plain value as read from YAML fits a type annotation, and convert it to that type.

    A list becomes a tuple and a dict a dataclass, if the annotation says so; a whole number becomes a float. Numbers
    must be within `limits`, which has any of the keys ``minimum``, ``maximum`` and ``above`` (:func:`bounded`).

    Raises:
        ConfigError: the value has the wrong type, is not one of the allowed values, or is out of bounds.
        TypeError: `hint` is a kind of annotation that is not supported.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, key, limits)
    if origin is typing.Annotated:
        return convert(args[0], value, key, limits)
    if hint is type(None):
        if value is None:
            return None
    elif origin is Literal:
        # 1 == True in Python, so the type is compared too
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        raise ConfigError(key, _shown_yaml(value), "is not one of the choices", allowed=[_shown_yaml(a) for a in args])
    elif dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, key)  # type: ignore[arg-type]
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return _within(value, key, limits)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _within(float(value), key, limits)
    elif hint is str:
        if isinstance(value, str):
            return value
    elif (hint if origin is None else origin) in (list, tuple, Sequence):
        if isinstance(value, (list, tuple)):
            return _convert_items(origin or hint, args, value, key, limits)
    elif (hint if origin is None else origin) in (dict, Mapping):
        if isinstance(value, Mapping):
            item = args[1] if len(args) == 2 else Any
            return {name: convert(item, part, join(key, str(name)), limits) for name, part in value.items()}
    else:
        raise TypeError(f"{key}: kvbench.util.schema cannot check the annotation {hint!r}")
    raise ConfigError(
        key, _shown_yaml(value), f"must be {describe_type(hint)}", hint=f"try {_instead(hint, value, key, limits)}"
    )


def _instead(hint: Any, value: Any, key: str, limits: Mapping[str, Any]) -> str:
    """Return what to type in place of a value of the wrong type: of a fraction, the whole numbers on either side."""
    if hint is int and isinstance(value, float) and abs(value) < MOST:
        low, high = limits.get("minimum", -MOST), limits.get("maximum", MOST)
        near = [number for number in (math.floor(value), math.ceil(value)) if low <= number <= high]
        if near:
            return " or ".join(f"{key}={number}" for number in dict.fromkeys(near))
    if hint is int:
        return f"{key}={max(1, limits.get('minimum', 1))}"
    return f"{key}={example(hint)}"


def _convert_union(args: tuple[Any, ...], value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    if value is None and type(None) in args:
        return None
    members = [arg for arg in args if arg is not type(None)]
    if len(members) == 1 and value is not None:  # Optional[...]: the message about the inner type is clearer
        return convert(members[0], value, key, limits)
    for member in members:
        try:
            return convert(member, value, key, limits)
        except ConfigError as error:
            if isinstance(error, RangeError):
                raise  # the type is right: the message about the bounds is clearer
    raise ConfigError(key, _shown_yaml(value), f"must be {_either(args)}")


def _convert_items(origin: Any, args: tuple[Any, ...], value: Sequence[Any], key: str, limits: Any) -> Any:
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise ConfigError(key, list(value), f"must have exactly {len(args)} items, not {len(value)}")
        return tuple(convert(a, v, f"{key}[{i}]", limits) for i, (a, v) in enumerate(zip(args, value, strict=True)))
    item = args[0] if args else Any
    items = [convert(item, part, f"{key}[{i}]", limits) for i, part in enumerate(value)]
    return tuple(items) if origin is tuple else items


def _within(value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise RangeError(key, value, "must be a finite number")
    low, high, above = limits.get("minimum"), limits.get("maximum"), limits.get("above")
    if isinstance(value, int) and abs(value) > MOST and (high is None or value < 0):
        value_shown = cut_text(str(value)) if value.bit_length() < 1000 else "(a number of more than 300 digits)"
        raise RangeError(key, value_shown, "is too large", allowed=f"at most {MOST if high is None else high}")
    span = []
    if low is not None:
        span.append(f"at least {low}")
    if above is not None:
        span.append(f"greater than {above}")
    if high is not None:
        span.append(f"at most {high}")
    allowed = " and ".join(span) if len(span) > 1 else ""  # the problem names a single bound
    if low is not None and value < low:
        raise RangeError(key, value, f"must be at least {low}", allowed=allowed)
    if above is not None and value <= above:
        raise RangeError(key, value, f"must be greater than {above}", allowed=allowed)
    if high is not None and value > high:
        raise RangeError(key, value, f"must be at most {high}", allowed=allowed)
    return value


def describe_type(hint: Any) -> str:
    """Return a type annotation in words for error messages, such as ``a whole number`` or ``one of auto, cpu``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in words:
        return words[hint]
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(_shown_yaml(a) for a in args)
    if origin in (Union, types.UnionType):
        return _either(args)
    if (hint if origin is None else origin) in (list, tuple, Sequence):
        return "a list" + (f" of {describe_type(args[0])}" if args else "")
    return "a group of keys"


def _either(hints: Sequence[Any]) -> str:
    """Return the choices of a union in words; a number may be a whole number, so that is not said twice."""
    return " or ".join(describe_type(hint) for hint in hints if hint is not int or float not in hints)


def example(hint: Any) -> str:
    """Return a sample value for a type annotation, as one would type it on the command line, such as ``0.5``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    plain = {int: "1", float: "0.5", bool: "true", str: "name", type(None): "null"}
    if hint in plain:
        return plain[hint]
    if origin is Literal:
        return _shown_yaml(args[0])
    if origin in (Union, types.UnionType):
        return example(args[0])
    if (hint if origin is None else origin) in (list, tuple, Sequence):
        return f"[{example(args[0])}]" if args else "[...]"
    return "{...}"


def _shown_yaml(value: Any) -> str:
    """Return `value` as it is written in YAML and on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
