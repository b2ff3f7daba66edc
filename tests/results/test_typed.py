"""Dataclasses from and to JSON: defaults, refusals that name the key, and the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
import pytest

from kvbench.results.typed import ShapeError, plain_tree, read_typed, typed_key, typed_schema


@dataclass(frozen=True, kw_only=True)
class Leaf:
    size: int | None = typed_key("number of things", default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Tree:
    name: str
    rate: float = typed_key(minimum=0)
    good: bool = False
    kind: Literal["a", "b"] | None = None
    leaf: Leaf = typed_key(factory=Leaf)
    leaves: dict[str, Leaf] = typed_key(factory=dict, keys="^[a-z]+$")
    numbers: list[int] = typed_key(factory=list, minItems=1, minimum=2)
    note: str | None = typed_key(optional=True)
    free: Any = None


FULL = {
    "name": "n",
    "rate": 0.5,
    "good": True,
    "kind": "b",
    "leaf": {"size": 3},
    "leaves": {"x": {"size": 4}},
    "numbers": [2, 3],
    "note": "written",
    "free": {"any": [1]},
}


def test_what_is_read_is_written_again() -> None:
    tree = read_typed(Tree, FULL)
    assert tree == Tree(
        name="n",
        rate=0.5,
        good=True,
        kind="b",
        leaf=Leaf(size=3),
        leaves={"x": Leaf(size=4)},
        numbers=[2, 3],
        note="written",
        free={"any": [1]},
    )
    assert plain_tree(tree) == FULL


def test_missing_keys_get_their_defaults_and_optional_ones_are_left_out() -> None:
    tree = read_typed(Tree, {"name": "n", "rate": 2})
    assert tree.leaf == Leaf() and tree.leaves == {} and tree.numbers == [] and tree.note is None
    written = plain_tree(tree)
    assert "note" not in written and written["kind"] is None and written["leaf"] == {"size": None}
    assert plain_tree(tree, complete=True) == {**written, "note": None}
    assert plain_tree({1: (Leaf(size=1),)}) == {"1": [{"size": 1}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": 3}, "name is not a text"),
        ({"good": 1}, "good is not true or false"),
        ({"rate": "1"}, "rate is not a number"),
        ({"rate": True}, "rate is not a number"),
        ({"rate": float("nan")}, "rate is not a number"),
        ({"rate": None}, "rate is not a number"),
        ({"leaf": {"size": 1.5}}, "leaf.size is not a whole number"),
        ({"leaf": {"size": True}}, "leaf.size is not a whole number"),
        ({"leaf": []}, "leaf is not an object"),
        ({"leaves": []}, "leaves is not an object"),
        ({"leaves": {"x": 3}}, "leaves.x is not an object"),
        ({"leaves": {"x": {"size": "s"}}}, "leaves.x.size is not a whole number"),
        ({"numbers": {}}, "numbers is not a list"),
        ({"numbers": [1, "2"]}, "numbers.1 is not a whole number"),
        ({"kind": 3}, "kind is not one of a, b"),
    ],
)
def test_values_of_another_type_are_refused_by_their_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ShapeError) as error:
        read_typed(Tree, {**FULL, **changes})
    assert str(error.value) == said


def test_whole_documents_and_missing_or_unknown_keys() -> None:
    for content in (None, [], "text"):
        with pytest.raises(ShapeError, match="the content is not an object"):
            read_typed(Tree, content)
    with pytest.raises(ShapeError, match=r"^name is missing$"):
        read_typed(Tree, {"rate": 1})
    with pytest.raises(ShapeError, match=r"^inner\.rate is missing$"):
        read_typed(Tree, {"name": "n"}, "inner")
    assert read_typed(Tree, {**FULL, "new": 1}) == read_typed(Tree, FULL)
    with pytest.raises(ShapeError, match=r"^new is not a key of Tree$"):
        read_typed(Tree, {**FULL, "new": 1}, strict=True)
    with pytest.raises(ShapeError, match=r"^leaf\.new is not a key of Leaf$"):
        read_typed(Tree, {**FULL, "leaf": {"new": 1}}, strict=True)


def test_whole_floats_are_integers_and_later_versions_have_other_words() -> None:
    tree = read_typed(Tree, {**FULL, "leaf": {"size": 3.0}, "kind": "c", "rate": 1})
    assert tree.leaf.size == 3 and tree.kind == "c" and tree.rate == 1


def test_the_schema_says_what_is_written() -> None:
    written = typed_schema(Tree, "a tree")
    jsonschema.Draft202012Validator.check_schema(written)
    assert written == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a tree",
        "$defs": {
            "Leaf": {
                "type": "object",
                "properties": {"size": {"type": ["integer", "null"], "minimum": 0, "description": "number of things"}},
                "required": ["size"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "rate": {"type": "number", "minimum": 0},
            "good": {"type": "boolean"},
            "kind": {"enum": ["a", "b", None]},
            "leaf": {"$ref": "#/$defs/Leaf"},
            "leaves": {
                "type": "object",
                "additionalProperties": {"$ref": "#/$defs/Leaf"},
                "propertyNames": {"pattern": "^[a-z]+$"},
            },
            "numbers": {"type": "array", "items": {"type": "integer", "minimum": 2}, "minItems": 1},
            "note": {"type": "string"},
            "free": {},
        },
        "required": ["name", "rate", "good", "kind", "leaf", "leaves", "numbers", "free"],
        "additionalProperties": False,
    }
    jsonschema.validate(FULL, written)
