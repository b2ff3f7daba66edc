"""The grammar of settings: what is read, what is refused, and that both ways to a method agree."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.config.setting import parse_list, parse_setting, split_outside_brackets, typed_value, written
from kvbench.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("fp16", ["method=fp16"]),
        ("kivi:int4_g128", ["method=kivi", "quantizer=int4_g128"]),
        ("kivi:int4_g128:residual=64", ["method=kivi", "quantizer=int4_g128", "method.residual=64"]),
        ("cocktail:encoder=bm25", ["method=cocktail", "method.encoder=bm25"]),
        (
            "kivi:int2:residual=64,quantizer.key.group_size=64,sinks=2",
            ["method=kivi", "quantizer=int2", "method.residual=64", "method.sinks=2", "quantizer.key.group_size=64"],
        ),
        ("cocktail:split=10/30/60:encoder=bm25", ["method=cocktail", "method.split=[10,30,60]", "method.encoder=bm25"]),
        (
            "kivi:int4:layers=[0-1:fp16,2-29:int4]",
            ["method=kivi", "quantizer=int4", "method.layers=[0-1:fp16,2-29:int4]"],
        ),
        ("m:a='x:y,z':b=true:c=1e-3:d=null", ["method=m", "method.a='x:y,z'", "method.b=true", "method.c=0.001",
                                              "method.d=null"]),
    ],
)  # fmt: skip
def test_a_setting_is_its_overrides(text, overrides):
    assert parse_setting(text).overrides() == overrides
    assert str(parse_setting(text)) == text


def test_values_of_layers_stay_whole():
    assert parse_setting("kivi:int4:layers=[0-1:fp16,2-29:int4]").fields == {"layers": ["0-1:fp16", "2-29:int4"]}


@pytest.mark.parametrize(
    "text",
    ["64", "-1.5", "1e-05", "true", "null", "int4", "/data/@x/%b", "[10,30,60]", "[0-1:fp16,2-29:int4]", "'64'", "a b",
     "{encoder:bm25,n:[1,2]}", "10/30/", "'10/20'", "[]", "{}"],
)  # fmt: skip
def test_values_mean_to_hydra_what_they_mean_here(text):
    value = typed_value(text)
    parsed = OverridesParser.create().parse_override(f"key={written(value)}").value()
    read = parsed.text if hasattr(parsed, "text") else parsed
    assert read == value and type(read) is type(value)
    assert typed_value(written(value)) == value


def test_lists_of_settings():
    texts = ["fp16", "kivi:int2:residual=64,sinks=2", "cocktail:split=[10,30,60]:encoder=bm25"]
    assert [setting.text for setting in parse_list(",".join(texts))] == texts
    with pytest.raises(ConfigError, match="lists kivi:int4 twice"):
        parse_list("kivi:int4,fp16,kivi:int4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with the name of a method"),
        ("residual=64", "setting=kivi:residual=64"),
        ("64", "begins with a value"),
        ("kivi::residual=64", "a part without a key"),
        ("kivi:=64", "a part without a key"),
        ("kivi:int2:64", "a value without a key: 64"),
        ("kivi:int2:int4", "two quantizers, int2 and int4"),
        ("kivi:residual=64:residual=32", "sets residual twice"),
        ("cocktail:split=[10,30", "leaves a bracket or quote open"),
        ("cocktail:split=10]", "closes a bracket that was not opened"),
        ("quantspec:draft_options={encoder}", "a mapping with an entry"),
    ],
)
def test_malformed_settings_are_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_setting(text)
    assert message in str(caught.value)


def test_brackets_and_quotes_hold_marks():
    assert split_outside_brackets("a=[1:2]:b", ":") == ["a=[1:2]", "b"]
    assert split_outside_brackets("a='x,y',{c:[1,2]}", ",") == ["a='x,y'", "{c:[1,2]}"]


def test_methods_as_they_are_typed():
    assert parse_setting("fp16").load().quantizer is None
    kivi = parse_setting("kivi:int4_g128").load()
    formats = kivi.quantizer
    assert (formats.key.group_size, formats.value.group_size, formats.key.bits) == (128, "head_dim", 4)
    kivi = parse_setting("kivi:int2:residual=64,quantizer.key.group_size=64,sinks=2").load()
    assert (kivi.residual, kivi.sinks, kivi.quantizer.key.group_size) == (64, 2, 64)
    assert parse_setting("kivi:quantizer.key.bits=4").load().quantizer.key.bits == 4
    assert parse_setting("logquant:int2_g128:window=64,reserved=192").load().W == 64
    for text in ("cocktail:split=[10,30,60],encoder=bm25", "cocktail:split=10/30/60:encoder=bm25"):
        assert parse_setting(text).load().split == (10, 30, 60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kivy", "did you mean 'kivi'"),
        ("kivi:int7", "no such quantizer"),
        ("kivi:int2:residual=33", "multiple of the key group"),
        ("kivi:int2:residuel=64", "did you mean 'residual'"),
        ("kivi:int2:quantizer.key.groups=64", "quantizer.key.group_size"),
        ("cocktail:int4", "does not accept this quantizer"),
    ],
)
def test_wrong_names_and_values_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_setting(text).load()
