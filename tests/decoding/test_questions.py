"""Several questions on one cache: with nothing compressed, each answer is that of its own whole prompt."""

import pytest
import torch

from kvbench.decoding import Sampling, generate
from kvbench.decoding.questions import ask
from kvbench.methods import load_method
from tests import zoo


@pytest.mark.parametrize("name", ["fp16", "kivi"])
def test_each_question_is_asked_of_the_same_cache(name):
    model, method = zoo.model("llama"), load_method(name)
    shared, _ = zoo.padded_batch([300])
    questions, answers = [[5, 6, 7], [9], [11, 12, 13, 14, 15]], [[3, 4], [5], [6, 7, 8]]
    cache = method.new_cache(model)
    results = ask(model, cache, shared, questions, answers=answers, max_new_tokens=12, sampling=Sampling())
    again = ask(
        model,
        method.new_cache(model),
        shared,
        questions[::-1],
        answers=answers[::-1],
        max_new_tokens=12,
        sampling=Sampling(),
    )
    for result, other in zip(results, again[::-1], strict=True):
        assert result.tokens == other.tokens  # no question sees another
    assert cache.get_seq_length() == 300
    for question, answer, result in zip(questions, answers, results, strict=True):
        whole = torch.cat([shared, torch.tensor([question])], 1)
        alone = generate(model, method.new_cache(model), whole, max_new_tokens=12, answer_ids=[answer])
        assert result.prompt_tokens == [300 + len(question)]
        same = result.answer_nll[0][0] == pytest.approx(alone.answer_nll[0][0], rel=1e-5)
        if name == "fp16":
            assert same
            assert result.tokens == alone.tokens
        else:
            assert not same  # the question reads the text in the method's formats, not exactly
    method.detach(model)


def test_the_shared_text_is_in_the_first_questions_time_alone(monkeypatch):
    """A clock that advances by a second whenever it is asked: prefill, then each question's first token."""
    ticks = iter(range(1000))
    monkeypatch.setattr("kvbench.decoding.questions.now", lambda tensor: float(next(ticks)))
    model, method = zoo.model("llama"), load_method("fp16")
    shared, _ = zoo.padded_batch([40])
    results = ask(
        model,
        method.new_cache(model),
        shared,
        [[5], [6], [7]],
        answers=[[3]] * 3,
        max_new_tokens=1,
        sampling=Sampling(),
    )
    assert [result.ttft_s for result in results] == [2.0, 1.0, 1.0]
    method.detach(model)
