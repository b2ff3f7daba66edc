"""Conversion of plain data to annotated types, with errors for configurations that do not fit them.

A dataclass is the schema: its annotations are the types, its field metadata the bounds (:func:`bounded`), and its
optional ``check()`` covers what annotations cannot express. :class:`Conversion` is the only code that walks over
annotations. By itself it is strict, as configurations require; :mod:`kvbench.results.typed` derives from it to read
JSON records. This module does not import torch, so checks are fast.
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
from typing import Any, Literal, NamedTuple, TypeVar, Union

from kvbench.errors import ConfigError, RangeError, cut_text, few, nearest

T = TypeVar("T")


#: scalar types in words, each with a value as one would type it
SCALARS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "1"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("text", "name"),
    type(None): ("null", "null"),
}
LISTS, GROUPS = (list, tuple, Sequence), (dict, Mapping)
#: names of the bounds in a field's metadata
BOUNDS = frozenset({"minimum", "maximum", "above"})
#: upper bounds of sizes: a larger number is a typing error that would otherwise end in a memory error much later
MOST_TOKENS = 2**24
MOST_ROWS = 2**16
MOST_GIB = 2**20
#: upper bound of seeds, and of every whole number without a bound of its own
MOST = 2**32 - 1
_UNBOUNDED: Mapping[str, Any] = types.MappingProxyType({})


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare a dataclass field for a number within bounds, which :func:`build` enforces.

    In a list of numbers, the bounds apply to each number. They do not apply to other values that the field's type
    allows, such as None or a string. `minimum` and `maximum` are allowed values, `above` is not; without a default the
    field is required.
    """
    limits = {"minimum": minimum, "maximum": maximum, "above": above}
    metadata = {name: limit for name, limit in limits.items() if limit is not None}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def taken_apart(hint: Any) -> tuple[bool, Any, Any, tuple[Any, ...]]:
    """Take a type annotation apart; the result is cached.

    Returns:
        Four values: True if the annotation is ``T | None`` for a single T; T, or else the annotation itself; its
        origin, which is a class, ``Literal``, ``Any`` or ``Union``; and its arguments.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return taken_apart(args[0])
    if origin in (Union, types.UnionType):
        members = [one for one in args if one is not type(None)]
        return (True, *taken_apart(members[0])[1:]) if len(members) == 1 else (False, hint, Union, args)
    return False, hint, origin or hint, args


class Field(NamedTuple):
    """Annotation and metadata of a dataclass field that the constructor takes, and whether it is required."""

    hint: Any
    metadata: Mapping[str, Any]
    required: bool


@functools.cache
def fields_of(cls: Any) -> dict[str, Field]:
    """Return by name the fields that a dataclass's constructor takes."""
    hints, none = typing.get_type_hints(cls), dataclasses.MISSING
    return {
        one.name: Field(hints[one.name], one.metadata, one.default is none and one.default_factory is none)
        for one in dataclasses.fields(cls)
        if one.init
    }


def field_names(cls: type) -> list[str]:
    """Return the names of a dataclass's fields that can be passed to its constructor."""
    return list(fields_of(cls))


