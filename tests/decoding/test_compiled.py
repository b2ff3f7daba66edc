"""Layers around attention through a compiler: weights joined in place, everything put back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench.attention import fused, phases
from kvbench.decoding import compiled, graphs, speculative
from kvbench.decoding.autoregressive import decode_eagerly
from kvbench.decoding.passes import prefill
from kvbench.decoding.recorded import Step
from kvbench.decoding.rounds import CapturedRounds
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.linear import int4 as linear_int4
from kvbench.linear import matvec
from kvbench.methods import load_method
from kvbench.models import int4, shared
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part
from tests.methods.test_quantspec import small


@pytest.fixture
def llama() -> nn.Module:
    """A model of its own: its weights are moved."""
    import copy

    return copy.deepcopy(zoo.restless())


@torch.no_grad()
def test_joined_layers_are_slices_of_one_product(llama: nn.Module) -> None:
    """Same outputs, same weights, one buffer; joining again makes no other."""
    attention, x = llama.model.layers[0].self_attn, torch.randn(1, 1, llama.config.hidden_size)
    wanted = [getattr(attention, name)(x) for name in compiled.JOINED[0]]
    weights = {name: value.clone() for name, value in llama.state_dict().items()}
    undo: list[Callable[[], None]] = []
    compiled.join(attention, compiled.JOINED[0], undo)
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


class Attention(nn.Module):
    """Three products of a width, called in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.v_proj(x)
        return self.q_proj(x) + self.k_proj(x) * v


class Twice(Attention):
    """Reads two inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + self.k_proj(x + 1) * self.v_proj(x)


def count_joined(module: nn.Module, names: Sequence[str]) -> int:
    """Linear layers that were joined."""
    undo: list[Callable[[], None]] = []
    compiled.join(module, names, undo)
    return len(undo)


@torch.no_grad()
def test_what_cannot_be_joined_is_left_alone(llama: nn.Module) -> None:
    """One bias of three, a forward pass of its own, a missing layer, another order of calls."""
    attention, other = (layer.self_attn for layer in llama.model.layers)
    attention.q_proj.bias = nn.Parameter(torch.zeros(attention.q_proj.out_features))
    assert count_joined(attention, compiled.JOINED[0]) == 0
    other.q_proj.forward = lambda x: x
    assert count_joined(other, compiled.JOINED[0]) == 0
    assert count_joined(llama.model.layers[0].mlp, compiled.JOINED[0]) == 0
    assert count_joined(llama.model.layers[0].mlp, compiled.JOINED[1]) == 2
    assert count_joined(Attention(), compiled.JOINED[0]) == 0
    assert count_joined(Twice(), compiled.JOINED[0]) == 3


@torch.no_grad()
@pytest.mark.parametrize("kind", [Attention, Twice])
def test_any_module_s_products_are_its_own(kind: type[Attention], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order, whatever is read; nothing is left behind."""
    module, x = kind(), torch.randn(1, 1, 8)
    wanted = module(x)
    made: list[compiled.Product] = []
    monkeypatch.setattr(compiled, "Product", lambda known=compiled.Product: made.append(known()) or made[-1])
    compiled.products(module, [])
    for _ in range(2):
        torch.testing.assert_close(module(x), wanted)
    x += 1
    torch.testing.assert_close(module(x), kind.forward(module, x))
    assert made and all(each.x is None and each.out is None for each in made)


@torch.no_grad()
def test_biases_and_weights_in_another_order_are_their_own() -> None:
    """Joined with their biases; a buffer that holds the weights in another order does not count as joined."""
    module, x = Twice(), torch.randn(1, 1, 8)
    for name in compiled.JOINED[0]:
        getattr(module, name).bias = nn.Parameter(torch.randn(8))
    buffer = torch.randn(24, 8)
    for number, name in enumerate(("q_proj", "v_proj", "k_proj")):
        getattr(module, name).weight.data = buffer[8 * number : 8 * number + 8]
    wanted = module(x)
    assert count_joined(module, compiled.JOINED[0]) == 3
    torch.testing.assert_close(module(x), wanted)


