"""Feed-forward layers of a long prompt a slice at a time: the same numbers, less memory, and nobody else's modules."""

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from kvbench.cache.progress import Options
from kvbench.decoding import generate, slices
from kvbench.methods import load_method
from kvbench.profiling.memory import TensorCensus
from tests import zoo


@pytest.mark.parametrize("lengths", [[231], [120, 231]])
def test_slices_change_no_number_on_a_cpu(lengths):
    model, method = zoo.model("llama"), load_method("kivi", residual=64)
    ids, mask = zoo.padded_batch(lengths)
    found = []
    for size in (None, 64):
        cache = method.new_cache(model)
        cache.options = Options(mlp_chunk=size)
        found.append(generate(model, cache, ids, mask, max_new_tokens=6, answer_ids=[[5, 9]] * len(lengths)))
    assert found[0].tokens == found[1].tokens
    for a, b in zip(found[0].answer_nll, found[1].answer_nll, strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-6)


def test_modules_are_sliced_and_given_back():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=32, **size)).eval()
    mlp, seen = model.gpt_neox.layers[0].mlp, []
    mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    mlp.dense_h_to_4h.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    x = torch.randn(2, 50, 32)
    whole, own = mlp(x), mlp.forward
    mlp.forward = outer = lambda hidden: own(hidden)  # as accelerate's hooks do
    seen.clear()
    with slices.sliced(model, 100, 16) as count:
        assert count == 2
        torch.testing.assert_close(mlp(x), whole)
        assert torch.equal(mlp(x[:, :8]), mlp.forward(x[:, :8]))  # short enough: in one piece
    assert seen[0] == (2, 50, 32)
    assert [tuple(shape) for shape in seen[1:8]] == [(2, 8, 32)] * 6 + [(2, 2, 32)]
    assert mlp.forward is outer
    assert "forward" not in model.gpt_neox.layers[1].mlp.__dict__
    with slices.sliced(model, 16, 16) as count:
        assert count == 0
    with slices.sliced(model, slices.LONG) as count:
        assert count == 0
    with slices.sliced(model, slices.LONG + 1) as count:
        assert count == 2


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "phi3"])
def test_rope_by_slices_is_the_same_bit_for_bit(name):
    model = zoo.model(name)
    (file,) = (file for file in slices.model_modules(model) if hasattr(file, slices.ROPE))
    whole = getattr(file, slices.ROPE)
    q, k = (torch.randn(2, 50, heads, 64).transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 50, 64)
    with slices.sliced(model, 100, 16):
        assert getattr(file, slices.ROPE) is not whole
        computed = getattr(file, slices.ROPE)(q, k, cos, sin)
    assert getattr(file, slices.ROPE) is whole
    for ours, theirs in zip(computed, whole(q, k, cos, sin), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride(-1) == 1  # what back ends of attention ask for


def test_experts_and_what_is_unknown_are_left_alone():
    class Odd(torch.nn.Module):
        def __init__(self, **parts):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    linear = torch.nn.Linear(4, 4)
    assert slices.treats_tokens_alone(Odd(up_proj=linear, act=torch.nn.SiLU(), dropout=torch.nn.Dropout(0.1)))
    assert not slices.treats_tokens_alone(Odd(experts=torch.nn.ModuleList([linear])))
    assert not slices.treats_tokens_alone(Odd(gate=Odd(router=linear)))
    assert not slices.treats_tokens_alone(Odd(conv=torch.nn.Conv1d(4, 4, 3)))  # its tokens see each other
    assert not slices.treats_tokens_alone(Odd(norm=torch.nn.LayerNorm(4)))


def test_a_long_prefill_holds_a_slice_of_the_intermediate_size():
    tokens, hidden, inner = 1024, 32, 512
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 32, (1, tokens))
    peaks = {}
    for size in (None, 64):
        cache = load_method("fp16").new_cache(model, max_length=tokens + 2)
        cache.options = Options(mlp_chunk=size)
        with TensorCensus() as census:

            class Look:
                def phase(self, name):
                    census.phase(name)

            before = census.current
            generate(model, cache, ids, max_new_tokens=1, observer=Look())
        peaks[size] = census.peaks["prefill"] - before
    one = tokens * inner * 4
    assert peaks[None] > 3 * one
    assert peaks[64] < one


def test_what_slices_cannot_take_is_computed_at_once():
    """Other arguments, other shapes, a result that is not one token for one token."""
    calls = []

    def forward(*given, **more):
        calls.append((tuple(given[0].shape) if given else None, more))
        return given[0] * 2 if given else None

    run, x = slices._by_slices(forward, 8), torch.randn(2, 9, 4)
    assert torch.equal(run(x), 2 * x)
    assert [shape for shape, _ in calls] == [(2, 4, 4), (2, 4, 4), (2, 1, 4)]
    for given, more in (((x, 1), {}), ((x,), {"scale": 2}), ((x[0],), {}), ((x[:, :4],), {}), ((), {"x": x})):
        calls.clear()
        run(*given, **more)
        assert len(calls) == 1
    many = torch.randn(20, 3, 4)
    calls.clear()
    assert torch.equal(run(many), 2 * many) and len(calls) == 3  # a column at a time at least
    short = slices._by_slices(lambda x: x[:, :1], 8)
    assert torch.equal(short(x), x[:, :1])
    pair = slices._by_slices(lambda x: (x, x), 8)
    assert len(pair(x)) == 2


def test_rotations_of_other_layouts_are_computed_at_once():
    shapes = []

    def rotate(q, k, cos, sin, *more, **other):
        shapes.append(q.shape)
        return q * 1, k * 1

    run = slices._rotated_by_slices(rotate, 8)
    q, k, cos = torch.randn(2, 4, 9, 6), torch.randn(2, 2, 9, 6), torch.randn(1, 9, 6)
    assert torch.equal(run(q, k, cos, cos)[1], k)
    assert [shape[2] for shape in shapes] == [4, 4, 1]
    for given in (
        (q, k, cos, cos, 1),
        (q, k, cos[:, :1], cos[:, :1]),
        (q, k[:, :, :5], cos, cos),
        (q, k, cos[0], cos[0]),
        (q[0], k[0], cos, cos),
        (q[:, :, :4], k[:, :, :4], cos[:, :4], cos[:, :4]),
    ):
        shapes.clear()
        run(*given)
        assert len(shapes) == 1
    shapes.clear()
    run(q, k, cos, cos, unsqueeze_dim=1)
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("tokens", "chunk", "sliced"),
    [(100, None, 0), (100, 99, 2), (100, 100, 0), (slices.SLICE + 1, "auto", 0), (slices.LONG + 1, "auto", 2)],
)
def test_passes_beyond_a_slice_are_sliced_and_put_back_after_an_error(tokens, chunk, sliced):
    model = zoo.model("llama")
    with pytest.raises(ValueError, match="inside"), slices.sliced(model, tokens, chunk) as count:
        assert count == sliced
        assert sum("forward" in module.__dict__ for module in model.modules()) == sliced
        raise ValueError("inside")
    assert not any("forward" in module.__dict__ for module in model.modules())
