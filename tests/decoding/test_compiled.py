"""Layers around attention through a compiler: weights joined in place, everything put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvbench.decoding import compiled
from tests import zoo


@pytest.fixture
def llama() -> nn.Module:
    """A model of its own: its weights are moved."""
    import copy

    return copy.deepcopy(zoo.restless())


@torch.no_grad()
def test_joined_layers_are_slices_of_one_product(llama: nn.Module) -> None:
    """Same outputs, same weights, one buffer; joining again makes no other."""
    attention, x = llama.model.layers[0].self_attn, torch.randn(1, 1, 256)
    wanted = [getattr(attention, name)(x) for name in compiled.JOINED[0]]
    weights = {name: value.clone() for name, value in llama.state_dict().items()}
    undo = compiled.join(attention, compiled.JOINED[0])
    assert all("forward" in getattr(attention, name).__dict__ for name in compiled.JOINED[0])
    for name, out in zip(compiled.JOINED[0], wanted, strict=True):
        torch.testing.assert_close(getattr(attention, name)(x), out)
    for each in reversed(undo):
        each()
    assert all("forward" not in getattr(attention, name).__dict__ for name in compiled.JOINED[0])
    assert all(torch.equal(weights[name], value) for name, value in llama.state_dict().items())
    linears = [getattr(attention, name) for name in compiled.JOINED[0]]
    whole = compiled.whole_weight(linears)
    assert whole.data_ptr() == linears[0].weight.data_ptr() == compiled.whole_weight(linears).data_ptr()
    assert torch.equal(whole, torch.cat([each.weight for each in linears]))


@torch.no_grad()
def test_what_cannot_be_joined_is_left_alone(llama: nn.Module) -> None:
    """A bias, a class of its own, a missing layer."""
    attention = llama.model.layers[0].self_attn
    attention.q_proj.bias = nn.Parameter(torch.zeros(attention.q_proj.out_features))
    assert compiled.join(attention, compiled.JOINED[0]) == []
    assert compiled.join(llama.model.layers[0].mlp, compiled.JOINED[0]) == []


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_layers_run_compiled_inside_and_as_before_outside(
    llama: nn.Module, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decoder layer is compiled; joined only where there is a single row."""
    seen: list[bool] = []

    def fake(function: object, **options: object) -> object:
        seen.append(bool(options["options"]["emulate_precision_casts"]))  # type: ignore[index]
        return function

    monkeypatch.setattr(torch, "compile", fake)
    ids = torch.arange(3, 12)[None]
    wanted = llama(ids).logits
    with compiled.around(llama, True, rows=rows):
        joined = "forward" in llama.model.layers[1].self_attn.k_proj.__dict__
        torch.testing.assert_close(llama(ids).logits, wanted)
    assert seen == [True] * 2 and joined == (rows == 1)
    assert all("forward" not in layer.__dict__ for layer in llama.model.layers)
    assert "forward" not in llama.model.layers[1].self_attn.k_proj.__dict__
    with compiled.around(llama, False, rows=rows):
        assert len(seen) == 2


@pytest.mark.parametrize("single", [False, True])
def test_a_recorded_layer_is_one_graph(llama: nn.Module, single: bool) -> None:
    """Attention is one opaque operation; both layers share one compilation; four products of a single row."""
    from kvbench.attention import recorded

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def serving(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        return query.transpose(1, 2) * scaling

    torch._dynamo.reset()
    ids, positions = torch.tensor([[5]]), torch.tensor([[7]])
    through = recorded.PassThrough()

    def once() -> torch.Tensor:
        return llama(input_ids=ids, position_ids=positions, past_key_values=through, use_cache=True).logits

    with torch.no_grad(), recorded.recording(llama, serving):
        wanted = once()
        for layer in llama.model.layers:
            if single:
                compiled.products(layer)
            layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
        torch.testing.assert_close(once(), wanted)
    assert len(graphs) == 1
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("recorded_attention" in str(target) for target in called) == 1
    assert sum("matvec" in str(target) for target in called) == (4 if single else 0)
    torch._dynamo.reset()
