"""Attention sinks (gpt-oss) and capped scores (Gemma-2): stock transformers' numbers in every phase of a cache."""

import importlib
import math

import pytest
import torch
from transformers import DynamicCache

from kvbench.attention import observe, prefill, reference, register
from kvbench.attention.logits import PLAIN, Logits, hands_over, logits_of
from kvbench.cache import Prompts
from kvbench.cache.progress import Options
from kvbench.decoding import generate, graphs
from kvbench.decoding.passes import prefill as prefilled
from kvbench.decoding.perplexity import forward_nll, simulated_nll
from kvbench.decoding.recorded import Step
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.errors import CacheError, ModelError
from kvbench.methods import load_method
from tests import zoo

LENGTHS = [97, 120, 110]
SINKS = torch.tensor([4.0, -1.0, 2.0, 0.5])


def eager_of(model):
    """Stock transformers' own attention of this architecture."""
    return importlib.import_module(type(model).__module__).eager_attention_forward


@torch.no_grad()
def fed(model, cache, ids, mask, pieces):
    """Logits ``[B, T, V]`` of a batch that comes in pieces."""
    outs, first = [], 0
    for count in pieces:
        last = first + count
        positions = (mask[:, :last].cumsum(-1) - 1).clamp(min=0)[:, first:]
        outs.append(
            model(
                input_ids=ids[:, first:last],
                attention_mask=mask[:, :last],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits
        )
        first = last
    return torch.cat(outs, 1)


@pytest.fixture(params=zoo.CAPPED)
def model(request):
    found = zoo.model(request.param)
    yield found
    load_method("fp16").detach(found)


@pytest.mark.parametrize("rows", [slice(1, 2), slice(0, 3)], ids=["alone", "padded batch"])
@pytest.mark.parametrize("chunk", [None, 90, 33])
def test_fp16_gives_stocks_logits(model, rows, chunk, monkeypatch):
    """Prompt at once and in chunks, single tokens and several at once; another layer has a sliding window."""
    ids, mask = (x[rows] for x in zoo.padded_batch(LENGTHS))
    pieces = [100, 1, 1, 4, 1, 13]
    stock = fed(model, DynamicCache(config=model.config), ids, mask, pieces)
    assert model.config._attn_implementation == "eager"
    cache = load_method("fp16").new_cache(model)
    if chunk:
        cache.open_prefill()
        first = [chunk] * (100 // chunk) + [100 % chunk]
        ours = fed(model, cache, ids[:, :100], mask[:, :100], first)
        cache.finalize()
        masks, tail = mask, ids[:, 100:]
        rest = []
        with torch.no_grad():
            for at, count in zip((0, 1, 2, 6, 7), pieces[1:], strict=True):
                last = 100 + at + count
                positions = (masks[:, :last].cumsum(-1) - 1)[:, last - count :]
                rest.append(
                    model(
                        input_ids=tail[:, at : at + count],
                        attention_mask=masks[:, :last],
                        position_ids=positions,
                        past_key_values=cache,
                    ).logits
                )
        ours = torch.cat([ours, *rest], 1)
    else:
        ours = fed(model, cache, ids, mask, pieces)
    real = mask.bool()
    torch.testing.assert_close(ours[real], stock[real], rtol=0, atol=1e-5)
    assert cache.progress.prefill.path == ("sdpa+sinks" if "GptOss" in type(model).__name__ else "capped")
    # without them the answer is another
    monkeypatch.setattr(register, "logits_of", lambda *asked: PLAIN)
    monkeypatch.setattr(prefill, "logits_of", lambda *asked: PLAIN)
    plain = fed(model, load_method("fp16").new_cache(model), ids, mask, pieces)
    assert (plain[real] - stock[real]).abs().max() > 0.01


def test_other_caches_and_no_cache_run_as_stock_does_while_attached(model):
    ids, mask = zoo.padded_batch(LENGTHS)
    pieces, real = [100, 1, 19], mask.bool()
    stock = fed(model, DynamicCache(config=model.config), ids, mask, pieces)
    load_method("fp16").new_cache(model)
    ours = fed(model, DynamicCache(config=model.config), ids, mask, pieces)
    torch.testing.assert_close(ours[real], stock[real], rtol=0, atol=1e-5)


METHODS = {
    "fp16": ("fp16", {}),
    "kivi": ("kivi", {"quantizer": "int4", "residual": 32}),
    "kivi, int2 and sinks": ("kivi", {"quantizer": "int2", "residual": 64, "sinks": 3}),
    "logquant": ("logquant", {"window": 12}),
    "partial_logquant": ("partial_logquant", {"window": 12}),
    "cocktail": ("cocktail", {"encoder": "bm25", "chunk_size": 8}),
    "cocktail, in place": ("cocktail", {"encoder": "bm25", "chunk_size": 8, "reorder": False}),
    "atom": ("atom", {}),
    "atom, stored prompt": ("atom", {"prefill": "quantized"}),
    "streamingllm": ("streamingllm", {"budget": 48, "position": "original"}),
    "snapkv": ("snapkv", {"budget": 48, "window": 8}),
    "h2o": ("h2o", {"budget": 48}),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_step_is_stocks_attention_over_what_is_stored(model, name, monkeypatch):
    """The model's own eager attention, with its caps and sinks, over the dequantized slots of each row."""
    base, settings = METHODS[name]
    method, eager, real, checked = load_method(base, **settings), eager_of(model), reference.attend_reference, []

    def both(module, layer, query, mask, scaling, logits):
        out = real(module, layer, query, mask, scaling, logits)
        for row in range(layer.batch):
            one = slice(row, row + 1)
            k, v = (
                torch.cat([s.read(one, 0, s.lengths[row], torch.float32) for s in store.segments], 2)
                for store in layer.stores()
            )
            columns = layer.positions(row)
            columns = columns.expand(layer.heads, -1) if columns.ndim == 1 else columns
            query_at = torch.arange(layer.seen - query.shape[2], layer.seen)
            seen = columns[:, None, :] <= query_at[:, None]
            if getattr(module, "sliding_window", None):
                seen &= columns[:, None, :] > query_at[:, None] - module.sliding_window
            hidden = torch.zeros(seen.shape).masked_fill(~seen, -1e30).repeat_interleave(2, 0)[None]
            extra = {"softcap": module.attn_logit_softcapping} if hasattr(module, "attn_logit_softcapping") else {}
            wanted = eager(module, query[one], k, v, hidden, scaling=scaling, **extra)[0]
            torch.testing.assert_close(out[one], wanted, rtol=1e-4, atol=1e-5)
        checked.append(layer.index)
        return out

    monkeypatch.setattr(reference, "attend_reference", both)
    ids, mask = zoo.padded_batch(LENGTHS)
    told = Prompts.from_batch(ids[:, :100], mask[:, :100], decode=lambda ids: " ".join(map(str, ids)))
    cache = method.new_cache(model, told)
    cache.options = Options(kernels="reference")
    fed(model, cache, ids, mask, [100, *[1] * 8, 3, *[1] * 9])
    assert checked.count(1) >= 18
    assert cache.reads_packed == any(segment.packed for layer in cache.layers for segment in layer.segments())


@pytest.mark.parametrize("name", ["kivi", "logquant", "cocktail", "streamingllm", "snapkv", "h2o", "quantspec"])
def test_a_padded_row_equals_the_row_alone_and_chunks_equal_one_shot(model, name):
    settings = {"kivi": METHODS["kivi"][1], "cocktail": METHODS["cocktail"][1], "snapkv": METHODS["snapkv"][1]}
    settings |= {"streamingllm": METHODS["streamingllm"][1], "h2o": METHODS["h2o"][1], "quantspec": {"gamma": 0}}
    method = load_method(name, **settings.get(name, {}))
    ids, mask = zoo.padded_batch(LENGTHS)

    def answer(rows, width, **more):
        part, seen = ids[rows, -width:], mask[rows, -width:]
        cache = method.new_cache(model, Prompts.from_batch(part, seen, decode=lambda ids: " ".join(map(str, ids))))
        return generate(model, cache, part, seen, max_new_tokens=12, answer_ids=[[5, 9]] * len(part), **more)

    together = answer(slice(0, 3), 120)
    chunked = answer(slice(0, 3), 120, prefill_chunk=50)
    assert chunked.tokens == together.tokens
    for row, length in enumerate(LENGTHS):
        alone = answer(slice(row, row + 1), length)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.answer_nll[0][0] == pytest.approx(together.answer_nll[row][0], rel=1e-4)
        assert chunked.answer_nll[row][0] == pytest.approx(together.answer_nll[row][0], rel=1e-4)


@pytest.mark.parametrize(
    ("pieces", "most"), [([110], 1 << 22), ([110], 1), ([50, 31, 29], 9000), ([60, 3, 30, 17], 1 << 22)]
)
@pytest.mark.parametrize(("name", "last"), [("snapkv", 40), ("h2o", 110)])
def test_methods_see_the_probabilities_that_the_model_uses(model, name, last, pieces, most, monkeypatch):
    """Whole and in chunks, some shorter than the window, and with few scores at a time, down to one query of a KV head.

    Against the weights that stock's eager attention returns.
    """
    monkeypatch.setitem(observe.SCORES, "cpu", most)
    settings = {"snapkv": {"budget": 100, "window": last}, "h2o": {"budget": 100}}[name]
    method, seen = load_method(name, **settings), []
    place = type(method).place
    monkeypatch.setattr(type(method), "place", lambda self, *args: (seen.append(args[-1]), place(self, *args))[1])
    ids, mask = zoo.padded_batch([100, 110])
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    cache = method.new_cache(model, Prompts.from_batch(ids, mask))
    # the pieces of one prompt: position ids do not matter here, as left padding shifts a row's queries and keys alike
    first = 0
    with torch.no_grad():
        for count in pieces:
            model(
                input_ids=ids[:, first : first + count],
                attention_mask=mask[:, : first + count],
                past_key_values=cache,
            )
            first += count
    assert len(seen) == 4  # two layers of two rows
    for index, found in enumerate(seen):
        layer, row, start = index // 2, index % 2, [10, 0][index % 2]
        wanted = stock[layer][row : row + 1, :, start:, start:]
        assert found.shape[-1] in (
            wanted.shape[-1],
            cache.layers[layer].window or 0,
            (cache.layers[layer].window or 1) - 1,
        )
        wanted = wanted[..., -found.shape[-1] :]  # a sliding layer places what its window shows
        if name == "snapkv":
            torch.testing.assert_close(found, wanted[:, :, -last:], rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(found, wanted.sum(2, keepdim=True), rtol=1e-4, atol=1e-4)


def test_a_long_prompt_never_has_all_its_scores_at_once(monkeypatch):
    """Tiles of the size that is allowed, over heads and queries; grouped heads, masks of either kind, none at all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 70, 16, generator=generator) for heads in (6, 3, 3))
    sinks = torch.tensor([3.0, -2.0, 0.0, 1.0, 5.0, -4.0])
    hidden = torch.rand(2, 1, 70, 70, generator=generator) < 0.3
    hidden |= torch.ones(70, 70, dtype=torch.bool).triu(1)
    per_head = hidden.expand(2, 6, 70, 70) & (torch.rand(2, 6, 70, 70, generator=generator) < 0.9)
    hidden &= ~torch.eye(70, dtype=torch.bool)
    per_head = per_head & ~torch.eye(70, dtype=torch.bool)
    softmax, sizes = torch.softmax, []
    monkeypatch.setattr(torch, "softmax", lambda x, dim: (sizes.append(x.numel()), softmax(x, dim))[1])
    for mask in (None, ~hidden, torch.zeros(hidden.shape).masked_fill(hidden, -1e30), ~per_head):
        for logits in (Logits(2.0, sinks), Logits(2.0), Logits(None, sinks)):
            scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
            if logits.softcap:
                scores = logits.softcap * torch.tanh(scores / logits.softcap)
            if mask is None:
                scores = scores.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -math.inf)
            else:
                scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            top = scores.amax(-1, keepdim=True).clamp(min=-1e20)
            extra = 0.0 if logits.sinks is None else torch.exp(sinks.view(1, 6, 1, 1) - top)
            weights = torch.exp(scores - top)
            wanted = (weights / (weights.sum(-1, keepdim=True) + extra)) @ v.repeat_interleave(2, 1)
            wanted = wanted.transpose(1, 2).nan_to_num(0.0)
            for most in (1 << 20, 3000, 100):
                monkeypatch.setitem(prefill.SCORES, "cpu", most)
                sizes.clear()
                found = prefill.attend_capped(q, k, v, mask, 0.3, logits)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
                # a query of a KV head of all rows is the least; its sink is one score more
                assert max(sizes) <= max(most, 2 * 2 * 70) * 71 // 70
                assert (len(sizes) > 1) == (most < 1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", [0.125, 1.0])
def test_sinks_are_exact_as_keys_of_sdpa(dtype, scaling):
    """In half precision too, where a sink is three channels; the last queries of more keys, under a mask."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, n, 64, generator=generator).to(dtype) for h, n in ((4, 9), (2, 30), (2, 30)))
    sinks = torch.tensor([3.14159, -2.71828, 11.011, 300.0])
    mask = torch.ones(9, 30, dtype=torch.bool).tril(21)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    found = prefill.attend_exact(module, q, k, v, mask, scaling, Logits(None, sinks))
    scores = (q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2) * scaling).masked_fill(~mask, -math.inf)
    weights = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(1, 4, 9, 1)], -1).softmax(-1)[..., :-1]
    wanted = (weights @ v.float().repeat_interleave(2, 1)).transpose(1, 2)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (found.float() - wanted).norm() < tolerance * wanted.norm()
    assert found.shape == (1, 9, 4, 64) and found[:, :, 3].abs().max() == 0


@pytest.mark.parametrize("logits", [Logits(4.0), Logits(None, SINKS), Logits(4.0, SINKS)])
def test_long_padded_prompts_need_no_mask(logits, monkeypatch):
    """Padding that stands for the mask gives what the mask gives, row by row."""
    monkeypatch.setattr(prefill, "MASK", 0)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (2 * torch.randn(2, heads, 40, 16, generator=generator) for heads in (4, 2, 2))
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, :13] = False
    module, kwargs = torch.nn.Module(), {"softcap": logits.softcap, "s_aux": logits.sinks}
    module.num_key_value_groups = 2
    short, name = prefill.attend_prompt(module, q, k, v, real, 0.2, kwargs)
    full = torch.ones(40, 40, dtype=torch.bool).tril() & real[:, None, None, :]
    for first, last in ((0, 40), (0, 9), (11, 30), (39, 40)):
        assert torch.equal(prefill.rows_of(real, first, last, 40), full[:, :, first:last])
        assert torch.equal(prefill.rows_of(full, first, last, 40), full[:, :, first:last])
    masked, _ = prefill.attend_prompt(module, q, k, v, full, 0.2, kwargs)
    torch.testing.assert_close(short[real], masked[real], rtol=1e-5, atol=1e-6)
    assert name == ("capped" if logits.softcap else "sdpa+sinks")
    none, _ = prefill.attend_prompt(module, q[1:], k[1:], v[1:], None, 0.2, kwargs)
    torch.testing.assert_close(none, masked[1:], rtol=1e-5, atol=1e-6)


