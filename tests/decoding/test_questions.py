"""Several questions on one cache: with nothing compressed, each answer is that of its own whole prompt."""

import pytest
import torch

from kvbench.decoding import Sampling, generate
from kvbench.decoding.questions import ask
from kvbench.methods import load_method
from tests import zoo


@pytest.mark.parametrize("name", ["fp16", "kivi"])
def test_each_question_is_asked_of_the_same_cache(name):
    model, method = zoo.restless(), load_method(name)
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
    assert cache.path != "none" and cache.reads_packed == (name == "kivi")  # those of the copies that answered
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


@pytest.mark.parametrize("name", ["fp16", "kivi"])
def test_turns_stay_in_the_cache_with_their_reference_answers(name):
    model, method = zoo.restless(), load_method(name)
    shared, _ = zoo.padded_batch([300])
    questions, answers = [[5, 6, 7], [9], [11, 12, 13]], [[3, 4], [], [6, 7, 8]]
    options = {"max_new_tokens": 8, "sampling": Sampling()}
    cache = method.new_cache(model)
    stored = ask(model, cache, shared, questions, answers=answers, turns=True, **options)
    assert cache.get_seq_length() == 300 + 3 + 2 + 1 + 3 + 3
    before: list[int] = []
    for question, answer, result in zip(questions, answers, stored, strict=True):
        ids = torch.cat([shared, torch.tensor([before], dtype=shared.dtype)], 1)
        (anew,) = ask(model, method.new_cache(model), ids, [question], answers=[answer], **options)
        assert result.prompt_tokens == anew.prompt_tokens == [300 + len(before) + len(question)]
        if name == "fp16" or not before:
            assert result.tokens == anew.tokens
            assert result.answer_nll[0][0] == pytest.approx(anew.answer_nll[0][0], rel=1e-4)
        elif answer:  # earlier turns were packed as they came, in other groups than a prompt's
            assert result.answer_nll[0][0] != pytest.approx(anew.answer_nll[0][0], rel=1e-4)
        before += [*question, *answer]
    separate = ask(model, method.new_cache(model), shared, questions, answers=answers, **options)
    assert separate[0].tokens == stored[0].tokens and separate[2].tokens != stored[2].tokens
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


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(ord("a") + t % 26) for t in tokens)


def test_answers_end_as_those_of_single_prompts_do():
    """By token, by string, drawn; the observer is notified of phases, and a prompt in chunks is the same prompt."""
    model, method = zoo.model("llama"), load_method("fp16")
    shared, _ = zoo.padded_batch([40])
    whole = torch.cat([shared, torch.tensor([[5, 6]])], 1)

    def both(sampling=Sampling(), **more):  # noqa: B008
        phases = []
        observer = type("Seen", (), {"phase": lambda self, name: phases.append(name)})()
        arguments = {"max_new_tokens": 12, "sampling": sampling, "tokenizer": Letters(), **more}
        cache = method.new_cache(model)
        (asked,) = ask(model, cache, shared, [[5, 6]], answers=[[3]], prefill_chunk=16, observer=observer, **arguments)
        alone = generate(model, method.new_cache(model), whole, **arguments)
        assert (asked.tokens, asked.text, asked.finish) == (alone.tokens, alone.text, alone.finish)
        assert len(asked.step_s) == len(alone.step_s) and asked.rounds == []
        assert phases == ["prefill", "decode", "end"]
        return asked

    free = both()
    assert free.finish == ["length"] and len(free.tokens[0]) == 12
    assert both(eos_token_ids=[free.tokens[0][4]]).finish == ["eos"]
    assert both(stop=[free.text[0][3:5]]).finish == ["stop"]
    assert both(Sampling(2.0, 1.0, 9)).tokens != free.tokens
    method.detach(model)
