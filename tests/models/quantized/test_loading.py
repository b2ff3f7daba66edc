"""Checkpoints with 4-bit weights, and weights rounded to 4 bits while they are loaded, through the user's own path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvbench.config.run_config import RuntimeConfig
from kvbench.errors import ConfigError, ModelError
from kvbench.linear.int4 import dequantized, unpacked
from kvbench.models import by_name, int4
from kvbench.models.load import LoadedModel, load_model
from kvbench.models.locate import Source
from kvbench.models.quantized.codes import round_weights
from kvbench.models.quantized.loading import round_model
from kvbench.models.quantized.plan import plan_of
from kvbench.models.spec import ModelConfig
from kvbench.parallel.spread import pretrained_spread
from kvbench.util.schema import build
from tests import zoo
from tests.models.quantized import packer

CPU = RuntimeConfig(device="cpu")


def config(name: Any, **changes: Any) -> ModelConfig:
    chosen = build(ModelConfig, by_name.group(str(name), changes), "model")
    chosen.check()
    return chosen


def loaded(name: Any, **changes: Any) -> LoadedModel:
    return load_model(config(name, **changes), CPU)


def matches(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Compare the dequantized weights of all 4-bit layers, bit for bit."""
    layers = int4.own_layers(model)
    assert layers.keys() == weights.keys()
    for name, layer in layers.items():
        assert torch.equal(dequantized(layer.int4, torch.float32), weights[name]), name


@pytest.mark.parametrize(
    ("kind", "family", "shards", "dtype", "group"),
    [
        ("awq", "qwen2", 1, torch.float16, 32),
        ("awq", "llama", 3, torch.bfloat16, 32),
        ("gptq", "qwen2", 2, torch.float16, 32),
        ("gptq_v2", "phi3", 1, torch.float16, 32),
        ("gptq", "llama", 1, torch.float16, 96),  # larger groups are the same as several of 32 channels
    ],
)
def test_dequantized_weights_are_those_of_the_checkpoint(tmp_path, kind, family, shards, dtype, group) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_key_value_heads": 2} if group == 96 else {}
    weights = packer.checkpoint(tmp_path / "m", kind, shards, dtype, family, group, **sizes)
    model = loaded(tmp_path / "m", dtype="float16")
    matches(model.model, weights)
    assert {layer.dtype for layer in int4.own_layers(model.model).values()} == {dtype}  # of the scales
    assert model.dtype == torch.float16 and not hasattr(model.model.config, "quantization_config")
    assert type(model.model.lm_head) is torch.nn.Linear
    assert model.parameters == sum(p.numel() for p in zoo_like(model).parameters())


def zoo_like(model: LoadedModel) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.model.config)


def test_the_answers_are_those_of_the_dequantized_model(tmp_path) -> None:
    weights = packer.checkpoint(tmp_path / "m", "awq")
    model = loaded(tmp_path / "m", dtype="float32").model
    exact = zoo_like(loaded(tmp_path / "m")).to_empty(device="cpu").float()
    state = dict(model.state_dict())
    exact.load_state_dict(state | {f"{name}.weight": weight for name, weight in weights.items()})
    exact.model.rotary_emb = model.model.rotary_emb
    ids, _ = zoo.padded_batch([20])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, exact.float()(ids).logits, rtol=1e-5, atol=1e-5)