def test_a_simulated_window_is_scored_as_stock_scores_it(model):
    ids, _ = zoo.padded_batch([80])
    wanted = forward_nll(model, ids, 10)
    found = simulated_nll(model, load_method("fp16").new_cache(model), ids, 10)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", zoo.CAPPED)
@pytest.mark.parametrize("base", ["fp16", "kivi"])
@torch.inference_mode()
def test_recorded_steps_are_the_eager_ones(name, base, monkeypatch):
    """Layers whose attention is full; the oracle of recorded steps reads the tables that kernels read."""
    from kvbench.attention import fused, phases
    from tests.decoding.recorded_oracle import Oracle, part

    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))
    made = zoo.capped(name, layer_types=["full_attention"] * 2).eval()
    method = load_method(base, **METHODS[base][1])
    ids, mask = zoo.padded_batch([100, 93], seed=3)
    new = 40
    cache = method.new_cache(made, max_length=150)
    token, longer, logits = prefilled(made, cache, ids, mask).argmax(-1), mask, []
    tokens = [token]
    for _ in range(new - 1):
        longer = torch.nn.functional.pad(longer, (0, 1), value=1)
        positions = longer.sum(-1, keepdim=True) - 1
        out = made(tokens[-1][:, None], attention_mask=longer, position_ids=positions, past_key_values=cache)
        logits.append(out.logits[:, -1])
        tokens.append(logits[-1].argmax(-1))

    cache = method.new_cache(made, max_length=150)
    token, sampling, caught = prefilled(made, cache, ids, mask).argmax(-1), Sampling(), []
    step = Step(
        made, cache, token, mask.sum(-1), sampling, graphs.draw_step_uniforms(sampling, sampling.generators(2), new - 1)
    )
    forward = step.forward
    monkeypatch.setattr(step, "forward", lambda **keep: (caught.append(forward(**keep)), caught[-1])[1])
    graph = graphs.Captured(step, capture=False)
    graph.first()
    stopping = Stopping(2, (), (), None)
    graphs.decode_captured(graph, token, stopping, new)
    assert stopping.tokens == torch.stack(tokens, 1).tolist()
    assert cache.path == "oracle"
    torch.testing.assert_close(caught[-1][:, -1], logits[-1], rtol=1e-4, atol=1e-4)
    method.detach(made)


