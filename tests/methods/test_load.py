"""Methods by name, by file, by entry point and by class; quantizers that are theirs; what is refused."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvbench.errors import ConfigError
from kvbench.methods import Method, load_method, method_from_config
from kvbench.methods.fp16 import FP16
from kvbench.methods.kivi import Kivi
from kvbench.methods.load import ENTRY_POINTS, true_name
from kvbench.util.confdir import group_options

KIVI = "kvbench.methods.kivi.Kivi"
FORMATS = {
    "key": {"bits": 4, "group_size": 32, "axis": "channel"},
    "value": {"bits": 4, "group_size": 32, "axis": "token"},
}


@dataclass(kw_only=True)
class Mine(Method):
    """A method from outside, with a hyper-parameter and no YAML."""

    shots: int = 3


@pytest.mark.parametrize(
    ("name", "quantizer"),
    [("fp16", None), ("kivi", "int2"), ("atom", "int4_token"), ("logquant", "int2_g64"), ("quantspec", "hierarchical")],
)
def test_a_method_comes_with_the_quantizer_of_its_yaml(name: str, quantizer: str | None) -> None:
    method = load_method(name)
    assert (method.quantizer and method.quantizer.name) == quantizer


def test_a_method_from_a_file_has_what_the_file_and_the_call_say(tmp_path: Path) -> None:
    for suffix in ("yaml", "yml"):
        path = tmp_path / f"mine.{suffix}"
        path.write_text(
            "defaults:\n  - other\n  - override /quantizer@_global_.quantizer: int4\n"
            f"_target_: {KIVI}\npreset: mine\ntakes: [int4, int8]\nresidual: 64\nsinks: 2\n"
        )
        method = load_method(str(path), sinks=5)
        assert type(method) is Kivi and (method.residual, method.sinks, method.takes) == (64, 5, ("int4", "int8"))
        assert method.quantizer.name == "int4" and load_method(str(path), "int8").quantizer.name == "int8"
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"method\._target_"):
        load_method(str(tmp_path / "empty.yaml"))
    with pytest.raises(ConfigError, match=r"no such method"):
        load_method(str(tmp_path / "none.yaml"))


def test_a_method_from_a_dict_leaves_the_dict_as_it_is() -> None:
    given = {"_target_": KIVI, "takes": ["int4"], "residual": 64, "defaults": []}
    before = dict(given)
    method = load_method(given, {"name": "int4", **FORMATS}, sinks=1)
    assert (method.residual, method.sinks, method.quantizer.name) == (64, 1, "int4") and given == before
    with pytest.raises(ConfigError, match="kivi does not accept this quantizer"):
        load_method(given, "int8")
    with pytest.raises(ConfigError, match="packs keys and values"):  # without a default there is none
        load_method({**given, "takes": ["none", "int4"]})


def test_an_installed_package_offers_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def entry_points(**which: str) -> Any:
        asked.append(which)
        return [SimpleNamespace(load=lambda: FP16)] if which["name"] == "theirs" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert type(load_method("theirs")) is FP16 and asked == [{"group": ENTRY_POINTS, "name": "theirs"}]
    asked.clear()
    load_method("kivi")
    assert asked == []  # a YAML of kvbench goes first
    with pytest.raises(ConfigError, match="no such quantizer"):
        load_method("kivi", "theirs")
    assert asked == []  # packages offer no quantizers
    with pytest.raises(ConfigError, match=r"method=kivvi: no such method(?s:.*)turboquant.*\n.*did you mean 'kivi'"):
        load_method("kivvi")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "_target_"),
        ("kvbench.methods.base.Method", "is not a subclass of kvbench.methods.base.Method"),
        ("kvbench.methods.refusals.Reach", "is not a subclass of kvbench.methods.base.Method"),
        ("kvbench.methods.nothing.Kivi", "method._target_=kvbench.methods.nothing.Kivi"),
    ],
)
def test_a_class_that_is_no_method_is_refused(target: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method_from_config({"_target_": target}, {"name": "none"})


def test_a_composed_configuration_is_built_without_its_bookkeeping() -> None:
    group = {"_target_": KIVI, "preset": "kivi", "quantizer": "int4", "residual": 32}
    method = method_from_config(group, {"name": "int4", **FORMATS})
    assert type(method) is Kivi and method.residual == 32 and method.quantizer.name == "int4"
    assert method_from_config(group, {"name": "none"}).quantizer is None
    with pytest.raises(ConfigError, match=r"method\.residul"):
        method_from_config({"_target_": KIVI, "residul": 1}, {"name": "none"})
    with pytest.raises(
        ConfigError, match=r"quantizer\.name=int2: does not match the formats: keys of 4 bits per channel"
    ):
        method_from_config(group, {"name": "int2", **FORMATS})


def test_a_quantizers_name_is_its_preset_and_what_differs() -> None:
    assert true_name({"name": "int4", **FORMATS}) == "int4"
    changed = {**FORMATS, "key": {**FORMATS["key"], "group_size": 64}}
    assert true_name({"name": "int4", **changed}) == "int4+key.group_size=64"
    assert true_name({"name": "int4+key.group_size=128", **FORMATS}) == "int4"
    assert true_name({"name": "mine", **FORMATS}) == "mine"


def test_groups_of_a_preset_are_fitted_and_typed_ones_are_not() -> None:
    preset, typed = load_method("kivi", "int4"), load_method("kivi", FORMATS)
    assert preset.fitted(80) == {"quantizer.value.group_size": 16} and preset.fitted(64) == {}
    assert typed.quantizer.name == "int2+key.bits=4,value.bits=4"  # the method's own preset, and what is different
    assert typed.fitted(80) == {} and load_method("fp16").fitted(80) == {}
    with pytest.raises(ConfigError, match="does not divide the model's head_dim 80"):
        typed.check(80)
    preset.check(80)


def test_hyper_parameters_are_plain_and_without_the_quantizer() -> None:
    made = Mine(takes=("none",), shots=5)
    assert made.hyperparameters() == {"takes": ("none",), "shots": 5}
    assert load_method("kvquant").hyperparameters().keys() >= {"bits", "outliers", "calibration"}
    assert "calibration_file" not in load_method("kvquant").hyperparameters()


@pytest.mark.parametrize("name", group_options("method"))
def test_a_class_has_the_defaults_that_its_yaml_shows(name: str) -> None:
    """From Python as from the command line; the YAML has the paper's value beside its table or section."""
    shown = yaml.safe_load(group_options("method")[name].read_text(encoding="utf-8"))
    module, _, cls = shown["_target_"].rpartition(".")
    fields = {each.name: each for each in dataclasses.fields(getattr(importlib.import_module(module), cls))}
    shown = {key: value for key, value in shown.items() if key in fields and key not in ("takes", "quantizer")}
    if name == "keep":
        assert shown.pop("sinks") == 4  # the base class of presses keeps none
    for key, value in shown.items():
        factory = fields[key].default_factory
        default = fields[key].default if factory is dataclasses.MISSING else factory()
        assert (dataclasses.asdict(default) if dataclasses.is_dataclass(default) else default) == value, key


@pytest.mark.parametrize(
    ("name", "field", "least", "most"),
    [
        ("kvquant", "bits", 2, 4),
        ("kvquant", "outliers", 0.0, 0.5),
        ("kvquant", "first_tokens", 0, None),
        ("quantspec", "gamma", 0, 64),
        ("quantspec", "sensitive_layers", 0, None),
        ("quantspec", "forced_acceptance", 0.0, 1.0),
    ],
)
def test_values_out_of_range_are_refused(name: str, field: str, least: float, most: float | None) -> None:
    step = 1 if isinstance(least, int) else 0.01
    for inside in (least, most if most is not None else least + 1):
        load_method(name, **{field: inside})
    for outside, said in ((least - step, "at least"), (None if most is None else most + step, "at most")):
        if outside is not None:
            with pytest.raises(ConfigError, match=rf"method\.{field}={outside}: must be {said}"):
                load_method(name, **{field: outside})