@torch.no_grad()
def test_no_room_for_a_joined_weight_leaves_the_model_as_it_was(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that ends within a layer, after some of it is done."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    plain, calls = torch.cat, []

    def full(tensors: Sequence[torch.Tensor], *more: object) -> torch.Tensor:
        calls.append(len(tensors))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return plain(tensors, *more)

    monkeypatch.setattr(torch, "cat", full)
    with pytest.raises(torch.OutOfMemoryError), compiled.around(llama, True, rows=1):
        pass
    assert len(calls) == 2 and not any("forward" in module.__dict__ for module in llama.modules())


@torch.no_grad()
def test_a_model_loaded_for_compiled_steps_is_not_changed_by_them(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are joined before there is a cache, and values, outputs and bytes are those of before."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    ids = torch.arange(2, 12)[None]
    wanted, weights = llama(ids).logits, {name: value.clone() for name, value in llama.state_dict().items()}
    loaded = SimpleNamespace(model=llama, device=torch.device("cuda"))
    monkeypatch.setattr(compiled, "load_model", lambda *args: loaded)
    assert compiled.load_joined("toy", SimpleNamespace(compile=True)) is loaded
    for layer in llama.model.layers:
        for module, names in zip((layer.self_attn, layer.mlp), compiled.JOINED, strict=True):
            parts = [getattr(module, name).weight.data for name in names]
            assert compiled.adjacent(parts) is not None
    assert all(torch.equal(weights[name], value) for name, value in llama.state_dict().items())
    assert torch.equal(llama(ids).logits, wanted)
    before = shared.model_state(llama)
    with compiled.around(llama, True, rows=1):
        torch.testing.assert_close(llama(ids).logits, wanted)
    assert shared.model_state(llama) == before


@torch.no_grad()
def test_weights_of_4_bits_are_joined_when_they_are_loaded_too(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for layer in llama.model.layers:
        for module, names in zip((layer.self_attn, layer.mlp), compiled.JOINED, strict=True):
            for name in names:
                setattr(module, name, int4.Int4Linear.rounded(getattr(module, name)))
    ids = torch.arange(2, 12)[None]
    wanted = llama(ids).logits
    compiled.join_weights(llama)
    torch.testing.assert_close(llama(ids).logits, wanted)
    before = shared.model_state(llama)
    drafts = [getattr(llama.model.layers[0].mlp, name) for name in compiled.JOINED[1]]
    assert compiled.whole_int4(drafts).codes.data_ptr() == drafts[0].codes.data_ptr()
    with compiled.around(llama, True, rows=1):
        pass
    assert shared.model_state(llama) == before


@pytest.mark.parametrize(("compile", "device"), [(False, "cuda"), (True, "cpu")])
def test_other_loaded_models_are_left_alone(
    compile: bool, device: str, llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, before = SimpleNamespace(model=llama, device=torch.device(device)), shared.model_state(llama)
    monkeypatch.setattr(compiled, "load_model", lambda *args: loaded)
    compiled.load_joined("toy", SimpleNamespace(compile=compile))
    assert shared.model_state(llama) == before


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("broken")])
def test_a_model_that_fits_without_joined_weights_is_loaded(
    error: RuntimeError, llama: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lack of memory is said, and what was cached is released; other errors are raised."""
    weights = {name: value.clone() for name, value in llama.state_dict().items()}

    def full(tensors: Sequence[torch.Tensor], *more: object) -> torch.Tensor:
        raise error

    loaded = SimpleNamespace(name="toy", model=llama, device=torch.device("cuda"))
    released: list[torch.device] = []
    monkeypatch.setattr(compiled, "load_model", lambda *args: loaded)
    monkeypatch.setattr(compiled, "release", released.append)
    monkeypatch.setattr(torch, "cat", full)
    short = isinstance(error, torch.OutOfMemoryError)
    with nullcontext() if short else pytest.raises(RuntimeError, match="broken"):
        assert compiled.load_joined("toy", SimpleNamespace(compile=True)) is loaded
    monkeypatch.undo()
    assert ("model toy: no room to join its weights" in capsys.readouterr().err) is short
    assert released == [loaded.device] * short
    assert all(torch.equal(weights[name], value) for name, value in llama.state_dict().items())


@pytest.mark.parametrize("rows", [1, 3, 17])
@torch.no_grad()
def test_layers_run_compiled_inside_and_as_before_outside(
    llama: nn.Module, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decoder layer, the rotary embedding and the last norm are compiled; joined where there are few rows."""
    seen: list[bool] = []

    def fake(function: object, **options: object) -> object:
        seen.append(bool(options["options"]["emulate_precision_casts"]))  # type: ignore[index]
        return function

    monkeypatch.setattr(torch, "compile", fake)
    ids = torch.arange(3, 12)[None]
    wanted = llama(ids).logits
    with compiled.around(llama, True, rows=rows):
        replaced = "forward" in llama.model.layers[1].self_attn.k_proj.__dict__
        torch.testing.assert_close(llama(ids).logits, wanted)
    assert seen == [True] * 4 and replaced == (rows <= 16)
    assert not any("forward" in module.__dict__ for module in llama.modules())
    with compiled.around(llama, False, rows=rows):
        assert len(seen) == 4


def test_what_a_recorded_step_reads_lives_as_long_as_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joint bias of queries, keys and values belongs to no layer, and its address is in the graph."""
    model = zoo.fresh("qwen2")
    read: list[weakref.ref[torch.Tensor]] = []

    def run() -> None:
        bias = model.model.layers[0].self_attn.q_proj.forward.__defaults__[1]
        assert bias.shape == (512,)
        read.append(weakref.ref(bias))

    class Graph:
        def __init__(self, carried: object) -> None:
            self.cross = None

        def recording(self, device: object) -> Any:
            return nullcontext()

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(graphs, "Segments", Graph)
    monkeypatch.setattr(graphs, "aside", lambda devices: nullcontext())
    monkeypatch.setattr(graphs, "rehearse", lambda step: None)
    step: Any = SimpleNamespace(
        model=model, tokens=torch.zeros(1, 1), devices=[], carried=None, device="cpu", version=1
    )
    step.recording, step.crossing, step.run = nullcontext, lambda by: nullcontext(), run
    captured = graphs.Captured(step, compile=True)
    for number in (1, 2):
        captured.record()
        gc.collect()
        assert [bias() is not None for bias in read] == [False] * (number - 1) + [True]


@pytest.mark.parametrize("single", [False, True])
def test_a_recorded_layer_is_one_graph(llama: nn.Module, single: bool) -> None:
    """Attention is one opaque operation; both layers share one compilation; four products of a single row."""
    from kvbench.attention import recorded

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def serving(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, logits: object
    ) -> torch.Tensor:
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
                compiled.products(layer, [])
            layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
        torch.testing.assert_close(once(), wanted)
    assert len(graphs) == 1
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("recorded_attention" in str(target) for target in called) == 1
    assert sum("matvec" in str(target) for target in called) == (4 if single else 0)
    torch._dynamo.reset()


@torch.inference_mode()
def test_a_compiled_step_of_one_row_gives_the_tokens_of_eager_steps(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole answer over a packed cache, through the compiler's front: four products a layer, every step."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))
    compiler, products, plain = torch.compile, [], matvec.served
    # no C++ compiler is needed for this back end
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="aot_eager"))
    monkeypatch.setattr(matvec, "served", lambda *given: products.append(given[1].shape[0]) or plain(*given))
    torch._dynamo.reset()
    method, new = load_method("kivi", quantizer="int4", residual=32), 40
    ids = torch.arange(3, 93)[None]
    answers = []
    for graph in (False, True):
        cache = method.new_cache(llama, max_length=90 + new)
        token = prefill(llama, cache, ids, None).argmax(-1)
        stopping, lengths, sampling = Stopping(1, (), (), None), torch.tensor([90]), Sampling()
        if graph:
            captured = graphs.Captured(Step(llama, cache, token, lengths, sampling), capture=False)
            with compiled.around(llama, True, rows=1):
                captured.first()
                graphs.decode_captured(captured, token, stopping, new)
        else:
            decode_eagerly(
                llama, cache, token, torch.ones_like(ids), lengths, stopping, Sampling(), Sampling().generators(1), new
            )
        answers.append((stopping.tokens, cache.bill().used))
    assert answers[0] == answers[1]
    hidden, layers = llama.config.hidden_size, len(llama.model.layers)
    assert len(products) == 4 * layers * (new - 1)
    assert sum(products[:4]) > 3 * hidden and products[:4] == products[4:8]
    torch._dynamo.reset()


@torch.no_grad()
def test_joined_4_bit_layers_are_slices_of_one_product(llama: nn.Module) -> None:
    """The draft's weights, stacked in place once; the target's are joined apart from them."""
    int4.attach(llama, "all")
    attention, x = llama.model.layers[0].self_attn, torch.randn(1, 3, llama.config.hidden_size)
    names = compiled.JOINED[0]
    for drafting in (True, False):
        modules = [getattr(attention, name) for name in names]
        wanted = [(module.draft if drafting else module.exact)(x) for module in modules]
        undo: list[Callable[[], None]] = []
        compiled.join(attention, names, undo, drafting)
        assert len(undo) == 3
        for module, out in zip(modules, wanted, strict=True):
            torch.testing.assert_close(module(x), out)
        torch.testing.assert_close(modules[1](x + 1), (modules[1].draft if drafting else modules[1].exact)(x + 1))
        for restore in reversed(undo):
            restore()
    drafts = [getattr(attention, name).draft for name in names]
    whole = compiled.whole_int4(drafts)
    assert whole.codes.data_ptr() == drafts[0].codes.data_ptr() == compiled.whole_int4(drafts).codes.data_ptr()
    assert whole.rows == sum(draft.out_features for draft in drafts)
    int4.detach(llama)


@torch.inference_mode()
@pytest.mark.slow  # 4 s
def test_draft_and_verification_are_compiled_apart(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of eager rounds; a draft has four products a layer and the head's in 4 bits, a verification four in 16."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))
    compiler, four, sixteen = torch.compile, [], []

    def counted(model: nn.Module, passes: graphs.Captured, replay: Callable[[], None], counts: list[object]) -> None:
        four.clear()
        sixteen.clear()
        with compiled.around(model, True, rows=passes.step.tokens.numel(), drafting=passes.drafting):
            replay()
        counts.append((passes.drafting, len(four), len(sixteen)))

    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="aot_eager"))
    plain, served = linear_int4.dequantized_product, matvec.served
    monkeypatch.setattr(linear_int4, "dequantized_product", lambda *given: four.append(given[1].rows) or plain(*given))
    monkeypatch.setattr(matvec, "served", lambda *given: sixteen.append(len(given[0][0])) or served(*given))
    torch._dynamo.reset()
    method, layers = small(32, gamma=3, draft_weights="int4_all"), len(llama.model.layers)
    ids = torch.arange(3, 93)[None]
    answers = []
    for captured in (False, True):
        cache = method.new_cache(llama, max_length=130)
        int4.attach(llama, "all")
        token = prefill(llama, cache, ids, None).argmax(-1)
        engine = CapturedRounds(llama, cache, method.speculation, Sampling(), 1, compile=True, capture=False)
        stopping, counts = Stopping(1, (), (), None), []
        rest = (stopping, Sampling(), Sampling().generators(1), 30, 0, method.speculation)
        if not captured:
            speculative.speculative_decode(llama, cache, token, *rest)
        else:
            engine.prepare()
            for passes in (engine.draft, engine.verifications[3]):
                monkeypatch.setattr(passes, "replay", partial(counted, llama, passes, passes.replay, counts))
            speculative.speculative_decode(llama, cache, token, *rest, engine)
            assert set(counts) == {(True, 4 * layers + 1, 0), (False, 0, 4 * layers)}
        answers.append((stopping.tokens, cache.bill().used))
    assert answers[0] == answers[1]
    int4.detach(llama)
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("drafting", [True, False])
def test_all_products_of_a_layer_use_the_chosen_weights_and_are_given_back(llama: nn.Module, drafting: bool) -> None:
    """Seven linear layers; inside those with two sets of weights, none is replaced by itself."""
    int4.attach(llama, "all")
    layer = llama.model.layers[1]
    places = [(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    places += [(layer.mlp, name) for name in ("gate_proj", "up_proj")]
    modules = [getattr(owner, name) for owner, name in places]
    inputs = [torch.randn(1, 2, module.exact.in_features) for module in modules]
    wanted = [(module.draft if drafting else module.exact)(x) for module, x in zip(modules, inputs, strict=True)]
    undo: list[Callable[[], None]] = []
    compiled.products(layer, undo, drafting)
    assert len(undo) == 7 and "forward" in layer.mlp.down_proj.__dict__
    for module, x, out in zip(modules, inputs, wanted, strict=True):
        torch.testing.assert_close(module(x), out, rtol=1e-4, atol=1e-5)
        assert "forward" not in module.exact.__dict__ and "forward" not in module.draft.__dict__
    for restore in reversed(undo):
        restore()
    assert not any("forward" in module.__dict__ for module in layer.modules())
    int4.detach(llama)


def test_a_forward_function_that_was_replaced_before_comes_back() -> None:
    module = nn.Linear(2, 2)
    restore = compiled.replaced(module, len)
    again = compiled.replaced(module, max)
    assert module.__dict__["forward"] is max
    again()
    assert module.__dict__["forward"] is len
    restore()
    assert "forward" not in module.__dict__


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "k_proj", nn.Linear(16, 8, bias=True)),
        lambda module: setattr(module, "k_proj", nn.Linear(12, 8, bias=False)),
        lambda module: setattr(module, "v_proj", nn.Linear(16, 8, bias=False).double()),
        lambda module: delattr(module, "v_proj"),
        lambda module: setattr(module.q_proj, "forward", module.q_proj.forward),
    ],
)
def test_layers_of_different_kinds_are_not_joined(change: Callable[[nn.Module], object]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in compiled.JOINED[0]:
                setattr(self, name, nn.Linear(16, 8, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            return self.q_proj(x) + self.k_proj(x) + self.v_proj(x)

    alike, other = Block(), Block()
    undo: list[Callable[[], None]] = []
    compiled.join(alike, compiled.JOINED[0], undo)
    assert len(undo) == 3
    change(other)
    compiled.join(other, compiled.JOINED[0], undo)
    assert len(undo) == 3
