"""Division of a layer between processes, and refusals before it."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.errors import ModelError
from kvbench.parallel.shard import Gathered, Summed, check_tensor_plan, cut_linear, generic, shard
from kvbench.util.attachment import placement
from tests import zoo


@pytest.mark.parametrize(("size", "most"), [(3, 2), (4, 2), (5, 2)])
def test_heads_that_the_ranks_cannot_share_evenly_are_refused(size: int, most: int) -> None:
    """4 query heads and 2 KV heads: four ranks can share the former alone."""
    message = (
        f"4 query heads and 2 KV heads, which {size} processes cannot share evenly.\n  hint: run "
        f"torchrun --nproc-per-node {most}"
    )
    with pytest.raises(ModelError, match=message):
        check_tensor_plan(zoo.model("llama"), size)
    assert "colwise" in check_tensor_plan(zoo.model("llama"), 2).values()


def test_a_bias_is_added_once_to_the_sum_of_the_ranks() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(6, 4), torch.randn(3, 6)
    parts: list[torch.Tensor] = []
    for rank in (0, 1):

        def noted(product: torch.Tensor) -> torch.Tensor:
            parts.append(product.detach().clone())
            return torch.stack(parts).sum(0)

        team: Any = SimpleNamespace(size=2, rank=rank, device=torch.device("cpu"), sum=noted)
        out = cut_linear(copy.deepcopy(linear), "rowwise", team)(x[:, 3 * rank : 3 * rank + 3])
    torch.testing.assert_close(out, linear(x))  # of the last rank, with which the sum is whole


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "size"), [(4, 2), (5, 2), (5, 3), (4, 3)])
def test_outputs_are_whole_once_gathered_and_slices_are_padded_to_one_height(
    outputs: int, size: int, bias: bool
) -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(6, outputs, bias=bias), torch.randn(3, 6)
    parts: list[torch.Tensor] = []
    for rank in range(size):

        def gather(product: torch.Tensor, dim: int) -> torch.Tensor:
            assert dim == -1
            parts.append(product)
            return torch.cat(parts, dim)

        team: Any = SimpleNamespace(size=size, rank=rank, device=torch.device("cpu"), gather=gather)
        layer = cut_linear(copy.deepcopy(linear), "colwise_rep", team)
        assert isinstance(layer, Gathered) and layer.weight is layer.local.weight
        assert (layer.in_features, layer.out_features) == (6, outputs)
        out = layer(x)
    assert len({part.shape for part in parts}) == 1
    torch.testing.assert_close(out, linear(x))


@pytest.mark.parametrize("bias", [True, False])
def test_columns_are_cut_with_their_bias_and_the_whole_can_be_freed(bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(6, 5, bias=bias), torch.randn(3, 6)
    outs = []
    for rank in (0, 1):
        whole = copy.deepcopy(linear)
        storage = whole.weight.untyped_storage().data_ptr()
        team: Any = SimpleNamespace(size=2, rank=rank, device=torch.device("cpu"))
        layer = cut_linear(whole, "colwise", team)
        assert layer is whole and layer.weight.untyped_storage().data_ptr() != storage
        assert layer.weight.untyped_storage().nbytes() == layer.weight.numel() * 4
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        assert (layer.out_features, layer.in_features) == tuple(layer.weight.shape)
        outs.append(layer(x))
    assert [out.shape[-1] for out in outs] == [2, 3]
    torch.testing.assert_close(torch.cat(outs, -1), linear(x))


def test_rows_are_cut_and_summed_without_a_bias_too() -> None:
    linear, x = torch.nn.Linear(5, 4, bias=False), torch.randn(2, 5)
    total = torch.zeros(2, 4)
    for rank, columns in ((0, slice(0, 2)), (1, slice(2, 5))):
        team: Any = SimpleNamespace(size=2, rank=rank, device=torch.device("cpu"), sum=lambda product: product)
        layer = cut_linear(copy.deepcopy(linear), "rowwise", team)
        assert isinstance(layer, Summed) and layer.weight is layer.local.weight and layer.bias is None
        assert (layer.in_features, layer.out_features) == (columns.stop - columns.start, 4)
        total += layer(x[:, columns]).detach()
    torch.testing.assert_close(total, linear(x))


def test_numbers_of_layers_are_stars_and_other_numbers_are_not() -> None:
    assert generic("model.layers.3.mlp.up_proj") == "model.layers.*.mlp.up_proj"
    assert generic("model.layers.12") == "model.layers.*" and generic("lm_head") == "lm_head"
    assert generic("model.fc1.w2") == "model.fc1.w2"


def test_the_layers_of_a_model_are_replaced_by_their_plan() -> None:
    model = zoo.fresh("llama")
    count, heads = sum(p.numel() for p in model.parameters()), zoo.model("llama").model.layers[0].self_attn
    team: Any = SimpleNamespace(size=2, rank=1, device=torch.device("cpu"))
    shard(model, team)
    for layer, whole in zip(model.model.layers, zoo.model("llama").model.layers, strict=True):
        own, full = layer.self_attn, whole.self_attn
        half = full.k_proj.out_features // 2
        assert torch.equal(own.k_proj.weight, full.k_proj.weight[half:])
        assert isinstance(own.o_proj, Summed)
        assert torch.equal(own.o_proj.weight, full.o_proj.weight[:, full.o_proj.in_features // 2 :])
        assert isinstance(layer.mlp.down_proj, Summed) and type(layer.mlp.up_proj) is torch.nn.Linear
    assert heads.k_proj.out_features == 2 * model.model.layers[0].self_attn.k_proj.out_features
    assert torch.equal(model.model.embed_tokens.weight, zoo.model("llama").model.embed_tokens.weight)
    placed = placement(model)
    assert placed.team is team and placed.parameters == count


def planned(**changes: Any) -> Any:
    """A llama whose plan of transformers is changed."""
    model = copy.copy(zoo.model("llama"))
    plan = dict(check_tensor_plan(zoo.model("llama"), 2))
    for name, style in changes.items():
        key = next(path for path in plan if path.endswith(name))
        plan[key] = style
    model.__dict__["_tp_plan"] = plan
    return model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k_proj": "replicate"}, r"gives every rank all keys \(model.layers.0.self_attn.k_proj: replicate\)"),
        ({"up_proj": "sideways"}, r"splits model.layers.0.mlp.up_proj \(Linear\) as 'sideways'.*does not support"),
    ],
)
def test_plans_that_kvbench_cannot_follow_are_refused(changes: dict[str, str], said: str) -> None:
    assert check_tensor_plan(planned(up_proj="replicate"), 2)
    with pytest.raises(ModelError, match=said) as error:
        check_tensor_plan(planned(**changes), 2)
    assert "runtime.device_map=auto" in str(error.value)


def test_a_model_without_a_plan_or_with_other_projections_is_refused() -> None:
    model = copy.copy(zoo.model("llama"))
    model.__dict__["_tp_plan"] = {}
    with pytest.raises(ModelError, match="no tensor-parallel plan for LlamaForCausalLM"):
        check_tensor_plan(model, 2)
    fewer = planned()
    fewer.config = copy.deepcopy(fewer.config)
    fewer.config.num_hidden_layers += 1
    with pytest.raises(ModelError, match="does not have a projection named k_proj or query_key_value or qkv_proj"):
        check_tensor_plan(fewer, 2)
