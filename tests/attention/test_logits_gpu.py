"""On a GPU: both decode kernels with capped scores and sinks, alone, in a model, and in captured steps."""

from dataclasses import replace

import pytest
import torch

from kvbench.attention import check_cases, fused, reference
from kvbench.attention.check_cases import Case, channel, one_packed_segment, token
from kvbench.attention.cuda import decode as cuda_decode
from kvbench.attention.logits import Logits
from kvbench.attention.synthetic import dequantized_attention, relative_error
from kvbench.cache import Prompts
from kvbench.cache.progress import Options
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.forced import Forced
from kvbench.decoding.graphs import Captured
from kvbench.methods import load_method
from tests import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 4.5e-3}
#: softcap (of scores that vary by 1 to 2), whether there are sinks, and their dtype (None: the query's)
LOGITS = {
    "softcap": (2.0, False, None),
    "sinks": (None, True, None),
    "fp32 sinks": (None, True, torch.float32),
    "both": (2.0, True, None),
    "a wide cap": (50.0, True, torch.float32),
}
TIERS = {
    "int4": check_cases.INT4,
    "int2 G32": check_cases.INT2_G32,
    "int4 G64": one_packed_segment(channel(4, 64), token(4, 64)),
    "hierarchical": check_cases.INT8,
    "atom": one_packed_segment(token(4, 128, "atom"), token(4, 128, "atom")),
    "mix": check_cases.MIX,
    "exact": (),
    "int2 W42": check_cases.LOGQUANT_W42,
}


def kernel(name):
    if name == "cuda":
        return cuda_decode
    module = pytest.importorskip("kvbench.attention.triton.decode")
    if module.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1: this process interprets kernels on the CPU")
    return module


