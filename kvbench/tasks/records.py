"""Checks of a record's fields. Without them, a text in place of a list of texts would be scored letter by letter.

In this package, `place` is the file and line of a record, and `field` the name of one of its fields, for error
messages.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import DataError

Record = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A type check for a field of a record; `name` is what the field must be, for example "a list of strings"."""

    name: str
    allows: Callable[[Any], bool]

    def check(self, value: Any, field: str, place: str) -> None:
        """Raise DataError if a value is not of this kind."""
        if not self.allows(value):
            raise DataError(f"{place}: field '{field}' is {_shown_json(value)}; expected {self.name}.")


def is_text(value: Any) -> bool:
    """Return True if a value is a string that can be encoded as UTF-8.

    Not all strings can: JSON may contain half of a surrogate pair, which Python reads as a lone surrogate.
    """
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_filled(value: Any) -> bool:
    return is_text(value) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


TEXT = Kind("a string", is_text)
FILLED_TEXT = Kind("a string that is not empty", _is_filled)
TEXT_OR_NULL = Kind("a string or null", lambda value: value is None or is_text(value))
TEXTS = Kind("a list of at least one string", lambda value: bool(value) and _are_texts(value))
TEXTS_OR_NULL = Kind("a list of strings, or null", lambda value: value is None or _are_texts(value))
TEXT_OR_TEXTS = Kind(
    "a string or a list of strings", lambda value: is_text(value) or (bool(value) and _are_texts(value))
)
COUNT = Kind(
    "a whole number, 0 or greater", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0
)


def check_record(record: Record, fields: Iterable[str] | Mapping[str, Kind], place: str) -> None:
    """Raise DataError if a record lacks a required field, or if such a field has a value of the wrong kind.

    Kinds are checked if `fields` maps names to kinds.
    """
    for field in fields:
        if field not in record:
            raise DataError(
                f"{place}: the record has no field '{field}'; its fields are {', '.join(map(str, record))}."
            )
        if isinstance(fields, Mapping):
            fields[field].check(record[field], field, place)


_NAMES: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def _shown_json(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str) and not value.strip():
        return "an empty string"
    if isinstance(value, str) and not is_text(value):
        return "a string with a lone surrogate, which is half a character"
    return f"{_NAMES.get(type(value), type(value).__name__)} ({reprlib.repr(value)})"
