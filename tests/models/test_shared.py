"""The model that successive runs of a process share: when it is the same object, and when it is loaded anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbench.config.run_config import RuntimeConfig
from kvbench.methods.load import load_method
from kvbench.models import int4, shared
from kvbench.models.load import LoadedModel, load_model
from kvbench.models.spec import ModelConfig
from kvbench.util.attachment import attachment
from kvbench.util.schema import build
from tests.run_support import ARCHITECTURE

MODEL = build(
    ModelConfig,
    {"name": "toy", "weights": "random", "dtype": "float32", "max_length": 512, "architecture": ARCHITECTURE},
    "model",
)
CPU = RuntimeConfig(device="cpu")


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_shelf", None)


@pytest.fixture
def loads() -> Any:
    """A function that loads, and the configurations that it was asked for."""

    def counted(model: Any, runtime: Any) -> LoadedModel:
        counted.calls.append((model, runtime))
        return load_model(model, runtime)

    counted.calls = []
    return counted


def test_runs_share_the_same_weights_object_until_another_model_is_needed(loads: Any) -> None:
    with shared.sharing():
        first = shared.take(MODEL, CPU, loads)
        shared.give_back(first)
        assert shared.take(MODEL, RuntimeConfig(device="cpu", batch_size=4), loads) is first
        shared.give_back(first)
        other = shared.take(replace(MODEL, max_length=256), CPU, loads)
        assert other is not first and other.model is not first.model
        shared.give_back(other)
        seeded = shared.take(replace(MODEL, max_length=256), RuntimeConfig(device="cpu", seed=1), loads)
        assert seeded is not other, "the seed decides random weights"
        shared.give_back(seeded)
    assert len(loads.calls) == 3
    with shared.sharing():  # it stays between the jobs of a sweep
        again = shared.take(replace(MODEL, max_length=256), RuntimeConfig(device="cpu", seed=1), loads)
        assert again is seeded
        shared.give_back(again)
    shared.free()
    with shared.sharing():
        assert shared.take(replace(MODEL, max_length=256), RuntimeConfig(device="cpu", seed=1), loads) is not seeded


def test_outside_of_a_sweep_and_under_a_limit_every_run_loads_its_own(loads: Any) -> None:
    assert shared.take(MODEL, CPU, loads) is not shared.take(MODEL, CPU, loads)
    limited = RuntimeConfig(device="cpu", memory_limit_gb=4.0)
    with shared.sharing():
        kept = shared.take(MODEL, CPU, loads)
        shared.give_back(kept)
        first = shared.take(MODEL, limited, loads)
        shared.give_back(first)
        assert shared.take(MODEL, limited, loads) is not first
        assert shared.take(MODEL, CPU, loads) is not kept, "it was freed before the limit was set"


def test_a_model_in_use_stays_and_another_one_is_not_shared(loads: Any) -> None:
    with shared.sharing():
        first = shared.take(MODEL, CPU, loads)
        assert shared.take(MODEL, CPU, loads) is first
        other = shared.take(replace(MODEL, max_length=256), CPU, loads)
        shared.give_back(other)  # not the shared one
        shared.give_back(first)
        shared.free()  # the second user still has it
        assert shared.take(MODEL, CPU, loads) is first


def weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.0)


def buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 1.0


def hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def module(model: Any) -> None:
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(64, 64, bias=False)


def forward(model: Any) -> None:
    model.model.norm.forward = model.model.norm.forward


def attribute(model: Any) -> None:
    attachment(model).rotary = "left behind"


def config(model: Any) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 1.0}


def attention(model: Any) -> None:
    load_method("fp16").new_cache(model)


def drafts(model: Any) -> None:
    int4.attach(model, "ffn")


@pytest.mark.parametrize("change", [weight, buffer, hook, module, forward, attribute, config, attention, drafts])
def test_a_model_that_a_run_has_changed_is_not_used_again(loads: Any, change: Any, capsys: Any) -> None:
    with shared.sharing():
        first = shared.take(MODEL, CPU, loads)
        change(first.model)
        shared.give_back(first)
        assert "model toy: a run has changed " in capsys.readouterr().err
        assert shared.take(MODEL, CPU, loads) is not first


@pytest.mark.parametrize("method", ["fp16", "kivi", "quantspec", "snapkv", "h2o", "atom", "logquant"])
def test_what_methods_attach_is_gone_when_they_are_detached(loads: Any, method: str, capsys: Any) -> None:
    with shared.sharing():
        first = shared.take(MODEL, CPU, loads)
        made = load_method(method, **({"draft_weights": "same"} if method == "quantspec" else {}))
        made.new_cache(first.model)
        made.detach(first.model)
        shared.give_back(first)
        assert capsys.readouterr().err == ""
        assert shared.take(MODEL, CPU, loads) is first


def test_a_model_loaded_for_compiled_steps_serves_others_too_and_not_the_other_way_round(loads: Any) -> None:
    compiled = replace(CPU, compile=True)
    with shared.sharing():
        plain = shared.take(MODEL, CPU, loads)
        shared.give_back(plain)
        joined = shared.take(MODEL, compiled, loads)
        assert joined is not plain and loads.calls[-1][1].compile
        shared.give_back(joined)
        for runtime in (CPU, compiled):
            assert shared.take(MODEL, runtime, loads) is joined
            shared.give_back(joined)
    assert len(loads.calls) == 2