def with_logits(case, name):
    """A query and a random layer whose model caps its scores, or has sinks near its scores' maximum and far off."""
    softcap, sinks, dtype = LOGITS[name]
    query, work = case.query(), case.work(0)
    held = torch.linspace(-8, 12, query.shape[1], device=query.device).to(dtype or query.dtype) if sinks else None
    work.logits = Logits(softcap, held)
    return query, work


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("shape", ["8b", "7b"])
def test_formats(shape, tiers, logits, kernels):
    """One token and five, a batch of two lengths, fp16 and bf16; without caps and sinks the answer is another."""
    module = kernel(kernels)
    for queries, dtype in ((1, torch.float16), (5, torch.bfloat16)):
        case = Case("", shape, TIERS[tiers], (1491, 700), (37, 90), queries, dtype)
        query, work = with_logits(case, logits)
        reason = module.refuses(query, work)
        if reason is not None:
            assert kernels == "cuda" and tiers == "int2 W42", reason
            continue
        scaling = query.shape[-1] ** -0.5
        wanted = dequantized_attention(query, work, scaling)
        assert relative_error(module.attend(query, work, scaling), wanted) < TOLERANCE[dtype]
        plain = dequantized_attention(query, replace(work, logits=Logits()), scaling)
        assert logits == "a wide cap" or relative_error(plain, wanted) > 0.02


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
@pytest.mark.parametrize("logits", ["sinks", "both"])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_sink_is_counted_once_however_many_ctas_share_a_head(queries, logits, splits):
    case = Case("", "8b", check_cases.INT4, (9001,), (37, 90), queries)
    query, work = with_logits(case, logits)
    found = cuda_decode.attend(query, work, 0.1, splits=splits)
    assert relative_error(found, dequantized_attention(query, work, 0.1)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("context", [100, 3000, 60000])
def test_merges_of_any_number_of_parts(context, kernels):
    """One program a head, a merge by the last of a few, a merge by a second kernel."""
    module = kernel(kernels)
    for shape, batch in (("8b", 1), ("7b", 8), ("tiny", 1)):
        tiers = one_packed_segment(channel(4, 64), token(4, 64))
        query, work = with_logits(Case("", shape, tiers, (context,) * batch), "both")
        scaling = query.shape[-1] ** -0.5
        one = slice(0, 2)
        wanted = dequantized_attention(query, work, scaling, one)
        assert (
            relative_error(module.attend(query, work, scaling)[:, :, : wanted.shape[2]], wanted)
            < TOLERANCE[torch.float16]
        )


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_sinks_far_above_and_below_all_scores_give_finite_numbers(kernels):
    module = kernel(kernels)
    query, work = Case("", "8b", check_cases.INT4, (1491,)).query(), Case("", "8b", check_cases.INT4, (1491,)).work(0)
    for size in (-6e4, -300.0, 300.0, 6e4):
        work.logits = Logits(None, torch.full((query.shape[1],), size, device="cuda"))
        found, wanted = module.attend(query, work, 0.1), dequantized_attention(query, work, 0.1)
        assert bool(torch.isfinite(found).all())
        assert relative_error(found, wanted) < 3e-3 if size < 0 else float(found.abs().max()) == 0


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("logits", LOGITS)
def test_a_captured_graph_reads_the_sinks_where_they_are(logits, kernels):
    module = kernel(kernels)
    query, work = with_logits(Case("", "8b", check_cases.INT4, (1491, 700), (37, 90)), logits)
    module.attend(query, work, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.attend(query, work, 0.1)
    for step in range(3):
        query.copy_(torch.randn_like(query))
        if work.logits.sinks is not None:
            work.logits.sinks.add_(step)
        graph.replay()
        assert relative_error(out, dequantized_attention(query, work, 0.1)) < 3e-3


METHODS = {
    "fp16": ("fp16", {}),
    "kivi": ("kivi", {"quantizer": "int4", "residual": 32}),
    "kivi int2": ("kivi", {"quantizer": "int2", "residual": 32, "sinks": 3}),
    "logquant": ("logquant", {"window": 64}),
    "cocktail": ("cocktail", {"encoder": "bm25"}),
    "atom": ("atom", {}),
}


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("method_name", METHODS)
@pytest.mark.parametrize("name", zoo.CAPPED)
def test_a_kernel_gives_what_the_reference_path_gives(name, method_name, count, kernels, monkeypatch):
    """Whole models, padded batches; of a layer with a sliding window single tokens, if their order is kept.

    LogQuant keeps the order there: the sliding window of 40 tokens is shorter than its own, so it packs none of them.
    """
    kernel(kernels)
    if method_name == "cocktail":
        pytest.importorskip("bm25s")
    base, options = METHODS[method_name]
    method, served, real = load_method(base, **options), [], fused.attend_fused
    for dtype, lengths in ((torch.bfloat16, [700]), (torch.float16, [431, 620, 431])):
        model = zoo.capped(name).to(dtype).eval().cuda()

        def both(layer, query, mask, scaling, logits):
            out = real(layer, query, mask, scaling, logits)
            assert not logits.plain
            if out is not None:
                expected = reference.attend_reference(None, layer, query.float(), mask, scaling, logits)
                served.append((layer.index, float((out - expected).norm() / expected.norm())))
            return out

        monkeypatch.setattr(fused, "attend_fused", both)
        try:
            ids, mask = (x.cuda() for x in zoo.padded_batch(lengths))
            cache = method.new_cache(model, Prompts.from_batch(ids, mask, decode=lambda row: " ".join(map(str, row))))
            cache.options = Options(kernels=kernels)
            with torch.no_grad():
                model(ids, attention_mask=mask, past_key_values=cache)
                for step in range(6):
                    new = (ids[:, -count:] * 7 + step) % 90 + 3
                    mask = torch.cat([mask, torch.ones_like(new)], 1)
                    model(new, attention_mask=mask, past_key_values=cache)
        finally:
            method.detach(model)
            monkeypatch.setattr(fused, "attend_fused", real)
    assert sum(index == 1 for index, _ in served) == 12
    assert sum(index == 0 for index, _ in served) == (12 if count == 1 and base != "cocktail" else 0)
    assert max(wrong for _, wrong in served) < 4.5e-3


@pytest.mark.parametrize("name", zoo.CAPPED)
def test_prompts_and_steps_in_fp32_are_stocks(name):
    """The whole model on the GPU, exact caches: prefill in every form and the reference path."""
    model, method = zoo.capped(name).eval().cuda(), load_method("fp16")
    model.set_attn_implementation("eager")  # some releases run SDPA on Gemma-2, which leaves its cap out
    ids, mask = (x.cuda() for x in zoo.padded_batch([97, 120, 110]))
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=mask).logits
        cache = method.new_cache(model)
        ours = [model(input_ids=ids[:, :100], attention_mask=mask[:, :100], past_key_values=cache).logits]
        for first, last in ((100, 101), (101, 105), (105, 120)):
            ours.append(
                model(input_ids=ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache).logits
            )
    method.detach(model)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(ours, 1)[real], stock[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", zoo.CAPPED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_prompts_in_half_precision_are_right_and_need_no_matrix_of_scores(name, dtype):
    """8k tokens of a full layer by the fast paths, against fp32; the memory stays far below one head's scores."""
    from kvbench.attention import prefill

    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, h, 8192, 64, generator=generator, device="cuda").to(dtype) for h in (8, 2, 2))
    sinks = torch.linspace(-2, 8, 8, device="cuda").to(dtype) if name == "gpt_oss" else None
    module, kwargs = torch.nn.Module(), {"softcap": None if sinks is not None else 5.0, "s_aux": sinks}
    module.num_key_value_groups = 4
    real = torch.ones(1, 8192, dtype=torch.bool, device="cuda")
    real[:, :100] = False
    with torch.no_grad():
        for mask in (None, real):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out, path = prefill.attend_prompt(module, q, k, v, mask, 0.125, kwargs)
            assert torch.cuda.max_memory_allocated() - before < 1 << 30
            assert path == ("capped" if sinks is None else "sdpa+sinks")
            rows = slice(8000, 8192)
            scores = q[:, :, rows].float() @ k.float().repeat_interleave(4, 1).transpose(-1, -2) * 0.125
            scores = scores if sinks is not None else torch.tanh(scores / 5) * 5
            hidden = torch.ones(192, 8192, dtype=torch.bool, device="cuda").triu(8001)
            if mask is not None:
                hidden[:, :100] = True
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.float().view(1, 8, 1, 1).expand(1, 8, 192, 1)], -1)
            wanted = scores.softmax(-1)[..., :8192] @ v.float().repeat_interleave(4, 1)
            assert relative_error(out[:, rows].transpose(1, 2), wanted) < TOLERANCE[dtype]


