"""Forward passes: which prompts share one, what a pass is given, and reference answers of odd lengths.

Feed-forward layers of a long prompt a slice at a time: the same numbers, less memory, and nobody else's modules.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from kvbench.cache import KVCache, Prompts
from kvbench.cache.progress import Options
from kvbench.decoding import generate, passes
from kvbench.decoding.autoregressive import answer_nll
from kvbench.decoding.passes import prefill, prefill_groups
from kvbench.errors import CacheError
from kvbench.methods import load_method
from kvbench.profiling.memory import TensorCensus
from tests import zoo

MASK = torch.ones(5, 100)


def cache_of(takes: bool = True, prompts: bool = True) -> Any:
    known = Prompts([0] * 5, [100] * 5) if prompts else None
    return SimpleNamespace(takes_groups=lambda: takes, progress=SimpleNamespace(prefill=SimpleNamespace(prompts=known)))


@pytest.mark.parametrize(
    ("rows", "width", "mask", "cache", "sizes"),
    [
        (2, 100, MASK, cache_of(), [2, 2, 1]),
        (4, 100, None, cache_of(prompts=False), [4, 1]),  # no padding: nothing to declare
        (5, 100, MASK, cache_of(), [5]),
        (9, 100, MASK, cache_of(), [5]),
        (None, 100, MASK, cache_of(), [5]),
        ("auto", 100, MASK, cache_of(), [5]),
        ("auto", passes.TOGETHER // 2, MASK, cache_of(), [2, 2, 1]),
        ("auto", passes.TOGETHER // 2 + 1, MASK, cache_of(), [1] * 5),
        ("auto", passes.TOGETHER * 3, MASK, cache_of(), [1] * 5),
        (2, 100, MASK, cache_of(takes=False), [5]),
        (2, 100, MASK, cache_of(prompts=False), [5]),
    ],
)
def test_prompts_share_a_pass_up_to_so_many_tokens(rows: Any, width: int, mask: Any, cache: Any, sizes: Any) -> None:
    computed = prefill_groups(cache, 5, width, mask, rows)
    assert [part.stop - part.start for part in computed] == sizes
    assert computed[0].start == 0 and all(a.stop == b.start for a, b in pairwise(computed))


class Seen(torch.nn.Module):
    """A model that notes what it is given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, **given: Any) -> Any:
        self.calls.append(given)
        return self.model(**given)