class Conversion:
    """Conversion of plain values from YAML or JSON to annotated types; raises ConfigError for a value of a wrong type.

    If the annotation asks for it, a list becomes a tuple, a dict a dataclass and a whole number a float. Numbers must
    be within the argument `limits` of the methods, which has any of the keys ``minimum``, ``maximum`` and ``above``
    (:func:`bounded`). A subclass may change what fits and which error is raised.
    """

    #: types that are taken for a list, and the key of its items
    lists: Any = (list, tuple)
    item_key = "{}[{}]"

    def convert(self, hint: Any, value: Any, key: str, limits: Mapping[str, Any] = _UNBOUNDED) -> Any:
        """Check that a value fits a type annotation, and convert it to that type; `key` is its dotted key.

        Raises:
            ConfigError: the value has the wrong type, is not one of the allowed values, or is out of bounds.
            TypeError: `hint` is a kind of annotation that is not supported.
        """
        null, hint, kind, args = taken_apart(hint)
        if kind is Any or (null and value is None):
            return value
        if kind in SCALARS:
            if self.fits(kind, value):
                return self.number(kind, value, key, limits) if kind in (int, float) else value
        elif kind is Union:
            return self._member(args, value, key, limits)
        elif kind is Literal:
            return self.choice(args, value, key)
        elif dataclasses.is_dataclass(kind):
            return value if isinstance(value, kind) else self.build(kind, value, key)  # type: ignore[arg-type]
        elif kind in LISTS:
            if isinstance(value, self.lists):
                return self._items(kind, args, value, key, limits)
        elif kind in GROUPS:
            if isinstance(value, Mapping):
                item = args[1] if len(args) == 2 else Any
                return {name: self.convert(item, part, join(key, str(name)), limits) for name, part in value.items()}
        else:
            raise TypeError(f"{key}: kvbench.util.schema cannot check the annotation {hint!r}")
        raise self.mistake(hint, value, key, limits)

    def build(self, cls: type[T], data: Mapping[str, Any], prefix: str = "") -> T:
        """Construct a dataclass from plain data after checking every key and value; nested ones are built too.

        The data are dicts, lists and scalars; fields with a default may be missing in them. The prefix is the dotted
        key of the data in the whole document, for example ``method``.

        Raises:
            ConfigError: a key is unknown or missing, or a value has the wrong type, is not one of the allowed values or
                is out of bounds. The message names the dotted key and, where they apply, the value, what is allowed and
                the closest valid name.
        """
        if not isinstance(data, Mapping):
            raise self.mistake(cls, data, prefix, _UNBOUNDED)
        fields = fields_of(cls)  # type: ignore[arg-type]
        for name in data:
            if name not in fields:
                self.unknown(cls, str(name), data[name], prefix)
        values: dict[str, Any] = {}
        for name, (hint, metadata, required) in fields.items():
            if name in data:
                values[name] = self.convert(hint, data[name], f"{prefix}.{name}" if prefix else name, metadata)
            elif required:
                raise self.missing(hint, join(prefix, name))
        return cls(**values)

    def fits(self, kind: type, value: Any) -> bool:
        """Return True if a value is of the scalar type `kind`; True and False do not count as numbers."""
        return isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)

    def number(self, kind: type, value: Any, key: str, limits: Mapping[str, Any]) -> Any:
        """Return a number converted to `kind`, the annotated type; raise RangeError if it is out of bounds."""
        return _within(kind(value), key, limits)

    def choice(self, choices: tuple[Any, ...], value: Any, key: str) -> Any:
        """Return a value if it is one of the choices; else raise the error for the key."""
        # 1 == True in Python, so the type is compared too
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        raise ConfigError(
            key, shown_yaml(value), "is not one of the choices", allowed=[shown_yaml(one) for one in choices]
        )

    def mistake(self, hint: Any, value: Any, key: str, limits: Mapping[str, Any]) -> Exception:
        """Return the error about a value of the wrong type."""
        if dataclasses.is_dataclass(hint):
            problem = "must be a group of keys, not a single value"
            return ConfigError(key, value, problem, allowed=field_names(hint))  # type: ignore[arg-type]
        return ConfigError(
            key, shown_yaml(value), f"must be {describe_type(hint)}", hint=f"try {_instead(hint, value, key, limits)}"
        )

    def missing(self, hint: Any, key: str) -> Exception:
        """Return the error about a missing key."""
        return ConfigError(key, None, "is missing", hint=f"set a value, for example {key}={example(hint)}")

    def unknown(self, cls: type, name: str, value: Any, prefix: str) -> None:
        """Raise the error about a key that is not a field of a dataclass."""
        raise unknown(join(prefix, name), value, f"no such key{_undecorated(cls)}", field_names(cls))

    def _member(self, args: tuple[Any, ...], value: Any, key: str, limits: Mapping[str, Any]) -> Any:
        for member in args:
            try:
                return self.convert(member, value, key, limits)
            except ConfigError as error:
                if isinstance(error, RangeError):
                    raise  # the type is right: the message about the bounds is clearer
        raise ConfigError(key, shown_yaml(value), f"must be {_either(args)}")

    def _items(self, kind: Any, args: tuple[Any, ...], value: Sequence[Any], key: str, limits: Any) -> Any:
        hints: Iterable[Any] = (args[0] if args else Any,) * len(value)
        if kind is tuple and args and args[-1] is not Ellipsis:
            if len(value) != len(args):
                raise ConfigError(key, list(value), f"must have exactly {len(args)} items, not {len(value)}")
            hints = args
        items = (
            self.convert(hint, part, self.item_key.format(key, number), limits)
            for number, (hint, part) in enumerate(zip(hints, value, strict=True))
        )
        return tuple(items) if kind is tuple else list(items)


