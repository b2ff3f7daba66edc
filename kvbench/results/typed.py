"""Conversion of nested dataclasses from and to JSON, and their JSON schema.

Fields are declared with the standard library's ``field(...)``, or with :func:`typed_key` if they have limits.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Tree = TypeVar("Tree")

#: names of JSON's types in messages
_SCALARS = {str: ("text", "string"), bool: ("true or false", "boolean"), int: ("whole number", "integer")}
_SCALARS[float] = ("number", "number")


class ShapeError(ValueError):
    """Error for JSON content that does not match a dataclass; the message names the key."""


def typed_key(
    about: str = "",
    *,
    default: Any = dataclasses.MISSING,
    factory: Any = dataclasses.MISSING,
    optional: bool = False,
    **limits: Any,
) -> Any:
    """Declare a dataclass field, with a description and limits that appear in the JSON schema.

    Args:
        default: value of the field if the JSON does not have the key.
        factory: function that returns this value, in place of `default`; needed for lists and dicts.
        optional: True to leave the key out of the JSON if its value is None.
        **limits: keywords of JSON schema, for example ``minimum=0`` or ``pattern="..."``. In addition, ``keys`` is a
            regular expression for the keys of a dict. Limits are only written to the schema; :func:`read_typed` does
            not check them.
    """
    metadata = {"about": about, "optional": optional, "limits": limits}
    if optional and default is dataclasses.MISSING and factory is dataclasses.MISSING:
        default = None
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def read_typed(cls: type[Tree], content: Any, where: str = "", *, strict: bool = False) -> Tree:
    """Convert parsed JSON to a dataclass, including nested dataclasses. Missing keys get their defaults.

    `where` is the dotted key of `content` in a larger document, which error messages put before the keys; empty for a
    whole document. Unknown keys are ignored unless `strict`.

    Raises:
        ShapeError: a key without a default is missing, a value has the wrong type, or, if `strict`, a key is unknown.
    """
    return _read_value(cls, content, where, strict)  # type: ignore[no-any-return]


def plain_tree(tree: Any, *, complete: bool = False) -> Any:
    """Convert a dataclass, including nested dataclasses, to dicts and lists that can be written as JSON.

    Without `complete`, keys that were declared ``optional`` and are None are left out.
    """
    if tree is None or isinstance(tree, (str, int, float)):
        return tree
    kind: Any = type(tree)
    if _is_tree(kind):
        content = {}
        for name, optional in _optional(kind):
            child = getattr(tree, name)
            if complete or child is not None or not optional:
                content[name] = plain_tree(child, complete=complete)
        return content
    if isinstance(tree, Mapping):
        return {str(name): plain_tree(child, complete=complete) for name, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain_tree(child, complete=complete) for child in tree]
    return tree


def typed_schema(cls: type, title: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) that describes the output of :func:`plain_tree` for a dataclass."""
    definitions: dict[str, Any] = {}
    root = _object(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "$defs": dict(sorted(definitions.items())),
        **root,
    }


@cache
def _optional(cls: type) -> list[tuple[str, bool]]:
    """Return the names of a class's fields, each with True if it is left out of the JSON where it is None."""
    return [(one.name, bool(one.metadata.get("optional"))) for one in dataclasses.fields(cls)]


