"""The two forms of a configuration: what identifies a run, and what is recorded of it."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.config.run_config import RunConfig, checked_config
from kvbench.methods import load_method
from kvbench.methods.kivi import Kivi
from kvbench.quantizers.spec import QuantizerSpec
from kvbench.results.environment import cpu_name
from kvbench.results.identity import run_id
from kvbench.runner import resolve
from tests.run_support import ToyTask, config


def test_the_identity_has_the_task_and_its_version_and_no_machine(tmp_path) -> None:
    settings = config(tmp_path)
    task = ToyTask(version=3)
    computed = resolve.material(dataclasses.replace(checked_config(settings), task=task))
    assert computed["setting"]["data"] == {"identity": task.identity(), "version": 3}
    assert computed["setting"]["seed"] == 0 and computed["setting"]["decoding"]["top_p"] == 1.0
    assert computed["method"]["method"]["residual"] == 32


def test_a_data_set_that_depends_on_the_machine_names_it_in_the_identity(tmp_path, monkeypatch) -> None:
    settings = config(tmp_path)
    asked: list[Any] = []

    def machine_identity(self, runtime, device):
        asked.append(runtime)
        return {"device": device()}

    monkeypatch.setattr(ToyTask, "machine_identity", machine_identity)
    checked = checked_config(settings)
    assert resolve.material(dataclasses.replace(checked, task=ToyTask()))["setting"]["data"]["setting"] == {
        "device": cpu_name()
    }
    assert asked == [checked.runtime]


def test_the_content_of_the_weights_identifies_a_run(tmp_path) -> None:
    """Files of a local folder count, not its path."""
    ids = []
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        checked = checked_config(config(tmp_path))
        model = dataclasses.replace(checked.model, weights="pretrained", path=str(folder))
        ids.append(run_id(resolve.material(dataclasses.replace(checked, model=model, task=ToyTask()))))
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("devices", "name"),
    [(["cpu"], cpu_name()), (["cuda:0"], "A GPU"), (["cuda:0", "cuda:1", "cuda:2"], "3 x A GPU (device_map)")],
)
def test_the_name_of_a_machine_is_of_its_devices(monkeypatch, devices, name) -> None:
    monkeypatch.setattr("kvbench.models.devices.homes", lambda runtime: [torch.device(one) for one in devices])
    monkeypatch.setattr(
        "kvbench.profiling.device.device_name", lambda device: "A GPU" if device.type == "cuda" else None
    )
    assert resolve.machine_name(SimpleNamespace(runtime=None)) == name  # type: ignore[arg-type]


def test_settings_that_fit_are_recorded_as_they_are(tmp_path, capsys) -> None:
    settings = config(tmp_path)
    before = copy.deepcopy(settings)
    assert resolve.fitted(checked_config(settings)).plain == before
    assert capsys.readouterr().err == ""


def fitted(tmp_path, sizes: dict[str, int], head_dim: int | None = 80, method: str = "kivi") -> dict[str, Any]:
    settings = config(tmp_path, method)
    asked: list[int] = []

    def fit(head: int) -> dict[str, int]:
        asked.append(head)
        return sizes

    method: Any = SimpleNamespace(fitted=fit)
    model: Any = SimpleNamespace(head_dim=lambda: head_dim)
    before = copy.deepcopy(settings)
    recorded = resolve.fitted(RunConfig(model, method, {}, plain=settings)).plain
    assert settings == before, "the composed configuration stays as it is"
    assert asked == ([head_dim] if head_dim else [])
    return dict(recorded)


def test_group_sizes_that_are_really_used_are_recorded_named_and_said(tmp_path, capsys) -> None:
    recorded = fitted(tmp_path, {"quantizer.value.group_size": 16})
    assert recorded["quantizer"]["value"] == {"bits": 2, "group_size": 16, "axis": "token"}
    assert recorded["quantizer"]["key"]["group_size"] == 32
    printed = capsys.readouterr().err
    assert "value.group_size=16" in recorded["quantizer"]["name"] and recorded["quantizer"]["name"] in printed
    assert "head size of 80 channels; using quantizer.value.group_size=16" in printed


def test_a_methods_own_formats_get_a_name(tmp_path, capsys) -> None:
    recorded = fitted(tmp_path, {"method.value_group_size": 16, "method.group_size": 8}, method="fp16")
    assert recorded["method"]["value_group_size"] == 16 and recorded["method"]["group_size"] == 8
    assert recorded["quantizer"] == {"name": "value_group_size=16,group_size=8"}
    assert "using method.value_group_size=16, method.group_size=8" in capsys.readouterr().err


def test_group_sizes_of_single_layers_are_said_and_the_map_stays_as_typed(tmp_path, capsys) -> None:
    sizes = load_method("kivi", quantizer="int4", layers="0:int8,1:fp16").fitted(80)
    assert sizes == {"quantizer.value.group_size": 16, "method.layers.int8.value.group_size": 16}
    del sizes["quantizer.value.group_size"]
    assert fitted(tmp_path, sizes) == config(tmp_path, "kivi")
    assert "using method.layers.int8.value.group_size=16" in capsys.readouterr().err


def test_nothing_is_fitted_to_heads_of_unknown_size(tmp_path, capsys) -> None:
    assert fitted(tmp_path, {"quantizer.value.group_size": 16}, None) == config(tmp_path)
    assert capsys.readouterr().err == ""


def test_versions_above_one_are_part_of_the_identity(tmp_path, monkeypatch) -> None:
    settings = config(tmp_path)
    plain = resolve.settled(checked_config(settings))
    assert "version" not in plain["method"] and "version" not in plain["quantizer"]
    monkeypatch.setattr(Kivi, "version", 2)
    monkeypatch.setattr(QuantizerSpec, "version", 3)
    later = resolve.settled(checked_config(settings))
    assert later["method"]["version"] == 2 and later["quantizer"]["version"] == 3
    full = config(tmp_path, "fp16")
    assert "version" not in resolve.settled(checked_config(full))["quantizer"], "it uses no quantizer"
    assert "version" not in settings["quantizer"]


def test_what_a_method_puts_in_place_of_a_hyper_parameter_identifies_it(tmp_path, monkeypatch) -> None:
    settings = config(tmp_path)
    monkeypatch.setattr(Kivi, "identity", lambda self: {"residual": "a hash", "further": 1})
    method = resolve.settled(checked_config(settings))["method"]
    assert (method["residual"], method["further"], method["sinks"]) == ("a hash", 1, 0)


def test_every_default_is_filled_in(tmp_path) -> None:
    settings = config(tmp_path)
    settled = resolve.settled(checked_config(settings))
    assert settled["model"]["chat"] == "none" and settled["model"]["architecture"]["rms_norm_eps"] == 1e-5
    assert settled["runtime"]["batch_size"] == 1 and settled["decoding"]["max_new_tokens"] is None
    assert settled["dataset"] == settings["dataset"] and settled["logger"] == settings["logger"]