def full_layers(name):
    """A model of :data:`zoo.CAPPED` without sliding windows, and two prompts with 80 more tokens, one row padded."""
    model = zoo.capped(name, layer_types=["full_attention"] * 2).bfloat16().eval().cuda()
    return model, *(x.cuda() for x in zoo.padded_batch([230, 223]))


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("method_name", ["fp16", "kivi", "atom"])
@pytest.mark.parametrize("name", zoo.CAPPED)
def test_captured_steps_say_what_eager_ones_say(name, method_name, kernels):
    """The same kernels with the same numbers: token for token."""
    kernel(kernels)
    base, options = METHODS[method_name]
    model, ids, mask = full_layers(name)
    method, answers = load_method(base, **options), {}
    for graphs in ("never", "always"):
        cache = method.new_cache(model, max_length=250)
        cache.options = Options(kernels=kernels)
        answers[graphs] = generate(model, cache, ids[:, :150], mask[:, :150], max_new_tokens=80, graphs=graphs)
        assert not (graphs == "always" and "reference" in cache.path)
        method.detach(model)
    assert answers["always"].stepping == "graph"
    assert answers["always"].tokens == answers["never"].tokens


class Seen(Forced):
    """A step of a given token whose logits can be read after each replay."""

    def forward(self, **keep):
        self.logits = super().forward(**keep)
        return self.logits


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("method_name", ["fp16", "kivi", "atom"])
@pytest.mark.parametrize("name", zoo.CAPPED)
def test_compiled_steps_give_the_logits_of_eager_ones(name, method_name, kernels):
    """But for roundings of bf16, as sums are in another order: where two logits are equal, tokens may be others."""
    kernel(kernels)
    base, options = METHODS[method_name]
    model, ids, mask = full_layers(name)
    method, found = load_method(base, **options), {}
    for compiled in (False, True):
        cache, logits = method.new_cache(model, max_length=250), []
        cache.options = Options(kernels=kernels)
        with torch.inference_mode():
            model(ids[:, :150], attention_mask=mask[:, :150], past_key_values=cache)
            captured = Captured(Seen(model, cache, ids, [0, 0], mask[:, :150].sum(-1)), compile=compiled)
            captured.first()
            for number in range(79):
                if number:
                    captured.next()
                captured.replay()
                logits.append(captured.step.logits[:, -1].float())
        assert captured.stepping == ("graph, compiled" if compiled else "graph")
        found[compiled] = torch.stack(logits, 1)
        method.detach(model)
    wrong = (found[True] - found[False]).norm(dim=-1) / found[False].norm(dim=-1)
    assert float(wrong.max()) < 0.02
