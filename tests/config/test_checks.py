"""Rules of single groups and between groups, and what is looked at on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.config import prerequisites
from kvbench.config.prerequisites import check_here, check_launcher, check_path, check_weights
from kvbench.config.run_config import DecodingConfig, RuntimeConfig, checked_config
from kvbench.errors import ConfigError
from kvbench.parallel import launch
from kvbench.util.requirements import Package
from tests.run_support import ToyTask, config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"temperature": 0.01, "top_p": 0.5}, ""),
        ({"temperature": 0.009}, "decoding.temperature=0.009: is so low that only the likeliest token"),
        ({"top_p": 0.5}, "decoding.top_p=0.5: has no effect because decoding is greedy"),
        ({"top_p": 1.0}, ""),
        ({"stop": ("a", "")}, "contains an empty string"),
        ({"stop": ("a",)}, ""),
    ],
)
def test_decoding_that_has_no_effect_is_refused(changes: dict[str, Any], said: str) -> None:
    refused(DecodingConfig(**changes).check, said)


def refused(call: Any, said: str) -> None:
    """Call a function, and check that it raises a ConfigError with this text; none if the text is empty."""
    if not said:
        call()
        return
    with pytest.raises(ConfigError) as error:
        call()
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "started", "said"),
    [
        ({"device": "cuda:12"}, 0, ""),
        ({"device": "mps"}, 0, ""),
        ({"device": "cuda:a"}, 0, "runtime.device=cuda:a: is not a known device"),
        ({"device_map": "auto", "device": "cuda"}, 0, ""),
        ({"device_map": "auto", "device": "cuda:0"}, 0, "but runtime.device=cuda:0 names one device"),
        ({"device_map": "auto", "device": "cpu"}, 0, "names one device"),
        ({}, 1, ""),
        ({}, 2, "torchrun started 2 processes, but without tensor parallelism"),
        ({"tensor_parallel": "auto"}, 2, ""),
        ({"tensor_parallel": "auto"}, 1, ""),
        ({"tensor_parallel": "auto"}, 0, "needs several processes, which torchrun starts"),
        ({"tensor_parallel": "auto", "device_map": "auto"}, 2, "whereas runtime.device_map places whole layers"),
        ({"tensor_parallel": "auto", "device": "cpu"}, 2, ""),
        ({"tensor_parallel": "auto", "device": "cuda:1"}, 2, "but runtime.device=cuda:1 names a single device"),
        ({"tensor_parallel": "auto", "device": "mps"}, 2, "names a single device"),
    ],
)
def test_devices_that_contradict_each_other_are_refused(monkeypatch, tmp_path, changes, started, said) -> None:
    monkeypatch.setattr(launch, "launched", lambda: started > 0)
    monkeypatch.setattr(launch, "size", lambda: max(started, 1))
    refused(RuntimeConfig(results_dir=str(tmp_path), **changes).check, said)


def test_defaults_of_a_run() -> None:
    runtime = RuntimeConfig()
    assert (runtime.device, runtime.batch_size, runtime.seed, runtime.results_dir) == ("auto", 1, 0, "results/runs")
    assert (runtime.prefill_chunk, runtime.mlp_chunk, runtime.prefill_rows) == (None, "auto", "auto")
    assert (runtime.kernels, runtime.graphs, runtime.compile) == ("auto", "auto", False)
    assert (runtime.memory_limit_gb, runtime.device_map, runtime.tensor_parallel) == (None, None, None)
    assert (runtime.retry, runtime.rerun, runtime.mix_code) == (None, False, False)
    decoding = DecodingConfig()
    assert (decoding.max_new_tokens, decoding.temperature, decoding.top_p, decoding.stop) == (None, 0.0, 1.0, ())


@pytest.mark.parametrize(
    ("decoding", "dataset", "said"),
    [
        ({"max_new_tokens": 511}, None, ""),
        ({"max_new_tokens": 512}, None, "decoding.max_new_tokens=512: leaves no room for a prompt"),
        ({}, 511, ""),
        ({}, 512, "dataset.max_new_tokens=512: leaves no room for a prompt, because model.max_length=512"),
        ({"max_new_tokens": 8}, 512, ""),
        ({}, "fill", ""),
    ],
)
def test_an_answer_leaves_room_for_a_prompt(tmp_path, monkeypatch, decoding, dataset, said) -> None:
    monkeypatch.setattr(ToyTask, "max_new_tokens", dataset, raising=False)
    refused(lambda: checked_config(config(tmp_path, decoding=decoding)), said)


@pytest.mark.parametrize(
    ("weights", "drafts", "said"),
    [
        ("random_int4", "same", ""),
        ("random", "int4_all", ""),
        ("random_int4", "int4_all", ""),  # the head is left to round
        ("random_int4", "int4", "method.draft_weights=int4: asks for additional weights in 4 bits"),
        ("random_int4_all", "int4_all", "method.draft_weights=int4_all: asks for additional weights in 4 bits"),
    ],
)
def test_weights_in_4_bits_are_not_rounded_again_for_drafts(tmp_path, weights, drafts, said) -> None:
    method = {"_target_": "kvbench.methods.quantspec.QuantSpec", "takes": ["hierarchical"], "draft_weights": drafts}
    form = {"bits": 8, "kind": "hierarchical"}
    key, value = {**form, "group_size": 128, "axis": "channel"}, {**form, "group_size": "head_dim", "axis": "token"}
    quantizer = {"name": "hierarchical", "key": key, "value": value}
    settings = config(tmp_path, model={"weights": weights}, quantizer=quantizer)
    refused(lambda: checked_config({**settings, "method": method}), said)


def test_weights_in_4_bits_are_not_split(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "launched", lambda: True)
    monkeypatch.setattr(launch, "size", lambda: 2)
    settings = config(tmp_path, runtime={"tensor_parallel": "auto", "device": "auto"})
    checked_config(settings)
    settings["model"]["weights"] = "random_int4"
    refused(
        lambda: checked_config(settings),
        "runtime.tensor_parallel=auto: cannot split 4-bit weights over processes (model toy",
    )


def test_groups_must_be_there_and_no_others(tmp_path) -> None:
    settings = config(tmp_path)
    refused(lambda: checked_config({**settings, "methods": {}}), "methods=null: no such group")
    refused(lambda: checked_config({**settings, "model": None}), "model: must be a group of keys")
    refused(lambda: checked_config({**settings, "model": "tiny"}), "choose one with model=NAME")
    refused(
        lambda: checked_config({key: part for key, part in settings.items() if key != "logger"}),
        "logger: must be a group",
    )


def test_what_does_not_fit_the_task_is_refused_by_it(tmp_path, monkeypatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ToyTask, "fits", lambda self, checked: seen.append(checked))
    checked = checked_config(config(tmp_path))
    assert seen == [checked] and checked.dataset["limit"] == 4 and checked.task.limit == 4
    assert (checked.runtime.device, checked.logger.name, checked.model.name) == ("cpu", "none", "toy")


def test_a_methods_own_check_that_raises_is_named_with_its_line(tmp_path, monkeypatch) -> None:
    from kvbench.methods.kivi import Kivi

    def broken(self: Any, **_: Any) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr(Kivi, "check", broken)
    with pytest.raises(ZeroDivisionError):
        checked_config(config(tmp_path))

    class Mine(Kivi):
        """KIVI of a user."""

    Mine.__module__ = "mine_kivi"
    monkeypatch.setitem(sys.modules, "mine_kivi", SimpleNamespace(Mine=Mine))  # type: ignore[arg-type]
    settings = config(tmp_path, method={"_target_": "mine_kivi.Mine"})
    refused(
        lambda: checked_config(settings),
        "method._target_=mine_kivi.Mine: its check() raised ZeroDivisionError: by hand (",
    )


def test_a_method_is_prepared_for_the_model_once_it_is_checked(tmp_path, monkeypatch) -> None:
    from kvbench.methods.kivi import Kivi

    calls: list[Any] = []
    monkeypatch.setattr(Kivi, "check", lambda self, **named: calls.append(named))
    monkeypatch.setattr(Kivi, "check_reach", lambda self, most: calls.append(most))
    monkeypatch.setattr(Kivi, "prepare", lambda self, model: calls.append(model.name))
    checked_config(config(tmp_path))
    assert calls == [{"head_dim": 32, "max_length": 512}, 512, "toy"]


def test_a_data_sets_path_must_be_a_file_or_a_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    for path in (None, 3, str(tmp_path), str(tmp_path / "file"), "~/file"):
        check_path(path)
    refused(lambda: check_path(" "), "dataset.path='': must name a file or folder")
    refused(lambda: check_path(str(tmp_path / "absent")), "does not exist; expected a file, a .zip archive")
    refused(lambda: check_path("/dev/null"), "is a device or a pipe")


def test_weights_of_a_folder_must_be_in_it(tmp_path) -> None:
    def checked(**model: Any) -> Any:
        parts = {"folder": lambda: tmp_path, "random": False, "path": "the path"} | model
        return SimpleNamespace(model=SimpleNamespace(**parts))

    refused(lambda: check_weights(checked()), "model.path=the path: has a config.json but no weights")
    check_weights(checked(random=True))
    check_weights(checked(folder=lambda: None))
    for name in ("a.safetensors", "pytorch_model-1.bin"):
        (tmp_path / name).touch()
        check_weights(checked())
        (tmp_path / name).unlink()


@pytest.fixture
def machine(monkeypatch) -> Any:
    """A machine with a GPU or without; the packages that are asked for."""
    state = SimpleNamespace(gpu=False, asked=[])
    monkeypatch.setattr(prerequisites, "has_gpu", lambda: state.gpu)
    monkeypatch.setattr(prerequisites, "check_packages", lambda packages: state.asked.extend(packages))
    return state


@pytest.mark.parametrize(
    ("runtime", "gpu", "said"),
    [
        ({"device": "cuda"}, False, "runtime.device=cuda: no GPU is visible"),
        ({"device": "cuda"}, True, ""),
        ({"device": "mps"}, True, "exists only on Apple machines"),
        ({"device": "auto"}, False, ""),
        ({"device": "auto", "device_map": "auto"}, False, "runtime.device_map=auto: spreads a model over GPUs"),
        ({"device": "auto", "device_map": "auto"}, True, ""),
        ({"device": "auto", "kernels": "triton"}, False, "runtime.kernels=triton: needs a GPU"),
        ({"device": "cpu", "kernels": "cuda"}, True, "runtime.kernels=cuda: needs a GPU"),
        ({"device": "auto", "kernels": "cuda"}, True, ""),
        ({"device": "cpu", "kernels": "reference"}, False, ""),
    ],
)
def test_the_machine_has_the_device(machine, monkeypatch, tmp_path, runtime, gpu, said) -> None:
    monkeypatch.setattr(prerequisites.sys, "platform", "linux")
    checked = checked_config(config(tmp_path, runtime=runtime))
    machine.gpu = gpu
    refused(lambda: check_here(checked), said)
    check_here(checked, "submitit")


def test_packages_of_every_part_are_asked_for(machine, tmp_path, monkeypatch) -> None:
    machine.gpu = True
    checked = checked_config(config(tmp_path, runtime={"device": "auto", "device_map": "auto", "kernels": "cuda"}))
    packages = {name: Package(name, name, name, name) for name in ("model", "method", "logger", "task")}
    part = {name: SimpleNamespace(packages=lambda own=own: (own,)) for name, own in packages.items()}
    model = SimpleNamespace(packages=part["model"].packages, random=False, folder=lambda: None)
    task = SimpleNamespace(packages=part["task"].packages)
    checked = replace(checked, model=model, method=part["method"], logger=part["logger"], task=task)  # type: ignore[arg-type]
    check_here(checked)
    assert [package.module for package in machine.asked] == [
        "model",
        "method",
        "logger",
        "task",
        "accelerate",
        "cuda.bindings",
    ]
    machine.asked.clear()
    runtime = replace(checked.runtime, device_map=None, kernels="triton")
    check_here(replace(checked, runtime=runtime))
    assert [package.module for package in machine.asked][4:] == ["triton"]
    machine.asked.clear()
    check_here(replace(checked, runtime=runtime), "submitit")
    assert len(machine.asked) == 4


@pytest.mark.parametrize(
    ("name", "module", "hint"),
    [
        (
            "joblib",
            "hydra_plugins.hydra_joblib_launcher",
            "run pip install hydra-joblib-launcher, or set launcher=local",
        ),
        (
            "submitit",
            "hydra_plugins.hydra_submitit_launcher",
            "run pip install 'kvbench[launch]', or set launcher=local",
        ),
    ],
)
def test_launchers_are_packages_of_sweeps(machine, name, module, hint) -> None:
    check_launcher(name, multirun=True)
    assert machine.asked == [Package(module, "launcher", name, hint)]
    refused(lambda: check_launcher(name, multirun=False), f"launcher={name}: launches the jobs of a sweep")
    machine.asked.clear()
    check_launcher("local", multirun=False)
    assert machine.asked == []


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({}, "method.forced_acceptance=0.9: makes the text meaningless, so that nothing can be scored on"),
        ({"_target_": "kvbench.tasks.efficiency.Efficiency", "name": "efficiency"}, ""),
    ],
)
def test_a_forced_acceptance_is_for_times_only(tmp_path: Any, dataset: dict[str, Any], said: str) -> None:
    target, takes = "kvbench.methods.quantspec.QuantSpec", ["hierarchical"]
    quantspec = {"_target_": target, "takes": takes, "forced_acceptance": 0.9, "gamma": "auto"}
    form = {"bits": 8, "kind": "hierarchical"}
    key, value = {**form, "group_size": 128, "axis": "channel"}, {**form, "group_size": "head_dim", "axis": "token"}
    settings = config(tmp_path)
    settings |= {"method": quantspec, "quantizer": {"name": "hierarchical", "key": key, "value": value}}
    settings["dataset"] = dataset or settings["dataset"]
    refused(lambda: checked_config(settings), said)