@torch.no_grad()
def test_a_prompt_in_chunks_has_the_columns_and_positions_of_its_tokens() -> None:
    model, method = zoo.model("llama"), load_method("fp16")
    ids, mask = zoo.padded_batch([5, 9])
    cache = method.new_cache(model)
    seen = Seen(model)
    logits = prefill(seen, cache, ids, mask, 4)  # type: ignore[arg-type]
    assert [call["input_ids"].tolist() for call in seen.calls] == [
        ids[:, first : first + 4].tolist() for first in (0, 4, 8)
    ]
    assert [call["attention_mask"].shape[1] for call in seen.calls] == [4, 8, 9]
    assert torch.cat([call["position_ids"] for call in seen.calls], 1).tolist() == [
        [0, 0, 0, 0, 0, 1, 2, 3, 4],
        [*range(9)],
    ]
    assert all(call["logits_to_keep"] == 1 and call["use_cache"] for call in seen.calls)
    assert logits.shape == (2, zoo.VOCABULARY)
    whole, seen.calls = method.new_cache(model), []
    torch.testing.assert_close(prefill(seen, whole, ids[1:], None, 9), logits[1:], rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    (call,) = seen.calls
    assert call["attention_mask"] is None and call["position_ids"].tolist() == [[*range(9)]]
    method.detach(model)


def test_a_model_that_used_another_cache_is_found_out_by_the_number_of_tokens() -> None:
    cache = SimpleNamespace(get_seq_length=lambda: 7)
    passes.check_cache(cache, 7)  # type: ignore[arg-type]
    for expected in (6, 8):
        with pytest.raises(CacheError, match=f"contains 7 tokens, but {expected} went through the model"):
            passes.check_cache(cache, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", ["padded", "alone"])
@torch.no_grad()
def test_answers_of_any_length_are_scored_after_the_prompt(batch: str) -> None:
    """None, one token, several: padding behind shorter ones does not count, and the cache stays as it is."""
    model, method = zoo.model("llama"), load_method("fp16")
    lengths, answers = {"padded": ([20, 30, 26], [[], [5], [6, 7, 8]]), "alone": ([30], [[5, 9]])}[batch]
    ids, mask = zoo.padded_batch(lengths)
    given = mask if batch == "padded" else None
    cache = method.new_cache(model)
    logits = prefill(model, cache, ids, given)
    computed = answer_nll(model, cache, logits, answers, given)
    assert cache.get_seq_length() == 30
    assert [count for _, count in computed] == [len(answer) for answer in answers]
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        text = torch.cat([ids[row, -length:], torch.tensor(answer, dtype=torch.long)])[None]
        logs = torch.log_softmax(model(input_ids=text).logits[0], -1)
        wanted = -sum(float(logs[length - 1 + i, token]) for i, token in enumerate(answer))
        assert computed[row][0] == pytest.approx(wanted, rel=1e-5)
    assert answer_nll(model, cache, logits, [[]] * len(lengths), given) == [(0.0, 0)] * len(lengths)
    single = answer_nll(model, cache, logits, [[5]] * len(lengths), given)
    assert single[-1][0] == pytest.approx(-float(torch.log_softmax(logits[-1].float(), -1)[5]))
    method.detach(model)


@pytest.mark.parametrize("padded", [True, False])
@torch.inference_mode()
def test_groups_of_prompts_give_what_one_pass_gives(padded: bool) -> None:
    """Each group with its own rows of tokens, mask and positions, and all of them in the cache afterwards."""
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int4", residual=32)
    ids, mask = zoo.padded_batch([40, 33, 37] if padded else [40, 40, 40], seed=2)
    given = mask if padded else None
    caches = [method.new_cache(model, Prompts.from_batch(ids, mask)) for _ in range(2)]
    seen = Seen(model)
    whole = prefill(model, caches[0], ids, given, rows=None)
    parts = prefill(seen, caches[1], ids, given, rows=2)  # type: ignore[arg-type]
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert [call["input_ids"].tolist() for call in seen.calls] == [ids[:2].tolist(), ids[2:].tolist()]
    assert [call["position_ids"].tolist() for call in seen.calls] == [
        (mask.cumsum(-1) - 1).clamp(min=0)[rows].tolist() for rows in (slice(0, 2), slice(2, 3))
    ]
    assert [None if (m := call["attention_mask"]) is None else m.tolist() for call in seen.calls] == (
        [mask[:2].tolist(), mask[2:].tolist()] if padded else [None, None]
    )
    assert caches[1].get_seq_length() == 40 and caches[1].bill().used == caches[0].bill().used
    for mine, its in zip(caches[1].layers, caches[0].layers, strict=True):
        assert mine.sealed and [s.lengths for s in mine.segments()] == [s.lengths for s in its.segments()]
    method.detach(model)


@pytest.mark.parametrize("all_logits", [True, False])
@torch.inference_mode()
def test_a_model_that_takes_tokens_one_by_one_gets_each_with_its_own_columns(
    all_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, method = zoo.model("llama"), load_method("fp16")
    ids, mask = zoo.padded_batch([20, 14], seed=2)
    caches = [method.new_cache(model) for _ in range(2)]
    for cache in caches:
        prefill(model, cache, ids[:, :15], mask[:, :15])
    monkeypatch.setattr(KVCache, "one_by_one", property(lambda cache: cache is caches[1]))
    positions = (mask.cumsum(-1) - 1)[:, 15:]
    together = passes.forward(model, caches[0], ids[:, 15:], mask, positions, all_logits=all_logits)
    seen = Seen(model)
    single = passes.forward(seen, caches[1], ids[:, 15:], mask, positions, all_logits=all_logits)  # type: ignore[arg-type]
    assert single.shape == (2, 5 if all_logits else 1, zoo.VOCABULARY)
    torch.testing.assert_close(single, together, rtol=1e-4, atol=1e-5)
    assert [call["attention_mask"].shape[1] for call in seen.calls] == [16, 17, 18, 19, 20]
    assert [call["position_ids"].tolist() for call in seen.calls] == positions.T[..., None].tolist()
    method.detach(model)


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
    with passes.sliced(model, 100, 16) as count:
        assert count == 2
        torch.testing.assert_close(mlp(x), whole)
        assert torch.equal(mlp(x[:, :8]), mlp.forward(x[:, :8]))  # short enough: in one piece
    assert seen[0] == (2, 50, 32)
    assert [tuple(shape) for shape in seen[1:8]] == [(2, 8, 32)] * 6 + [(2, 2, 32)]
    assert mlp.forward is outer
    assert "forward" not in model.gpt_neox.layers[1].mlp.__dict__
    with passes.sliced(model, 16, 16) as count:
        assert count == 0
    with passes.sliced(model, passes.LONG) as count:
        assert count == 0
    with passes.sliced(model, passes.LONG + 1) as count:
        assert count == 2


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "phi3"])
def test_rope_by_slices_is_the_same_bit_for_bit(name):
    model = zoo.model(name)
    (file,) = (file for file in passes.model_modules(model) if hasattr(file, passes.ROPE))
    whole = getattr(file, passes.ROPE)
    q, k = (torch.randn(2, 50, heads, 64).transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 50, 64)
    with passes.sliced(model, 100, 16):
        assert getattr(file, passes.ROPE) is not whole
        computed = getattr(file, passes.ROPE)(q, k, cos, sin)
    assert getattr(file, passes.ROPE) is whole
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
    assert passes.treats_tokens_alone(Odd(up_proj=linear, act=torch.nn.SiLU(), dropout=torch.nn.Dropout(0.1)))
    assert not passes.treats_tokens_alone(Odd(experts=torch.nn.ModuleList([linear])))
    assert not passes.treats_tokens_alone(Odd(gate=Odd(router=linear)))
    assert not passes.treats_tokens_alone(Odd(conv=torch.nn.Conv1d(4, 4, 3)))  # its tokens see each other
    assert not passes.treats_tokens_alone(Odd(norm=torch.nn.LayerNorm(4)))


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

    run, x = passes._by_slices(forward, 8), torch.randn(2, 9, 4)
    assert torch.equal(run(x), 2 * x)
    assert [shape for shape, _ in calls] == [(2, 4, 4), (2, 4, 4), (2, 1, 4)]
    for given, more in (((x, 1), {}), ((x,), {"scale": 2}), ((x[0],), {}), ((x[:, :4],), {}), ((), {"x": x})):
        calls.clear()
        run(*given, **more)
        assert len(calls) == 1
    many = torch.randn(20, 3, 4)
    calls.clear()
    assert torch.equal(run(many), 2 * many) and len(calls) == 3  # a column at a time at least
    short = passes._by_slices(lambda x: x[:, :1], 8)
    assert torch.equal(short(x), x[:, :1])
    pair = passes._by_slices(lambda x: (x, x), 8)
    assert len(pair(x)) == 2


def test_rotations_of_other_layouts_are_computed_at_once():
    shapes = []

    def rotate(q, k, cos, sin, *more, **other):
        shapes.append(q.shape)
        return q * 1, k * 1

    run = passes._rotated_by_slices(rotate, 8)
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
    [(100, None, 0), (100, 99, 2), (100, 100, 0), (passes.SLICE + 1, "auto", 0), (passes.LONG + 1, "auto", 2)],
)
def test_passes_beyond_a_slice_are_sliced_and_put_back_after_an_error(tokens, chunk, sliced):
    model = zoo.model("llama")
    with pytest.raises(ValueError, match="inside"), passes.sliced(model, tokens, chunk) as count:
        assert count == sliced
        assert sum("forward" in module.__dict__ for module in model.modules()) == sliced
        raise ValueError("inside")
    assert not any("forward" in module.__dict__ for module in model.modules())