@cache
def _is_tree(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _shape(kind: Any) -> tuple[bool, Any, Any]:
    """Take an annotation apart, once for each: does None fit, what else does, and what is that made of.

    The second result is a dataclass, ``Literal``, ``dict``, ``list``, a scalar or ``Any``; the third is the fields of
    the dataclass, the literals, or the annotation of the elements.
    """
    choices = _choices(kind)
    null = type(None) in choices
    (kind,) = (choice for choice in choices if choice is not type(None))
    if _is_tree(kind):
        hints = _hints(kind)
        return null, kind, [(one.name, hints[one.name], _needed(one)) for one in dataclasses.fields(kind)]
    origin = get_origin(kind) or kind
    if origin is Literal:
        return null, origin, get_args(kind)
    return null, origin, (get_args(kind) or (Any,))[-1] if origin in (dict, list) else None


def _needed(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def _read_value(kind: Any, content: Any, where: str, strict: bool) -> Any:
    """Return `content` converted to the annotation `kind`; raise ShapeError if it does not fit."""
    if kind is Any:
        return content
    null, kind, parts = _shape(kind)
    if content is None and null:
        return None
    if kind in _SCALARS:
        return _read_scalar(kind, content, where)
    if kind is Literal:
        return _read_literal(parts, content, where)
    if kind is dict:
        if not isinstance(content, Mapping):
            raise ShapeError(f"{where or 'the content'} is not an object")
        return {str(name): _read_value(parts, child, f"{where}.{name}", strict) for name, child in content.items()}
    if kind is list:
        if not isinstance(content, list):
            raise ShapeError(f"{where or 'the content'} is not a list")
        return [_read_value(parts, child, f"{where}.{number}", strict) for number, child in enumerate(content)]
    return _read_object(kind, parts, content, where, strict)


def _read_object(cls: type, fields: list[tuple[str, Any, bool]], content: Any, where: str, strict: bool) -> Any:
    if not isinstance(content, Mapping):
        raise ShapeError(f"{where or 'the content'} is not an object")
    values = {}
    for name, hint, needed in fields:
        place = f"{where}.{name}" if where else name
        if name in content:
            values[name] = _read_value(hint, content[name], place, strict)
        elif needed:
            raise ShapeError(f"{place} is missing")
    unknown = [name for name in content if name not in _hints(cls)] if strict else []
    if unknown:
        raise ShapeError(f"{f'{where}.{unknown[0]}'.lstrip('.')} is not a key of {cls.__name__}")
    return cls(**values)


def _read_literal(choices: tuple[Any, ...], content: Any, where: str) -> Any:
    """Return `content` if it is one of `choices`, or another string, which a newer version may have written."""
    if content not in choices and not (isinstance(content, str) and any(isinstance(one, str) for one in choices)):
        raise ShapeError(f"{where} is not one of {', '.join(map(str, choices))}")
    return content


def _read_scalar(kind: Any, content: Any, where: str) -> Any:
    good = isinstance(content, kind if kind is not float else (int, float))
    if kind is int and isinstance(content, float):
        good = content.is_integer()
    if kind in (int, float):
        good = good and not isinstance(content, bool) and math.isfinite(content)
    if not good:
        raise ShapeError(f"{where} is not {'' if kind is bool else 'a '}{_SCALARS[kind][0]}")
    return content


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass."""
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        limits = dict(field.metadata.get("limits", {}))
        optional = field.metadata.get("optional", False)
        kinds = _choices(_hints(cls)[field.name])
        if optional:  # omitted if None, so null is never written
            kinds = tuple(kind for kind in kinds if kind is not type(None))
        else:
            required.append(field.name)
        about = field.metadata.get("about")
        properties[field.name] = _schema(kinds, limits, definitions) | ({"description": about} if about else {})
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(kinds: tuple[Any, ...], limits: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value whose type is one of `kinds`."""
    null = type(None) in kinds
    (kind,) = (kind for kind in kinds if kind is not type(None))
    if kind is Any:
        return limits
    if _is_tree(kind):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # ends the recursion if a tree contains itself
            definitions[kind.__name__] = _object(kind, definitions)
        reference = {"$ref": f"#/$defs/{kind.__name__}"}
        return {"anyOf": [reference, {"type": "null"}]} if null else reference
    origin = get_origin(kind) or kind
    if origin is Literal:
        return {"enum": [*get_args(kind), *([None] if null else [])]}
    if origin is dict:
        names = limits.pop("keys", None)
        content = _schema(_choices((get_args(kind) or (Any,))[-1]), limits, definitions)
        limits = {"additionalProperties": content} if content else {}
        limits |= {"propertyNames": {"pattern": names}} if names else {}
    elif origin is list:
        lengths = {name: limits.pop(name) for name in ("minItems", "maxItems") if name in limits}
        limits = {"items": _schema(_choices((get_args(kind) or (Any,))[-1]), limits, definitions)} | lengths
    name = {dict: "object", list: "array"}.get(origin) or _SCALARS[kind][1]
    return {"type": [name, "null"] if null else name, **limits}
