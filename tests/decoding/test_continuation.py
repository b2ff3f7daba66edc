"""Likelihoods of continuations through the cache, against the model's own whole pass and against steps by hand."""

from __future__ import annotations

import pytest
import torch

import kvbench
from kvbench.decoding import questions
from kvbench.decoding.passes import forward, prefill
from kvbench.decoding.questions import continuation_likelihoods
from kvbench.errors import CacheError, NonFiniteError
from tests import zoo

CONTEXT = [5, 9, 2, 41, 17, 33, 8, 60] * 6
ENDINGS = [[7, 3, 11], [7], [30, 31, 32, 33, 34, 35]]


@pytest.fixture(scope="module")
def model():
    return zoo.model()


def whole(model, context: list[int], ending: list[int]) -> tuple[float, bool]:
    """From one pass without a cache."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([context + ending]), use_cache=False).logits[0].float()
    scores = torch.log_softmax(logits[len(context) - 1 : -1], -1)
    target = torch.tensor(ending)
    return float(scores.gather(-1, target[:, None]).sum()), bool((scores.argmax(-1) == target).all())


@pytest.mark.parametrize("context", [CONTEXT, CONTEXT[:2], CONTEXT[:1]], ids=len)
def test_exact_caches_give_the_likelihoods_of_a_whole_pass(model, context):
    expected = [whole(model, context, ending) for ending in ENDINGS]
    cache = kvbench.load_method("fp16").new_cache(model)
    computed = [(total, greedy) for total, greedy, _ in continuation_likelihoods(model, cache, context, ENDINGS)]
    for (total, greedy), (right, same) in zip(computed, expected, strict=True):
        assert total == pytest.approx(right, abs=1e-4) and greedy is same


def test_the_greedy_continuation_is_greedy(model):
    cache = kvbench.load_method("fp16").new_cache(model)
    with torch.inference_mode():
        ids = list(CONTEXT)
        for _ in range(3):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    best = ids[len(CONTEXT) :]
    other = [*best[:2], (best[2] + 1) % 50]
    greedy = [right for _, right, _ in continuation_likelihoods(model, cache, CONTEXT, [best, other])]
    assert greedy == [True, False]


def test_quantized_caches_are_read_step_by_step(model):
    """Each continuation starts from the same prefill; the last prompt token and each new one are steps of their own."""
    method = kvbench.load_method("kivi", quantizer="int2", residual=32)
    ids = torch.tensor([CONTEXT])
    for ending, (total, _, used) in zip(
        ENDINGS, continuation_likelihoods(model, method.new_cache(model), CONTEXT, ENDINGS), strict=True
    ):
        cache, fed, by_hand = method.new_cache(model), [CONTEXT[-1], *ending[:-1]], 0.0
        with torch.inference_mode():
            prefill(model, cache, ids[:, :-1], None)
            for place, (token, target) in enumerate(zip(fed, ending, strict=True)):
                at = torch.tensor([[len(CONTEXT) - 1 + place]])
                logits = forward(model, cache, torch.tensor([[token]]), None, at)[0, -1].float()
                by_hand += float(torch.log_softmax(logits, -1)[target])
        assert total == by_hand
        assert used.reads_packed and used.bill().used.codes > 0
        assert abs(total - whole(model, CONTEXT, ending)[0]) > 1e-4


def test_a_used_cache_is_refused(model):
    cache = kvbench.load_method("fp16").new_cache(model)
    list(continuation_likelihoods(model, cache, CONTEXT, [[1]]))
    with pytest.raises(CacheError, match="already contains"):
        list(continuation_likelihoods(model, cache, CONTEXT, [[1]]))


def test_logits_that_are_no_numbers_within_a_continuation_are_refused(model, monkeypatch):
    cache = kvbench.load_method("fp16").new_cache(model)

    def broken(*given, **more):
        return torch.full((1, 1, zoo.VOCABULARY), float("nan"))

    monkeypatch.setattr(questions, "forward", broken)
    monkeypatch.setattr(questions, "check_cache", lambda *given: None)
    with pytest.raises(NonFiniteError, match="within a continuation of 2 tokens are NaN"):
        next(continuation_likelihoods(model, cache, [5, 6, 7], [[8, 9]]))