def test_as_many_sinks_as_query_heads():
    query = torch.zeros(1, 4, 1, 8)
    module = torch.nn.Linear(1, 1)
    with pytest.raises(CacheError, match="Linear has 3 attention sinks for 4 query heads"):
        logits_of(module, query, {"s_aux": torch.zeros(3)})
    assert logits_of(module, query, {"s_aux": None, "softcap": None, "sliding_window": 3}) is PLAIN
    found = logits_of(module, query, {"s_aux": SINKS.view(1, 4, 1, 1), "softcap": 30})
    assert found.softcap == 30.0 and torch.equal(found.sinks, SINKS)
    assert found.sinks_of(slice(1, 3)).sinks.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("spread", [False, True])
def test_arguments_are_found_among_others_and_alone_in_a_call(spread):
    """Byte code holds the names of a call's keywords in a tuple, and alone where ``**kwargs`` follow them."""

    class Asking(torch.nn.Module):
        if spread:

            def forward(self, x, **kwargs):
                return torch.nn.functional.softmax(x, dim=0, dtype=torch.float32, **kwargs)
        else:

            def forward(self, x):
                return torch.nn.functional.softmax(x, dim=0, dtype=torch.float32)

    assert hands_over(Asking, "dim") and hands_over(Asking, "dtype")
    assert not hands_over(Asking, "_stacklevel")


