"""A model's layers over several devices. On a CPU two names of it stand for two devices; real ones are marked gpu."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvbench
from kvbench.cache import Prompts
from kvbench.decoding import generate
from kvbench.errors import ConfigError
from kvbench.models.load import hf_config, load_model
from kvbench.models.spec import ModelConfig
from kvbench.parallel.spread import Carrier, balanced, connect, moving, pretrained_spread, random_spread
from kvbench.util.attachment import placement
from kvbench.util.schema import build
from tests import run_support, zoo

#: two devices to every comparison of devices, one memory
TWO = [torch.device("cpu"), torch.device("cpu", 0)]


def outline(layers: int, **changes: Any) -> Any:
    config = deepcopy(zoo.model("llama").config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("layers", "devices"), [(32, 2), (5, 2), (7, 3), (3, 4)])
def test_every_device_has_as_many_layers_in_their_order(layers: int, devices: int) -> None:
    gpus = [torch.device("cuda", index) for index in range(devices)]
    where = balanced(outline(layers), gpus)
    at = [where[f"model.layers.{index}"].index for index in range(layers)]
    assert at == sorted(at)
    counts = [at.count(index) for index in range(devices)]
    assert max(counts) - min(counts) <= 1
    assert where["model.embed_tokens"] == where["model.rotary_emb"] == gpus[0]
    assert where["model.norm"] == where["lm_head"] == gpus[max(at)]


def test_a_head_that_shares_the_embeddings_weights_lies_with_it() -> None:
    where = balanced(outline(4, tie_word_embeddings=True), [torch.device("cuda", index) for index in range(2)])
    assert where["lm_head"] == where["model.embed_tokens"]
    assert where["model.norm"].index == 1


def test_random_weights_do_not_depend_on_the_number_of_devices() -> None:
    config = zoo.model("llama").config
    one, two = (random_spread(deepcopy(config), torch.float32, devices, 5) for devices in (TWO[:1], TWO))
    other = random_spread(deepcopy(config), torch.float32, TWO, 6)
    for name, parameter in one.state_dict().items():
        assert torch.equal(parameter, two.state_dict()[name]), name
    assert not any(tensor.is_meta for tensor in (*two.parameters(), *two.buffers()))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(two.model.rotary_emb.inv_freq, zoo.model("llama").model.rotary_emb.inv_freq)
    assert float(two.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", ["kivi", "kvquant", "h2o"])
def test_hooks_change_nothing_of_what_comes_out(name: str) -> None:
    whole, spread = zoo.model("llama"), zoo.fresh("llama")
    connect(spread, balanced(spread, TWO))
    assert placement(spread).devices == tuple(TWO)
    ids, mask = zoo.padded_batch([50, 30])
    options = {"calibration": zoo.calibrations("llama"), "outliers": 0.05} if name == "kvquant" else {}
    made = []
    for model in (whole, spread):
        method = kvbench.load_method(name, **options)
        cache = method.new_cache(model, Prompts.from_batch(ids, mask), max_length=66)
        made.append(generate(model, cache, ids, mask, max_new_tokens=16).tokens)
        method.detach(model)
    assert made[0] == made[1]


def test_what_all_layers_share_is_copied_once_a_pass() -> None:
    carrier, shared = Carrier(), torch.ones(3)
    hook = carrier.to(torch.device("meta"))
    (hidden,), first = hook(torch.nn.Identity(), (torch.ones(2),), {"mask": shared, "rope": (shared, shared), "n": 3})
    _, second = hook(torch.nn.Identity(), (), {"mask": shared})
    assert hidden.is_meta
    assert first["mask"] is second["mask"] is first["rope"][1]
    assert first["n"] == 3
    carrier.begin(torch.nn.Identity(), ())
    assert hook(torch.nn.Identity(), (), {"mask": shared})[1]["mask"] is not first["mask"]


def test_another_function_may_copy_and_gets_all_tensors_of_a_crossing_at_once() -> None:
    """Hidden states and what all layers share; a tensor that is passed twice is copied once."""
    meta, calls = torch.device("meta"), []

    def mover(tensors: Any, device: torch.device) -> list[torch.Tensor]:
        calls.append(([tuple(x.shape) for x in tensors], device))
        return [x.to(device) for x in tensors]

    carrier, shared = Carrier(), torch.ones(3)
    hook = carrier.to(meta)
    with moving(mover):
        inputs = {"rope": (shared, torch.ones(4)), "mask": shared}
        (hidden,), given = hook(torch.nn.Identity(), (torch.ones(2),), inputs)
        hook(torch.nn.Identity(), (hidden,), {"mask": shared})  # the next layer on the same device
        output = carrier.back(SimpleNamespace(logits=torch.ones(5)), meta)
        assert carrier.back(output, meta).logits.is_meta  # there already
    assert [(sorted(shapes), device) for shapes, device in calls] == [([(2,), (3,), (4,)], meta), ([(5,)], meta)]
    assert hidden.is_meta and given["rope"][0] is given["mask"] and given["rope"][1].shape == (4,)
    hook(torch.nn.Identity(), (torch.ones(2),), {})
    assert len(calls) == 2  # outside of the context torch copies


def test_copies_end_with_the_pass_and_logits_go_back() -> None:
    carrier, shared, meta = Carrier(), torch.ones(3), torch.device("meta")
    hook = carrier.to(meta)
    first = hook(torch.nn.Identity(), (), {"mask": shared})[1]["mask"]
    output = SimpleNamespace(logits=torch.ones(2))
    assert carrier.back(output, meta) is output and output.logits.is_meta
    assert hook(torch.nn.Identity(), (), {"mask": shared})[1]["mask"] is not first
    assert carrier.back(SimpleNamespace(logits=None), meta).logits is None


def test_random_weights_that_are_tied_are_one() -> None:
    config = deepcopy(zoo.model("llama").config)
    config.tie_word_embeddings, config.num_hidden_layers = True, 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model = random_spread(config, torch.float32, TWO, 5)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_checkpoint_keeps_no_hooks_of_its_loader(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="checkpoints are spread by accelerate: pip install 'kvbench[multigpu]'")
    whole = zoo.model("llama")
    whole.save_pretrained(tmp_path)
    model = pretrained_spread(str(tmp_path), TWO[:1], dtype=torch.float32, local_files_only=True)
    ids = torch.arange(40)[None]
    assert torch.equal(model(ids).logits, whole(ids).logits)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert set(model.hf_device_map) == set(balanced(whole, TWO))


def test_spreading_needs_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    model = build(ModelConfig, run_support.config("unused")["model"], "model")
    with pytest.raises(ConfigError, match="no GPU is visible on this machine"):
        load_model(model, SimpleNamespace(device="auto", device_map="auto", tensor_parallel=None, seed=0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp16", "kivi", "quantspec", "h2o", "kvquant", "streamingllm"])
def test_two_gpus_say_what_one_says(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and this machine has {torch.cuda.device_count()}")
    options = {"calibration": zoo.calibrations("llama"), "outliers": 0.05} if name == "kvquant" else {}
    options = {"budget": 64} if name == "streamingllm" else options
    gpus = [torch.device("cuda", index) for index in range(2)]
    made = []
    for devices in (gpus[:1], gpus):
        model = zoo.fresh("llama")
        where = balanced(model, devices)
        for part, device in where.items():
            model.get_submodule(part).to(device)
        connect(model, where)
        ids, mask = (x.to(gpus[0]) for x in zoo.padded_batch([300, 200]))
        method = kvbench.load_method(name, **options)
        cache = method.new_cache(model, Prompts.from_batch(ids, mask), max_length=364)
        made.append(generate(model, cache, ids, mask, max_new_tokens=64).tokens)
        assert [layer.device for layer in cache.layers] == [where[f"model.layers.{n}"] for n in range(2)]
    assert made[0] == made[1]


@pytest.mark.gpu
def test_a_checkpoint_is_loaded_onto_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and this machine has {torch.cuda.device_count()}")
    pytest.importorskip("accelerate")
    zoo.model("llama").save_pretrained(tmp_path)
    gpus = [torch.device("cuda", index) for index in range(2)]
    logits = []
    for devices in (gpus[:1], gpus):
        model = pretrained_spread(str(tmp_path), devices, dtype=torch.float32, local_files_only=True)
        assert {parameter.device for parameter in model.parameters()} == set(devices)
        logits.append(model(torch.arange(40, device=gpus[0])[None]).logits)
    assert torch.equal(*logits)


@pytest.mark.gpu
def test_random_weights_are_made_on_both_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and this machine has {torch.cuda.device_count()}")
    model = build(ModelConfig, run_support.config("unused")["model"], "model")
    loaded = load_model(model, SimpleNamespace(device="auto", device_map="auto", tensor_parallel=None, seed=0))
    assert {parameter.device.index for parameter in loaded.model.parameters()} >= {0, 1}
    assert loaded.layout == "device_map"
    config = hf_config(model)
    assert config.num_hidden_layers == 2
    logits = loaded.model(torch.arange(9, device=loaded.device)[None]).logits
    assert logits.device == loaded.device
    assert bool(logits.isfinite().all())
