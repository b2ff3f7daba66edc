"""Passes over many known tokens: each query sees each token in the form that single steps would have shown it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.attention import foreseen
from kvbench.attention.cpu import build, chunk_kernel
from kvbench.attention.foreseen import biased, planned
from kvbench.attention.logits import Logits
from kvbench.cache.policy import NEVER
from kvbench.cache.progress import Options
from kvbench.cache.segments.packed import PackedSegment
from kvbench.decoding.passes import forward, prefill
from kvbench.methods import load_method
from tests import zoo

LIKE = torch.zeros(0)


def forms(plan, columns, first, count, start):
    """For each query the tokens that it sees: (text index, key's form, value's form), `old` or `new`."""
    old, new = columns
    base = [int(c) - start for c in old] + list(range(first - start, first + count - start))
    after = [int(c) - start for c in new[plan.again[0] : plan.again[1]]]
    names = [(token, "old") for token in base] + [(token, "new") for token in after]
    index = [range(len(base)) if chosen is None else chosen.tolist() for chosen in (plan.keys, plan.values)]
    seen = []
    for row in plan.bias[0, 0].tolist():
        shown = []
        for at, value in enumerate(row):
            if value == 0:
                key, val = names[index[0][at]], names[index[1][at]]
                assert key[0] == val[0]
                shown.append((key[0], key[1], val[1]))
        seen.append(sorted(shown))
    return seen


def expected(times, first, count, start):
    """Text index by text index: the form is new once the token has been packed, if that is during the pass."""
    begin = first - start
    seen = []
    for turn in range(begin, begin + count):
        form = (
            ["new" if begin < t <= turn else "old" for t in times[0]],
            ["new" if begin < t <= turn else "old" for t in times[1]],
        )
        seen.append([(token, form[0][token], form[1][token]) for token in range(turn + 1)])
    return seen


@pytest.mark.parametrize("start", [0, 3])
def test_every_query_sees_every_earlier_token_once_in_the_form_of_its_turn(start) -> None:
    """Keys in blocks of 4 and values one by one, as with KIVI; some were packed before the pass."""
    first, count = start + 6, 7
    n = first + count - start
    keys = torch.tensor([4 * (token // 4 + 1) for token in range(n)])
    values = torch.tensor([token + 5 for token in range(n)])
    columns = torch.arange(start, first), torch.arange(start, first + count)
    plan = planned(columns, (keys, values), first, count, start, None, LIKE)
    assert forms(plan, columns, first, count, start) == expected((keys.tolist(), values.tolist()), first, count, start)


def test_a_token_that_is_dropped_is_seen_until_then() -> None:
    """After the pass the stores hold tokens 0, 5 and 6: the others have no second form."""
    times = torch.tensor([NEVER, 4, 5, 5, 6, NEVER, NEVER])
    columns = torch.arange(3), torch.tensor([0, 5, 6])
    plan = planned(columns, (times, times), 3, 4, 0, None, LIKE)
    assert plan.keys is None and plan.again == (0, 0)
    seen = [[token for token, *_ in shown] for shown in forms(plan, columns, 3, 4, 0)]
    assert seen == [[0, 1, 2, 3], [0, 2, 3, 4], [0, 4, 5], [0, 5, 6]]


def test_what_does_not_change_needs_no_second_form() -> None:
    never = torch.full((5,), NEVER)
    columns = torch.arange(3), torch.arange(5)
    plan = planned(columns, (never, never), 3, 2, 0, None, LIKE)
    assert plan.keys is None and plan.values is None and plan.bias.shape == (1, 1, 2, 5)


def test_a_mask_hides_more() -> None:
    never = torch.full((6,), NEVER)
    mask = torch.ones(2, 1, 2, 6, dtype=torch.bool)
    mask[1, :, :, 2] = False
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, additive):
        plan = planned((torch.arange(4), torch.arange(6)), (never, never), 4, 2, 0, given, LIKE)
        shown = (plan.bias == 0)[:, 0]
        assert shown[0].tolist() == [[True] * 5 + [False], [True] * 6]
        assert shown[1].tolist() == [[True, True, False, True, True, False], [True, True, False, True, True, True]]


@pytest.mark.parametrize("logits", [Logits(), Logits(softcap=2.0), Logits(sinks=torch.linspace(-1, 2, 4))])
def test_attention_with_a_bias_is_the_softmax(logits) -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    visible = torch.rand(1, 1, 3, 5) > 0.4
    visible[..., 0] = True
    bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    found = biased(query, keys, values, bias, 0.3, logits)
    for row in range(2):
        for head in range(4):
            scores = logits.capped(0.3 * query[row, head] @ keys[row, head // 2].T)
            scores = scores.masked_fill(~visible[0, 0], float("-inf"))
            if logits.sinks is not None:
                scores = torch.cat([scores, logits.sinks[head].expand(3, 1)], -1)
            want = torch.softmax(scores, -1)[:, :5] @ values[row, head // 2]
            assert torch.allclose(found[row, :, head], want, atol=1e-6)


SETTINGS = {
    "kivi": ("kivi", {"quantizer": "int2", "residual": 32, "sinks": 2}),
    "kivi, dropping": ("kivi", {"residual": 32, "evict": True}),
    "atom, before RoPE": ("atom", {"rope": "pre"}),
    "logquant": ("logquant", {"quantizer": "int2", "window": 21, "sinks": 3}),
    "logquant, dropping": ("logquant", {"window": 16, "evict": True}),
    "partial_logquant": ("partial_logquant", {"quantizer": "int4", "window": 16}),
    "partial_logquant, wide": ("partial_logquant", {"quantizer": "int4", "window": 32}),
}


@pytest.mark.parametrize(
    ("name", "architecture"), [*((name, "llama") for name in SETTINGS), ("kivi", "gemma2"), ("kivi", "gpt_oss")]
)
def test_passes_over_padded_rows_give_what_steps_give(monkeypatch, name, architecture) -> None:
    """Logits of every token, and all that the cache then holds and has reserved; also with softcaps and sinks."""
    kind, options = SETTINGS[name]
    method, model = load_method(kind, **options), zoo.model(architecture)
    ids, mask = zoo.padded_batch([84, 77], seed=3)
    prompt, width, served = 30, 84, []
    attend = foreseen.attend_foreseen
    monkeypatch.setattr(foreseen, "attend_foreseen", lambda *args: served.append(attend(*args)) or served[-1])

    def logits(size: int):
        cache = method.new_cache(model, max_length=width)
        cache.progress.span = 1
        with torch.inference_mode():
            parts = [prefill(model, cache, ids[:, :prompt], mask[:, :prompt])[:, None]]
            for place in range(prompt, width, size):
                last = min(place + size, width)
                positions = mask.cumsum(-1)[:, place:last] - 1
                step = forward(model, cache, ids[:, place:last], mask[:, :last], positions, all_logits=True)
                parts.append(step)
        bills = [cache.bill(row) for row in range(2)]
        return torch.cat(parts, 1), bills, [layer.positions(row).tolist() for layer in cache.layers for row in (0, 1)]

    steps = logits(1)
    assert not served
    passes = logits(23)
    assert served and all(out is not None for out in served)
    assert torch.allclose(steps[0], passes[0], atol=2e-5)
    assert steps[1:] == passes[1:]
    method.detach(model)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_layers_that_drop_tokens_and_layers_that_do_not_share_no_plan(monkeypatch, kernels) -> None:
    """Before the pass, when nothing has been dropped yet, the stores of both have the same shape."""
    method, model = load_method("kivi", residual=32, evict=True), zoo.model("llama")
    monkeypatch.setattr(type(method), "exact_layers", 1)
    ids, logits = zoo.padded_batch([84], seed=3)[0], {}
    for size in (1, 23):
        cache = method.new_cache(model)
        cache.options, cache.progress.span = Options(kernels=kernels), 1
        with torch.inference_mode():
            prefill(model, cache, ids[:, :30], None)
            parts = [
                forward(model, cache, ids[:, places], None, places[None], all_logits=True)
                for places in torch.arange(30, 84).split(size)
            ]
        logits[size] = torch.cat(parts, 1)
        assert len({layer.length(slice(0, 1)) for layer in cache.kv_layers}) == 2
    assert torch.allclose(logits[1], logits[23], atol=2e-5)


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_sums_between_two_calls_are_in_fp32_whatever_torchs_default_dtype(monkeypatch) -> None:
    """The kernel writes fp32, for which a buffer of torch's default dtype might be too small."""
    method, model, dtypes = load_method("kivi", quantizer="int2"), zoo.model("llama"), []
    run = chunk_kernel.run_chunk

    def watched(*args, state, **kwargs):
        dtypes.append(state.dtype)
        return run(*args, state=state.to(torch.float32), **kwargs)

    monkeypatch.setattr(chunk_kernel, "run_chunk", watched)
    cache, ids = method.new_cache(model), zoo.padded_batch([60], seed=3)[0]
    cache.progress.span = 1
    with torch.inference_mode():
        prefill(model, cache, ids[:, :40], None)
        attend = foreseen.attend_foreseen

        def in_halves(*args):
            torch.set_default_dtype(torch.bfloat16)
            try:
                return attend(*args)
            finally:
                torch.set_default_dtype(torch.float32)

        monkeypatch.setattr(foreseen, "attend_foreseen", in_halves)
        forward(model, cache, ids[:, 40:], None, torch.arange(40, 60)[None], all_logits=True)
    assert set(dtypes) == {torch.float32}


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() == x.numel() * x.element_size():
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
@pytest.mark.parametrize("name", ["kivi", "logquant", "partial_logquant, wide"])
def test_the_cpu_kernel_dequantizes_no_layer(monkeypatch, name) -> None:
    """In a pass after many tokens, nothing is as large as a layer's keys, and no segment is read in plain torch."""
    kind, options = SETTINGS[name]
    method, model = load_method(kind, **options), zoo.model("llama")
    ids = zoo.padded_batch([600], seed=3)[0]
    found = {}
    for kernels in ("reference", "auto"):
        cache, largest = method.new_cache(model), Largest()
        cache.options = Options(kernels=kernels)
        cache.progress.span = 1
        attend = foreseen.attend_foreseen

        def watched(*args, attend=attend, largest=largest):
            with largest:
                return attend(*args)

        monkeypatch.setattr(foreseen, "attend_foreseen", watched)
        with torch.inference_mode():
            prefill(model, cache, ids[:, :580], None)
            if kernels == "auto":
                monkeypatch.setattr(PackedSegment, "read", lambda *args: pytest.fail("a segment was dequantized"))
            positions = torch.arange(580, 600)[None]
            found[kernels] = forward(model, cache, ids[:, 580:], None, positions, all_logits=True)
        monkeypatch.setattr(foreseen, "attend_foreseen", attend)
        layer = cache.layers[0]
        stored = layer.length(slice(0, 1)) * layer.heads * layer.key_dim
        assert (largest.elements < stored) == (kernels == "auto")
        assert any("(forms by turn)" in path and path.startswith("cpu") for path in layer.paths) == (kernels == "auto")
    assert torch.allclose(found["auto"], found["reference"], atol=2e-5)
