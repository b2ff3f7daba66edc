"""The settings of runs: which are shown, which differ, and how their columns hold them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.page import settings


def flat(**config: Any) -> dict[str, Any]:
    return settings.flat(SimpleNamespace(config=config))


def test_the_settings_that_matter_are_shown_by_dotted_key():
    assert flat(
        model={"name": "tiny", "path": "x", "dtype": "bfloat16", "max_length": 4096, "revision": None},
        method={"_target_": "a.B", "takes": ["int2"], "preset": "b", "residual": 32, "layers": {"0": "fp16"}},
        quantizer={"name": "int2", "key": {"bits": 2, "axis": "channel"}, "clip": 0.9},
        dataset={"name": "mini", "tasks": ["a", "b"], "sizes": {"a": 1}},
        decoding={"temperature": 0.0},
        runtime={"seed": 1, "results_dir": "results", "device": "cpu", "kernels": "auto"},
        logger={"name": "csv"},
    ) == {
        "model.dtype": "bfloat16",
        "model.max_length": 4096,
        "model.revision": None,
        "method.residual": 32,
        "method.layers": '{"0":"fp16"}',
        "quantizer.key.bits": 2,
        "quantizer.key.axis": "channel",
        "quantizer.clip": 0.9,
        "dataset.tasks": '["a","b"]',
        "dataset.sizes": '{"a":1}',
        "decoding.temperature": 0.0,
        "runtime.seed": 1,
        "runtime.kernels": "auto",
    }


def test_a_rotation_is_shown_by_its_parts_in_whichever_group():
    shown = flat(model="damaged", method={"rotation": {"kind": "hadamard", "seed": 3}, "alpha": 0.5})
    assert shown == {"method.rotation.kind": "hadamard", "method.rotation.seed": 3, "method.alpha": 0.5}


def test_keys_of_a_choice_differ_only_among_the_runs_that_made_it():
    chosen = [{"method": "kivi", "quantizer": "int2", "dataset": "mini"}] * 2
    chosen.append({"method": "atom", "quantizer": "int2", "dataset": "mini"})
    values = [
        {"method.sinks": 0, "runtime.seed": 0, "quantizer.clip": 1.0, "model.dtype": "float32"},
        {"method.sinks": 0, "runtime.seed": 0, "quantizer.clip": 1.0, "model.dtype": "float32"},
        {"method.sinks": 4, "runtime.seed": 1, "quantizer.clip": 0.9, "model.dtype": "float32"},
    ]
    assert settings.varying(values, chosen) == ["quantizer.clip", "runtime.seed"]


def test_the_keys_of_most_runs_come_first_then_by_name_and_at_most_40():
    chosen = [{"method": "m", "quantizer": "q", "dataset": "d"}] * 3
    values: list[dict[str, Any]] = [{"method.b": n, "method.a": n, "method.c": n} for n in range(2)]
    values.append({"method.c": 0})
    assert settings.varying(values, chosen) == ["method.c", "method.a", "method.b"]
    many = [{f"method.k{i:02}": n for i in range(41)} for n in range(2)]
    assert settings.varying(many, chosen[:2]) == [f"method.k{i:02}" for i in range(40)]


def test_a_column_holds_each_value_once_and_the_place_of_each_run():
    """True and 1 are different values; a run without the key has place -1, one with null has a value."""
    runs = [{"a": 1}, {"a": True}, {}, {"a": None}, {"a": 1, "b": 2}]
    assert settings.setting_columns(runs, ["a", "b"]) == [
        {"key": "a", "values": [1, True, None], "of": [0, 1, -1, 2, 0]},
        {"key": "b", "values": [2], "of": [-1, -1, -1, -1, 0]},
    ]
    assert [type(value) for value in settings.setting_columns(runs, ["a"])[0]["values"]] == [int, bool, type(None)]


def named(changes: list[dict[str, Any]], models: str = "tttttttt") -> list[str]:
    return settings.names(
        [
            SimpleNamespace(
                metrics={"label": "kivi int2", "config": {"model": model, "dataset": "mini"}}, changes=changed
            )
            for changed, model in zip(changes, models, strict=False)
        ]
    )


def test_a_name_shows_changes_as_they_are_typed():
    changes = [
        {"method.sinks": None, "method.rotation.seed": 1},
        {"method.sinks": True, "method.rotation.seed": 2},
        {"method.sinks": False},
        {"method.sinks": 4, "decoding.stop": "x", "runtime.seed": 7, "method.layers": "0-1"},
        {"runtime.batch_size": 2, "dataset.limit": 3},
    ]
    assert named(changes) == [
        "kivi int2 rotation.seed=1 sinks=null",
        "kivi int2 rotation.seed=2 sinks=true",
        "kivi int2 sinks=false",
        "kivi int2 stop=x sinks=4 seed=7",
        "kivi int2",
    ]


@pytest.mark.parametrize("models", ["tu", "tt"])
def test_runs_of_different_models_need_no_settings_in_their_names(models):
    shown = named([{"method.sinks": 1}, {"method.sinks": 2}], models)
    assert shown == ["kivi int2" + (f" sinks={n}" if models == "tt" else "") for n in (1, 2)]


def test_a_setting_that_all_runs_share_is_not_in_their_names_and_a_name_has_at_most_200_characters():
    assert named([{"method.a": 1, "method.b": 1}, {"method.a": 1}]) == ["kivi int2 b=1", "kivi int2"]
    for length, shown in ((85, 200), (86, 199)):  # the longer one is cut in its middle
        long, _ = named([{"method.a": "x" * 100, "method.b": "y" * length}, {}])
        assert len(long) == shown and (" ... " in long) == (shown < 200)
