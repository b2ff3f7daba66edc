"""Packed formats: their names, the group size that fits a head, and what cannot be stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.errors import ConfigError
from kvbench.quantizers.spec import PLANES, FormatSpec, QuantizerSpec, describe_formats, fitting, preset_name

KEY = FormatSpec(bits=4, group_size=32, axis="channel")
VALUE = FormatSpec(bits=4, group_size=32, axis="token")
INT4 = QuantizerSpec(name="int4", key=KEY, value=VALUE)


@pytest.mark.parametrize(
    ("most", "head_dim", "group"),
    [
        (64, 128, 64),
        (64, 80, 16),
        (64, 96, 32),
        (48, 96, 32),  # a power of two
        (128, 64, 64),
        (32, 40, 8),
        (64, 72, 8),
        (8, 128, 8),
        (64, 36, None),
        (4, 128, None),
    ],
)
def test_a_group_is_the_largest_power_of_two_that_divides_the_head_and_8_is_the_least(most, head_dim, group) -> None:
    assert fitting(most, head_dim) == group


def test_a_name_is_that_of_the_preset_and_what_differs_from_it() -> None:
    assert preset_name("int2+key.group_size=64") == "int2" == preset_name("int2")
    standard = {"key": {"bits": 2, "group_size": 32}, "value": {"bits": 2, "group_size": 32, "axis": "token"}}
    same = {"key": {"bits": 2, "group_size": 32, "kind": "affine"}, "value": dict(standard["value"])}
    assert describe_formats("int2", same, standard) == "int2"  # the kind is the default
    assert describe_formats("int2+key.bits=3", same, standard) == "int2"
    changed = {"key": {"bits": 4, "group_size": 32, "kind": "hierarchical"}, "value": {**standard["value"], "bits": 8}}
    assert describe_formats("int2", changed, standard) == "int2+key.bits=4,key.kind=hierarchical,value.bits=8"
    assert describe_formats("int2+key.bits=4", changed, None) == "int2+key.bits=4"  # no such preset
    assert describe_formats("int2", {"key": None}, {"value": {"bits": 2}}) == "int2+value.bits=None"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, "quantizer.key.bits=7: codes with this number of bits cannot be stored"),
        ({"bits": 4, "kind": "hierarchical"}, "quantizer.key.bits=4: must be 8, because a hierarchical code"),
        ({"axis": "row"}, "quantizer.key.axis=row: is not a known axis"),
        ({"group_size": "head_dim"}, "quantizer.key.group_size=head_dim: must be a number"),
        ({"group_size": 0}, r"quantizer.key.group_size=0: must be a positive integer\."),
        ({"group_size": True}, "quantizer.key.group_size=true: must be a positive integer"),
        ({"group_size": 2.0}, "quantizer.key.group_size=2.0: must be a positive integer"),
        ({"group_size": "all", "axis": "token"}, "group_size=all: must be a positive integer or head_dim"),
    ],
    ids=str,
)
def test_formats_that_cannot_be_stored_are_refused(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(KEY, **change).check("quantizer.key")


def test_formats_that_can_be_stored_are_taken_and_refusals_say_what_is_allowed() -> None:
    for bits in PLANES:
        replace(KEY, bits=bits).check("key")
    replace(KEY, bits=8, kind="hierarchical").check("key")
    replace(KEY, group_size=1).check("key")
    replace(VALUE, group_size="head_dim").check("value")
    for form, words in (
        (replace(KEY, bits=1), "allowed: 2, 3, 4, 5, 6, 8"),
        (replace(KEY, bits=2, kind="hierarchical"), "allowed: 8"),
        (replace(KEY, axis="row"), "allowed: channel, token"),
        (replace(KEY, group_size="head_dim"), "allowed: 1 or greater, such as 64"),
        (replace(VALUE, group_size=-1), "allowed: 1 or greater, such as 64, or head_dim"),
    ):
        with pytest.raises(ConfigError, match=words):
            form.check("key")
    with pytest.raises(ConfigError) as raised:
        replace(KEY, group_size=-1).check("key")
    assert "head_dim" not in str(raised.value)


def test_a_group_of_a_preset_is_reduced_to_fit_the_head_and_one_that_was_asked_for_is_not() -> None:
    usual = replace(VALUE, group_size=64, default=True)
    assert [usual.channels_per_group(head) for head in (64, 128, 96, 80, 36)] == [64, 64, 32, 16, 64]
    asked = replace(VALUE, group_size=64)
    assert [asked.channels_per_group(head) for head in (128, 96, 80)] == [64, 64, 64]
    assert replace(VALUE, group_size="head_dim").channels_per_group(80) == 80
    assert asked == usual and "default" not in repr(usual)  # formats are equal if they store the same


def test_groups_that_equal_those_of_the_preset_are_defaults() -> None:
    assert (KEY.default, VALUE.default) == (False, False)
    marked = INT4.as_default(INT4)
    assert (marked.key.default, marked.value.default) == (True, True) and marked == INT4
    other = replace(INT4, key=replace(KEY, group_size=64), value=replace(VALUE, bits=2))
    assert (other.as_default(INT4).key.default, other.as_default(INT4).value.default) == (False, True)
    turned = replace(INT4, value=replace(VALUE, axis="channel"))
    assert (turned.as_default(INT4).key.default, turned.as_default(INT4).value.default) == (True, False)
    assert (marked.as_default(None).key.default, marked.as_default(None).value.default) == (False, False)


def test_reduced_groups_are_reported_by_their_configuration_key() -> None:
    spec = QuantizerSpec(name="x", key=replace(VALUE, group_size=64), value=replace(VALUE, group_size=64))
    marked = spec.as_default(spec)
    assert marked.fitted(80) == {"key.group_size": 16, "value.group_size": 16} and marked.fitted(128) == {}
    assert spec.fitted(80) == {}
    whole = replace(VALUE, group_size="head_dim", default=True)
    assert QuantizerSpec(name="x", key=replace(KEY, default=True), value=whole).fitted(80) == {}


def test_groups_must_divide_the_head() -> None:
    INT4.check()
    INT4.check(head_dim=96)
    with pytest.raises(
        ConfigError, match=r"quantizer\.value\.group_size=32: does not divide the model's head_dim 80"
    ) as raised:
        INT4.check(head_dim=80)
    assert "allowed: 8, 16, head_dim" in str(raised.value) and "quantizer.value.group_size=16" in str(raised.value)
    with pytest.raises(
        ConfigError, match=r"draft\.key\.group_size=32: .*head_dim 36\.\n  allowed: head_dim\n"
    ) as raised:
        replace(INT4, key=VALUE).check("draft", 36)
    assert "set draft.key.group_size=head_dim" in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        replace(INT4, value=replace(VALUE, group_size=96)).check(head_dim=512)
    assert list(raised.value.allowed) == ["8", "16", "32", "64", "128", "256", "head_dim"]
    INT4.as_default(INT4).check(head_dim=80)  # reduced to 16
    with pytest.raises(ConfigError, match=r"quantizer\.value\.bits=7"):
        replace(INT4, value=replace(VALUE, bits=7)).check()
    with pytest.raises(ConfigError, match=r"own\.key\.bits=7"):
        replace(INT4, key=replace(KEY, bits=7)).check("own")