def test_what_no_store_can_serve_is_refused_before_the_first_token(monkeypatch):
    """A model that hands a bias of positions to its attention; the reason names it."""
    llama = zoo.model("llama")
    attention = type(llama.model.layers[0].self_attn)

    def forward(self, hidden_states, **kwargs):
        return attention_of(self, hidden_states, position_bias=None, **kwargs)

    def attention_of(module, *args, **kwargs):
        raise AssertionError("no token is read")

    load_method("fp16").detach(llama)  # the model is shared between tests
    assert not hands_over(attention, "position_bias")
    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(ModelError, match="LlamaForCausalLM hands 'position_bias' to its attention"):
        load_method("fp16").new_cache(llama)
    assert llama.config._attn_implementation == "sdpa"


def test_capped_scores_are_told_from_sinks_by_their_own_configuration():
    """A Gemma-2 without its cap runs on SDPA like any other model."""
    made = zoo.capped("gemma2", attn_logit_softcapping=None).eval()
    ids, mask = zoo.padded_batch([60])
    method = load_method("fp16")
    cache = method.new_cache(made)
    fed(made, cache, ids, mask, [50, 10])
    method.detach(made)
    assert cache.path == "sdpa" and cache.progress.prefill.path == "sdpa"


def test_probabilities_of_a_row_sum_to_what_its_sink_leaves():
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, heads, 12, 8, generator=generator) for heads in (4, 2))
    found = observe.probabilities(q, k, None, 0.5, 0, Logits(1.5, SINKS))
    assert bool((found.sum(-1) < 1).all())
    scores = torch.tanh(q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.5 / 1.5) * 1.5
    scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -math.inf)
    weights = torch.cat([scores, SINKS.view(1, 4, 1, 1).expand(1, 4, 12, 1)], -1).softmax(-1)
    torch.testing.assert_close(found, weights[..., :-1])
    torch.testing.assert_close(1 - found.sum(-1), weights[..., -1])


@pytest.mark.parametrize("logits", [Logits(2.0), Logits(None, SINKS), Logits(2.0, SINKS)])
@pytest.mark.parametrize("said", [True, False])
def test_attention_in_both_directions_stays_so(said, logits, monkeypatch):
    """Without a mask, a module or a call that is not causal sees all tokens."""
    monkeypatch.setitem(prefill.SCORES, "cpu", 100)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 11, 16, generator=generator) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, said
    found = prefill.attend_exact(module, q, k, v, None, 0.3, logits, {"is_causal": False} if said else {})
    everything = torch.ones(1, 1, 11, 11, dtype=torch.bool)
    wanted = prefill.attend_exact(module, q, k, v, everything, 0.3, logits)
    torch.testing.assert_close(found, wanted)
    module.is_causal = True
    assert not torch.allclose(prefill.attend_exact(module, q, k, v, None, 0.3, logits), wanted, atol=1e-2)
