"""Conversion of nested dataclasses from and to JSON, and their JSON schema.

Fields are declared with the standard library's ``field(...)``, or with :func:`typed_key` if they have limits. The
annotations are walked by :mod:`kvbench.util.schema`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from kvbench.util.schema import SCALARS, Conversion, fields_of, join, taken_apart

Tree = TypeVar("Tree")

#: JSON's names of types
JSON = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", list: "array"}


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
    if optional and default is dataclasses.MISSING and factory is dataclasses.MISSING:
        default = None
    metadata = {"about": about, "optional": optional, "limits": limits}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


class _Json(Conversion):
    """Conversion of parsed JSON, which accepts ``3.0`` for an int; numbers keep the type that they have in the JSON."""

    lists, item_key = (list,), "{}.{}"

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def fits(self, kind: type, value: Any) -> bool:
        if kind in (int, float) and isinstance(value, float):
            return value.is_integer() if kind is int else math.isfinite(value)
        return super().fits(kind, value)

    def number(self, kind: type, value: Any, key: str, limits: Mapping[str, Any]) -> Any:
        return value

    def choice(self, choices: tuple[Any, ...], value: Any, key: str) -> Any:
        """Return a value if it is one of the choices, or another string, which a newer version may have written."""
        if value in choices or (isinstance(value, str) and any(isinstance(one, str) for one in choices)):
            return value
        raise ShapeError(f"{key} is not one of {', '.join(map(str, choices))}")

    def mistake(self, hint: Any, value: Any, key: str, limits: Mapping[str, Any]) -> Exception:
        words = SCALARS[hint][0] if hint in SCALARS else "a list" if taken_apart(hint)[2] is list else "an object"
        return ShapeError(f"{key or 'the content'} is not {'a text' if hint is str else words}")

    def missing(self, hint: Any, key: str) -> Exception:
        return ShapeError(f"{key} is missing")

    def unknown(self, cls: type, name: str, value: Any, prefix: str) -> None:
        if self.strict:
            raise ShapeError(f"{join(prefix, name)} is not a key of {cls.__name__}")


def read_typed(cls: type[Tree], content: Any, where: str = "", *, strict: bool = False) -> Tree:
    """Convert parsed JSON to a dataclass, including nested dataclasses. Missing keys get their defaults.

    `where` is the dotted key of `content` in a larger document, which error messages put before the keys; empty for a
    whole document. Unknown keys are ignored unless `strict`.

    Raises:
        ShapeError: a key without a default is missing, a value has the wrong type, or, if `strict`, a key is unknown.
    """
    return _Json(strict).build(cls, content, where)


def plain_tree(tree: Any, *, complete: bool = False) -> Any:
    """Convert a dataclass, including nested dataclasses, to dicts and lists that can be written as JSON.

    Without `complete`, keys that were declared ``optional`` and are None are left out.
    """
    if tree is None or isinstance(tree, (str, int, float)):
        return tree
    if dataclasses.is_dataclass(tree):
        content = {}
        for name, optional in _optional(type(tree)).items():  # type: ignore[arg-type]
            child = getattr(tree, name)
            if complete or child is not None or not optional:
                content[name] = plain_tree(child, complete=complete)
        return content
    if isinstance(tree, Mapping):
        return {str(name): plain_tree(child, complete=complete) for name, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain_tree(child, complete=complete) for child in tree]
    return tree


@cache
def _optional(cls: Any) -> dict[str, bool]:
    """Return for each field name whether the field is left out of the JSON when its value is None."""
    return {name: bool(field.metadata.get("optional")) for name, field in fields_of(cls).items()}


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


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass; the definitions of its parts are added to `definitions`."""
    properties = {}
    for name, field in fields_of(cls).items():
        limits, about = dict(field.metadata.get("limits", {})), field.metadata.get("about")
        properties[name] = _schema(field.hint, limits, definitions, nullable=not _optional(cls)[name])
        properties[name] |= {"description": about} if about else {}
    required = [name for name, optional in _optional(cls).items() if not optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(hint: Any, limits: dict[str, Any], definitions: dict[str, Any], nullable: bool = True) -> dict[str, Any]:
    """Return the schema of an annotated value; `nullable` is False for a key that is left out when it is None."""
    null, _, kind, args = taken_apart(hint)
    null = null and nullable
    if kind is Any:
        return limits
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}  # ends the recursion if a tree contains itself
            definitions[name] = _object(kind, definitions)  # type: ignore[arg-type]
        reference = {"$ref": f"#/$defs/{name}"}
        return {"anyOf": [reference, {"type": "null"}]} if null else reference
    if kind is Literal:
        return {"enum": [*args, *([None] if null else [])]}
    name = JSON[kind]
    if name == "object":
        names, content = limits.pop("keys", None), _schema((args or (Any,))[-1], limits, definitions)
        limits = {"additionalProperties": content} if content else {}
        limits |= {"propertyNames": {"pattern": names}} if names else {}
    elif name == "array":
        lengths = {name: limits.pop(name) for name in ("minItems", "maxItems") if name in limits}
        limits = {"items": _schema((args or (Any,))[-1], limits, definitions)} | lengths
    return {"type": [name, "null"] if null else name, **limits}