_strict = Conversion()
build, convert = _strict.build, _strict.convert


def check_bounds(tree: Any, prefix: str) -> None:
    """Raise ConfigError if a field with bounds (:func:`bounded`) has the wrong type or is outside them.

    This is for dataclasses that were made without :func:`build`. Fields without bounds are not checked.
    """
    for name, field in fields_of(type(tree)).items():  # type: ignore[arg-type]
        if not BOUNDS.isdisjoint(field.metadata):
            convert(field.hint, getattr(tree, name), join(prefix, name), field.metadata)


def unknown(key: str, value: Any, problem: str, names: Iterable[str], hint: str = "") -> ConfigError:
    """Return, for the caller to raise, the ConfigError about a name that does not exist, with the closest valid name.

    The last part of the dotted key is compared with `names`. `problem` is, for example, ``no such key``; a `hint` is
    shown in place of the closest name.
    """
    names, last = list(names), key.rsplit(".", 1)[-1]
    near = nearest(last, names)
    hint = hint or (f"did you mean '{near}'?" if near else "run python -m kvbench --help for a list of groups and keys")
    return ConfigError(key, shown_yaml(value), problem, allowed=few(names, last) if names else "nothing", hint=hint)


def _undecorated(cls: type) -> str:
    """Return an addition to the error about an unknown key if `cls` or a base lacks ``@dataclass``; else empty."""
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


def join(prefix: str, name: str) -> str:
    """Return the dotted key of `name` in the group `prefix`: ``prefix.name``, or `name` alone if `prefix` is empty."""
    return f"{prefix}.{name}" if prefix else name


def _instead(hint: Any, value: Any, key: str, limits: Mapping[str, Any]) -> str:
    """Return what to type in place of a value of the wrong type; for a fraction, the whole numbers on either side."""
    if hint is not int:
        return f"{key}={example(hint)}"
    low, high = limits.get("minimum", -MOST), limits.get("maximum", MOST)
    ends = (math.floor(value), math.ceil(value)) if isinstance(value, float) and abs(value) < MOST else ()
    near = [f"{key}={number}" for number in dict.fromkeys(ends) if low <= number <= high]
    return " or ".join(near) or f"{key}={max(1, low)}"


def _within(value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise RangeError(key, value, "must be a finite number")
    low, above, high = (limits.get(name) for name in ("minimum", "above", "maximum"))
    if isinstance(value, int) and abs(value) > MOST and (high is None or value < 0):
        value_shown = cut_text(str(value)) if value.bit_length() < 1000 else "(a number of more than 300 digits)"
        raise RangeError(key, value_shown, "is too large", allowed=f"at most {MOST if high is None else high}")
    bounds = [
        (f"at least {low}", low is None or value >= low),
        (f"greater than {above}", above is None or value > above),
        (f"at most {high}", high is None or value <= high),
    ]
    for text, kept in bounds:
        if not kept:
            span = [text for (text, _), limit in zip(bounds, (low, above, high), strict=True) if limit is not None]
            allowed = " and ".join(span) if len(span) > 1 else ""  # the problem names a single bound
            raise RangeError(key, value, f"must be {text}", allowed=allowed)
    return value


def describe_type(hint: Any) -> str:
    """Return a type annotation in words for error messages, such as ``a whole number`` or ``one of auto, cpu``."""
    return _named(hint)[0]


def example(hint: Any) -> str:
    """Return a sample value for a type annotation, as one would type it on the command line, such as ``0.5``."""
    return _named(hint)[1]


def _named(hint: Any) -> tuple[str, str]:
    """Return an annotation in words, and a sample value."""
    null, inner, kind, args = taken_apart(hint)
    if null:
        return f"{describe_type(inner)} or null", example(inner)
    if kind in SCALARS:
        return SCALARS[kind]
    if kind is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(shown_yaml(one) for one in args), shown_yaml(args[0])
    if kind is Union:
        return _either(args), example(args[0])
    if kind in LISTS:
        return (f"a list of {describe_type(args[0])}", f"[{example(args[0])}]") if args else ("a list", "[...]")
    return "a group of keys", "{...}"


def _either(hints: Sequence[Any]) -> str:
    """Return the types of a union in words; "a number" includes whole numbers, which are then not named too."""
    return " or ".join(describe_type(hint) for hint in hints if hint is not int or float not in hints)


def shown_yaml(value: Any) -> str:
    """Return `value` as it is written in YAML and on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
