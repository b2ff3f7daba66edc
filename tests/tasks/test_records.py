"""Kinds of fields: the values that each accepts and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.errors import DataError
from kvbench.tasks.records import (
    COUNT,
    FILLED_TEXT,
    TEXT,
    TEXT_OR_NULL,
    TEXT_OR_TEXTS,
    TEXTS,
    TEXTS_OR_NULL,
    Kind,
    check_record,
)

VALUES: dict[str, Any] = {
    "null": None,
    "text": "a",
    "empty": "",
    "blank": " \n",
    "half": "\ud800",
    "zero": 0,
    "number": 7,
    "negative": -1,
    "float": 7.0,
    "true": True,
    "list": ["a", ""],
    "nothing": [],
    "mixed": ["a", None],
    "halves": ["\udfff"],
    "object": {"a": 1},
    "tuple": ("a",),
}


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        (TEXT, "text empty blank"),
        (FILLED_TEXT, "text"),
        (TEXT_OR_NULL, "text empty blank null"),
        (TEXTS, "list"),
        (TEXTS_OR_NULL, "list nothing null"),
        (TEXT_OR_TEXTS, "text empty blank list"),
        (COUNT, "zero number"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_kinds(kind: Kind, allowed: str) -> None:
    assert {name for name, value in VALUES.items() if kind.allows(value)} == set(allowed.split())


def test_place_field_value_and_what_was_expected_are_named() -> None:
    with pytest.raises(DataError) as caught:
        check_record({"answers": "Paris"}, {"answers": TEXTS}, "qasper.jsonl line 3")
    assert str(caught.value) == (
        "qasper.jsonl line 3: field 'answers' is a string ('Paris'); expected a list of at least one string."
    )
    with pytest.raises(DataError, match=r"x line 1: the record has no field 'b'; its fields are a, c"):
        check_record({"a": 1, "c": 2}, ("a", "b"), "x line 1")
    for name, shown in {
        "null": "is null;",
        "blank": "is an empty string;",
        "half": "lone surrogate",
        "true": r"a boolean \(True\)",
        "object": "an object",
    }.items():
        with pytest.raises(DataError, match=shown):
            check_record({"a": VALUES[name]}, {"a": FILLED_TEXT}, "x line 1")
    check_record({"a": "text"}, {"a": FILLED_TEXT}, "x line 1")
