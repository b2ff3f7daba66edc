"""The attention that a prompt's tokens receive, by the CPU kernel of every instruction set of the machine."""

import pytest
import torch

from kvbench.attention import observe
from kvbench.attention.cpu import build, columns
from kvbench.cache.progress import Options
from kvbench.decoding.passes import prefill
from kvbench.methods import load_method
from tests import zoo
from tests.attention.test_cpu_tiles import SETS

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def probabilities(query, keys, starts, scaling):
    """Causal probabilities ``[B, Hq, q, n]``, and the log-sum-exp of each query."""
    count, width = query.shape[2], keys.shape[2]
    scores = (
        scaling * query.float() @ keys.float().repeat_interleave(query.shape[1] // keys.shape[1], 1).transpose(-1, -2)
    )
    seen = torch.ones(count, width, dtype=torch.bool).tril(width - count)
    seen = seen & (torch.arange(width) >= torch.tensor(starts)[:, None, None, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (5, 5), (300, 300), (131, 300), (97, 130)])
def test_sums_of_columns(count, width, dtype, instructions):
    rng = torch.Generator().manual_seed(width)
    starts = [0, min(7, width - count)]
    query = torch.randn(2, 6, count, 64, generator=rng).to(dtype)
    keys = (
        torch.randn(2, width, 2, 64, generator=rng).to(dtype).transpose(1, 2)
    )  # as a model's: heads apart by a stride
    wanted, lse = probabilities(query, keys, starts, 0.3)
    before = torch.rand(2, 6, width, generator=rng)
    sums = before.clone()
    columns.add_received(sums, query, keys, lse, starts, 0.3, instructions)
    assert torch.allclose(sums, before + wanted.sum(2), rtol=2e-5, atol=1e-6)


def test_padded_queries_give_nothing():
    query, keys, starts = torch.randn(2, 4, 40, 32), torch.randn(2, 2, 40, 32), [0, 33]
    wanted, lse = probabilities(query, keys, starts, 0.3)
    sums = torch.zeros(2, 4, 40)
    columns.add_received(sums, query, keys, lse.nan_to_num(0.0, neginf=0.0), starts, 0.3)
    assert torch.allclose(sums, wanted.sum(2), rtol=2e-5, atol=1e-6)
    assert not sums[1, :, :33].any() and torch.allclose(sums.sum(-1)[1], torch.full((4,), 7.0), atol=1e-4)


def test_a_large_score_is_no_infinity():
    query, keys = torch.full((1, 1, 3, 32), 10.0), torch.full((1, 1, 3, 32), 10.0)
    wanted, lse = probabilities(query, keys, [0], 1.0)
    sums = torch.zeros(1, 1, 3)
    columns.add_received(sums, query, keys, lse, [0], 1.0)
    assert torch.allclose(sums, wanted.sum(2), atol=1e-3)  # scores of 3,200: fp32 has 2e-4 of them


@pytest.mark.parametrize("chunk", [None, 23])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_prompt_is_observed_as_in_plain_torch(monkeypatch, architecture, chunk):
    """Padded rows, in one piece and in chunks; the logits stay as they are to the bit. A softcap is left to torch."""
    method, model = load_method("h2o", budget=16), zoo.model(architecture)
    ids, mask = zoo.padded_batch([64, 51], seed=1)
    calls, add = [], columns.add_received
    monkeypatch.setattr(columns, "add_received", lambda *args: calls.append(1) or add(*args))
    received, logits, extend = {"auto": [], "reference": []}, {}, observe.extend
    for kernels, seen in received.items():
        monkeypatch.setattr(observe, "extend", lambda *args, seen=seen: seen.append(extend(*args)) or seen[-1])
        cache = method.new_cache(model)
        cache.options = Options(kernels=kernels)
        with torch.inference_mode():
            logits[kernels] = prefill(model, cache, ids, mask, chunk=chunk)
    assert bool(calls) == (architecture == "llama")
    assert torch.equal(logits["auto"], logits["reference"])
    for found, wanted in zip(received["auto"], received["reference"], strict=True):
        real = mask[:, None, None, : found.shape[-1]].bool()
        assert torch.allclose(found * real, wanted * real, atol=1e-5)