def change(folder: Path, **changes: Any) -> None:
    """Change tensors of a checkpoint in a single file; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


QUERY = "model.layers.0.self_attn.q_proj"
OUT = "model.layers.0.self_attn.o_proj"


def test_a_bias_that_only_the_checkpoint_has_is_used(tmp_path) -> None:
    """Some packers write a bias of zeros for layers without one."""
    packer.checkpoint(tmp_path, "gptq")
    change(tmp_path, **{f"{OUT}.bias": torch.zeros(64, dtype=torch.float16)})
    assert loaded(tmp_path).model.model.layers[0].self_attn.o_proj.bias is None
    change(tmp_path, **{f"{OUT}.bias": torch.full((64,), 0.5, dtype=torch.float16)})
    assert loaded(tmp_path).model.model.layers[0].self_attn.o_proj.bias.tolist() == [0.5] * 64


def test_scales_in_32_bits_are_kept_exactly_or_refused(tmp_path) -> None:
    weights = packer.checkpoint(tmp_path, "gptq")
    scales = load_file(tmp_path / "model.safetensors")[f"{QUERY}.scales"]
    change(tmp_path, **{f"{QUERY}.scales": scales.float()})
    matches(loaded(tmp_path).model, weights)
    change(tmp_path, **{f"{QUERY}.scales": scales.float() * 1.0001})
    with pytest.raises(ModelError, match=rf"{QUERY}: its scales are float32 and would lose precision"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("gptq", {f"{QUERY}.g_idx": torch.arange(64).flip(0).int() // 32}, "act-order \\(g_idx\\)"),
        ("gptq", {f"{QUERY}.scales": None}, "lacks its scales"),
        ("gptq", {f"{QUERY}.scales": torch.ones(1, 64).half()}, "do not belong to groups of 32"),
        ("awq", {f"{QUERY}.qweight": torch.ones(64, 16).int()}, "do not belong to groups of 32"),
        ("awq", {f"{QUERY}.qweight": torch.ones(512).int()}, "its qweight is int32 \\[512\\], but codes"),
        ("gptq", {f"{QUERY}.qzeros": torch.ones(2, 8)}, "its qzeros is float32 \\[2, 8\\], but codes"),
        ("awq", {f"{QUERY}.qweight": None}, f"it lacks the packed weights {QUERY}.qweight"),
        ("awq", {"model.layers.0.mlp.act.scales": torch.ones(96).half()}, "model.layers.0.mlp.act"),
        ("awq", {"model.embed_tokens.qweight": torch.ones(4, 4).int()}, "no linear layer model.embed_tokens"),
    ],
)
def test_damaged_and_odd_tensors_are_refused_by_name(tmp_path, kind, changes, problem) -> None:
    packer.checkpoint(tmp_path, kind)
    change(tmp_path, **changes)
    with pytest.raises(ModelError, match=problem):
        loaded(tmp_path)


def test_groups_of_16_are_refused(tmp_path) -> None:
    packer.checkpoint(tmp_path, "awq", group=16)
    with pytest.raises(ModelError, match="groups of 16 input channels are not supported"):
        loaded(tmp_path)


def test_missing_tensors_of_other_layers_are_still_refused(tmp_path) -> None:
    packer.checkpoint(tmp_path, "awq")
    change(tmp_path, **{"model.norm.weight": None})
    with pytest.raises(ModelError, match=r"lacks 1 tensor .*model\.norm\.weight"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        ({"bits": 3}, "AWQ with 3 bits"),
        ({"version": "gemv", "bits": "4"}, "in the layout gemv"),
        ({"version": "marlin"}, "in the layout marlin"),
        ({"quant_method": "gptq", "version": None, "desc_act": True}, "act-order \\(desc_act\\)"),
        ({"quant_method": "gptq", "version": None, "bits": 8}, "GPTQ with 8 bits"),
        ({"quant_method": "gptq", "version": None, "checkpoint_format": "marlin"}, "in the layout marlin"),
        ({"quant_method": "gptq", "version": None, "is_marlin_format": True}, "in the layout marlin"),
        ({"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic: \\+:\\.\\*down"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the format of bitsandbytes"),
    ],
)
def test_formats_are_refused_before_anything_is_loaded(tmp_path, description, problem) -> None:
    numbers = packer.architecture() | {"model_type": "llama"}
    numbers["quantization_config"] = packer.DESCRIPTION["awq"] | description
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    with pytest.raises(ConfigError, match=problem) as refusal:
        config(tmp_path)
    assert "model.weights=int4" in str(refusal.value)


def test_weights_in_4_bits_are_not_rounded_again(tmp_path) -> None:
    packer.checkpoint(tmp_path, "awq")
    with pytest.raises(ConfigError, match="already quantized") as refusal:
        config(tmp_path, weights="int4")
    assert "model.weights=pretrained" in str(refusal.value)
    assert load_model(config(tmp_path, weights="random_int4"), CPU).random_weights  # its config.json is enough


@pytest.mark.parametrize(("weights", "head"), [("int4", False), ("int4_all", True)])
def test_a_checkpoint_is_rounded_while_it_is_loaded(weights, head) -> None:
    exact, model = loaded("tiny").model, loaded("tiny", weights=weights)
    layers = int4.own_layers(model.model)
    assert ("lm_head" in layers) == int4.own_head(model.model) == head
    assert len(layers) == 7 * 8 + head
    assert model.parameters == sum(p.numel() for p in exact.parameters())
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.7.mlp.down_proj", *(("lm_head",) if head else ())):
        codes = round_weights(exact.get_submodule(name).weight, name, "")
        assert all(map(torch.equal, unpacked(layers[name].int4), codes))
    assert torch.equal(model.model.get_input_embeddings().weight, exact.get_input_embeddings().weight)
    assert int4.own_bytes(model.model) < 0.4 * int4.own_bytes(exact)


def test_rounding_holds_one_layer_at_a_time_in_full_precision(monkeypatch) -> None:
    """The layers that are rounded never have weights in full precision all at once."""
    from kvbench.models.quantized import loading

    whole: list[int] = []

    def counted(self: Any, report: Any) -> Any:
        whole.append(sum(layer.codes is not None for layer in self._layers.values()))
        return settle(self, report)

    settle = loading.Plan.settle
    monkeypatch.setattr(loading.Plan, "settle", counted)
    model = loaded("tiny", weights="int4").model
    names = [name for name, _ in model.named_parameters()]
    assert whole == [0] and not any("proj" in name for name in names)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value) -> None:
    weight = torch.ones(4, 64)
    weight[3, 40] = value
    with pytest.raises(ModelError, match="layer head: its weights contain NaN or Inf"):
        round_weights(weight, "head", "")


def test_random_weights_are_rounded_too() -> None:
    model = loaded("tiny", weights="random_int4_all")
    assert model.random_weights and model.eos_token_ids == ()
    assert int4.own_head(model.model) and len(int4.own_layers(model.model)) == 57


def test_weights_that_do_not_divide_are_refused_by_name(tmp_path) -> None:
    numbers = packer.architecture(hidden_size=40, num_attention_heads=2, num_key_value_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(numbers | {"model_type": "llama", "torch_dtype": "float32"}))
    with pytest.raises(ModelError, match="40 input and 40 output channels") as refusal:
        loaded(tmp_path, weights="random_int4")
    assert "model.layers.0.self_attn.q_proj" in str(refusal.value)


def test_weights_outside_linear_layers_are_refused(tmp_path) -> None:
    zoo.CAPPED["gpt_oss"][0](**{**packer.architecture(), **zoo.CAPPED["gpt_oss"][2]}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"weights outside linear layers \(model\.layers\.0\.mlp\.experts"):
        loaded(tmp_path, weights="random_int4")


def test_layers_that_are_spread_over_devices_are_where_they_belong(tmp_path) -> None:
    """On one device, as on several: by the names of transformers' device map."""
    pytest.importorskip("accelerate")
    weights = packer.checkpoint(tmp_path / "m", "awq", shards=2)
    named = AutoConfig.from_pretrained(tmp_path / "m")
    plan = plan_of(config(tmp_path / "m"), Source(str(tmp_path / "m"), local=True), named)
    assert plan is not None
    model = pretrained_spread(str(tmp_path / "m"), [torch.device("cpu")], dtype=torch.float16, **plan.arguments(named))
    plan.fill(model, torch.device("meta"))  # not used: each layer is where the device map says
    matches(model, weights)


def test_the_hooks_that_move_inputs_move_to_the_layer_that_replaces_theirs() -> None:
    model = zoo.fresh()
    model.lm_head.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 0,), kwargs), with_kwargs=True)
    round_model(model, "int4_all")
    with torch.no_grad():
        assert type(model.lm_head) is int4.Int4Linear and not model.lm_head(torch.ones(1, 256)).any()


@pytest.mark.gpu
def test_a_gpu_has_the_same_weights_as_a_cpu(tmp_path) -> None:
    gpu = RuntimeConfig(device="cuda")
    weights = packer.checkpoint(tmp_path / "m", "awq", shards=2)
    model = load_model(config(tmp_path / "m", dtype="bfloat16"), gpu).model
    for name, layer in int4.own_layers(model).items():
        assert layer.int4.codes.is_cuda
        assert torch.equal(dequantized(layer.int4, torch.float32).cpu(), weights[name])
    rounded_there = int4.own_layers(load_model(config("tiny", weights="int4_all"), gpu).model)
    for name, layer in int4.own_layers(loaded("tiny", weights="int4_all").model).items():
        assert all(map(torch.equal, unpacked(layer.int4), (x.cpu() for x in unpacked(rounded_there[name].int4))))
