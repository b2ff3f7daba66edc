"""The strict schema: what is let through unchanged, and what each refusal says."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest

from kvbench.errors import ConfigError, RangeError, cut_text, few, nearest
from kvbench.util import schema
from kvbench.util.schema import MOST, bounded, build, check_bounds, convert, describe_type, example, load_class


@dataclass(frozen=True)
class Part:
    bits: int = 2


@dataclass(frozen=True)
class Whole:
    must: int
    level: Literal[1, 2] = 1
    flag: bool = False
    share: float = bounded(0.5, above=0.0, maximum=1.0)
    count: int | None = bounded(3, minimum=-2, maximum=9)
    either: int | Literal["all"] | None = bounded("all", minimum=4)
    pair: tuple[int, str] = (1, "a")
    names: Sequence[str] = ()
    table: dict[str, int] = field(default_factory=dict, metadata={"minimum": 5})
    part: Part = field(default_factory=Part)
    anything: Any = None
    marked: Annotated[int, "unit"] = 1
    hidden: int = field(default=7, init=False)


def made(**values: Any) -> Whole:
    return build(Whole, {"must": 1, **values}, "group")


def refused(**values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        made(**values)
    return caught.value


def test_values_at_their_bounds_are_let_through() -> None:
    assert made(count=-2).count == -2
    assert made(count=9).count == 9
    assert made(count=None).count is None
    assert made(share=1).share == 1.0
    assert isinstance(made(share=1).share, float)
    assert made(share=1e-9).share == 1e-9
    assert made(either=4).either == 4
    assert made(either="all").either == "all"
    assert made(must=MOST).must == MOST
    assert made(must=-MOST).must == -MOST
    assert made(table={"a": 5}).table == {"a": 5}


def test_the_largest_numbers() -> None:
    assert (schema.MOST_TOKENS, schema.MOST_ROWS, schema.MOST_GIB, MOST) == (2**24, 2**16, 2**20, 2**32 - 1)
    assert convert(int, 2**40, "key", {"maximum": 2**50}) == 2**40  # its own bound counts
    with pytest.raises(ConfigError, match=f"key={-(2**40)}: is too large"):
        convert(int, -(2**40), "key", {"maximum": 2**50})
    with pytest.raises(ConfigError, match=f"allowed: at most {MOST}"):
        convert(int, MOST + 1, "key")


def test_a_configuration_is_made_of_plain_types() -> None:
    assert made(pair=[2, "b"]).pair == (2, "b")
    assert made(names=["x"]).names == ["x"]
    assert made(part={"bits": 4}).part == Part(4)
    assert made(part=Part(8)).part == Part(8)
    assert made(anything={"a": [1, None]}).anything == {"a": [1, None]}
    assert made(marked=3).marked == 3
    assert made().hidden == 7


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"level": True}, "group.level=true: is not one of the choices"),
        ({"level": 1.0}, "is not one of the choices"),
        ({"level": 3}, "allowed: 1, 2"),
        ({"flag": 0}, "must be true or false"),
        ({"flag": "true"}, "must be true or false"),
        ({"must": True}, "must be a whole number"),
        ({"must": "1"}, "must be a whole number"),
        ({"must": None}, "group.must=null: must be a whole number"),
        ({"share": True}, "must be a number"),
        ({"share": 0.0}, "greater than 0.0 and at most 1.0"),
        ({"share": 1.0000001}, "must be at most 1.0"),
        ({"share": float("inf")}, "must be a finite number"),
        ({"count": -3}, "must be at least -2"),
        ({"count": 10}, "must be at most 9"),
        ({"either": 3}, "must be at least 4"),
        ({"either": "some"}, "must be a whole number or all"),
        ({"must": MOST + 1}, "is too large"),
        ({"must": -MOST - 1}, "is too large"),
        ({"must": 10**5000}, "is too large"),
        ({"pair": [1]}, "must have exactly 2 items"),
        ({"pair": [1, 2]}, r"group.pair\[1\]=2: must be text"),
        ({"names": "ab"}, "must be a list of text"),
        ({"names": ["a", 1]}, r"group.names\[1\]=1"),
        ({"table": {"a": 4}}, "group.table.a=4: must be at least 5"),
        ({"table": [1]}, "must be a group of keys"),
        ({"part": {"bit": 1}}, "did you mean 'bits'"),
        ({"hidden": 1}, "no such key"),
    ],
)
def test_what_is_refused_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"share": 1.5}, "x.share=1.5: must be at most 1.0."),
        ({"share": float("nan")}, "x.share=nan: must be a finite number."),
        ({"share": True}, "x.share=true: must be a number."),
        ({"share": "0.5"}, "x.share=0.5: must be a number."),
        ({"count": 2.5}, "x.count=2.5: must be a whole number."),
        ({"count": [3]}, "x.count=[3]: must be a whole number."),
        ({"either": 3}, "x.either=3: must be at least 4."),
        ({"either": False}, "x.either=false: must be a whole number or all or null."),
    ],
)
def test_bounds_hold_for_an_instance_that_was_not_built(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_bounds(Whole(**({"must": 1} | values)), "x")
    assert str(refused.value).splitlines()[0].startswith(said)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"minimum": 1}, "key=0: must be at least 1."),
        ({"minimum": 1, "maximum": 9}, "key=0: must be at least 1.\n  allowed: at least 1 and at most 9"),
    ],
)
def test_bounds_are_said_once(limits: dict[str, int], said: str) -> None:
    with pytest.raises(RangeError) as refused:
        convert(int, 0, "key", limits)
    assert str(refused.value) == said


def test_values_within_bounds_and_fields_without_any_are_let_through() -> None:
    for values in ({}, {"share": 1}, {"count": None}, {"either": None}, {"either": "all"}, {"table": {"a": 5}}):
        check_bounds(Whole(**({"must": "text"} | values)), "x")  # type: ignore[arg-type]


def test_the_number_to_type_instead_is_within_the_bounds() -> None:
    for minimum, typed in ((None, 1), (-2, 1), (2, 2)):
        with pytest.raises(ConfigError, match=f"try key={typed}$"):
            convert(int, "x", "key", {} if minimum is None else {"minimum": minimum})


def test_a_missing_key_is_shown_as_it_would_be_typed() -> None:
    with pytest.raises(ConfigError, match=r"group\.must: is missing\.\n  hint: set a value, for example group\.must=1"):
        build(Whole, {}, "group")
    with pytest.raises(ConfigError, match="must: is missing"):
        build(Whole, {})
    with pytest.raises(ConfigError, match="group=3: must be a group of keys"):
        build(Whole, 3, "group")  # type: ignore[arg-type]


def test_an_unknown_key_is_told_its_nearest_and_never_the_values_nearest() -> None:
    error = refused(shara="names")
    assert "did you mean 'share'?" in str(error)
    assert "group.shara=names" in str(error)
    assert "--help" in refused(zzzzzz=1).hint


@pytest.mark.parametrize(
    ("hint", "words", "typed"),
    [
        (int, "a whole number", "1"),
        (float, "a number", "0.5"),
        (bool, "true or false", "true"),
        (str, "text", "name"),
        (type(None), "null", "null"),
        (Literal["a", None], "one of a, null", "a"),
        (int | None, "a whole number or null", "1"),
        (Literal[False, 1], "one of false, 1", "false"),
        (Sequence[float], "a list of a number", "[0.5]"),
        (tuple[int, ...], "a list of a whole number", "[1]"),
        (list, "a list", "[...]"),
        (Mapping[str, int], "a group of keys", "{...}"),
    ],
)
def test_types_in_words(hint: Any, words: str, typed: str) -> None:
    assert describe_type(hint) == words
    assert example(hint) == typed


def test_an_annotation_that_cannot_be_checked_is_a_mistake_of_the_class() -> None:
    with pytest.raises(TypeError, match="cannot check"):
        convert(set, {1}, "key")


def test_a_class_is_named_and_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_at_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_class("k", "kvbench.methods.kivi.Kivi", "a.B").__name__ == "Kivi"
    for target, said in (
        ("os.system", "is not a class"),
        ("....", "must be the full name of a class: package.module.Class"),
        ("Kivi", "must be the full name of a class: package.module.Class"),
        (None, "must be the full name of a class: package.module.Class"),
        ("a b.C", "must be the full name of a class: package.module.Class"),
        ("nowhere.at.All", "cannot be imported"),
        ("kvbench.methods.kivi.Kiwi", "cannot be imported"),
        ("breaks_at_import.C", "importing its module fails .ZeroDivisionError"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            load_class("method._target_", target, "kvbench.methods.kivi.Kivi")
        assert "for example kvbench.methods.kivi.Kivi" in str(caught.value)
    sys.modules.pop("breaks_at_import", None)


def test_many_names_are_shortened_to_the_nearest_and_told_how_to_list() -> None:
    names = [f"choice{i}" for i in range(21)] + ["kivi"]
    assert few(names[:20], "x") == ", ".join(names[:20])
    shown = few(names, "kiwi", "HELP")
    assert shown == "kivi, ... (22 in all; HELP lists them)"
    assert few(names, "#", "") == "choice0, choice1, choice2, choice3, choice4, choice5, ... (22 in all)"
    assert few("one to three", "x") == "one to three"
    error = ConfigError("group", "kiwi", allowed=names, listing="HELP")
    assert "did you mean 'kivi'?" in str(error)
    assert "HELP lists them" in str(error)


def test_a_long_value_is_repeated_in_part() -> None:
    assert cut_text("x" * 200) == "x" * 200
    assert cut_text("x" * 201) == "x" * 200 + "... (201 characters)"
    assert len(str(ConfigError("key", "x" * 100_000, "is long"))) < 300
    assert nearest("kiwi" * 100_000, ["kivi"]) is None


@dataclass(kw_only=True)
class Decorated:
    count: int = 1


class Bare(Decorated):
    label: ClassVar[str] = "x"
    sinks: int = 4


class Constant(Decorated):
    label: ClassVar[str] = "x"


@dataclass(kw_only=True)
class OfBare(Bare):
    more: int = 1


@pytest.mark.parametrize("cls", [Bare, OfBare])
def test_a_missing_decorator_is_named(cls: type) -> None:
    message = r"group\.sinks=4: no such key; class Bare is not decorated with @dataclass\(kw_only=True\), so its own "
    with pytest.raises(ConfigError, match=message + r"fields \(sinks\) are not read"):
        build(cls, {"sinks": 4}, "group")


@pytest.mark.parametrize("cls", [Decorated, Constant])
def test_a_class_without_own_fields_needs_no_decorator(cls: type) -> None:
    with pytest.raises(ConfigError, match=r"group\.sinks=4: no such key\."):
        build(cls, {"sinks": 4}, "group")
