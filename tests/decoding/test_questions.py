"""Several questions on one cache: with nothing compressed, each answer is that of its own whole prompt."""

import pytest
import torch

from kvbench.decoding import Sampling, generate
from kvbench.decoding.questions import ask, spoken
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
    stored = ask(model, cache, shared, questions, answers=answers, turns="reference", **options)
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


def held(cache):
    """All tensors of a cache as bytes, and its other plain state, by path."""
    found = {}

    def walk(name, value, seen):
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, int | float | str | bool | None):
            found[name] = value
        elif isinstance(value, dict | list | tuple):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                walk(f"{name}.{key}", one, seen)
        elif type(value).__module__.startswith("kvbench.cache") and id(value) not in seen:
            for key, one in vars(value).items():
                walk(f"{name}.{key}", one, seen | {id(value)})

    for number, layer in enumerate(cache.kv_layers):
        walk(str(number), layer, frozenset())
    return {name: value for name, value in found.items() if not name.split(".")[1].startswith(("paths", "pairs"))}


class Watch:
    """An observer that notes what a cache holds before each question and at the end."""

    def __init__(self, cache):
        self.cache, self.moments = cache, []

    def phase(self, name):
        if name != "prefill":
            self.moments.append(held(self.cache))


@pytest.mark.parametrize("name", ["fp16", "kivi", "kivi:int4", "atom", "logquant", "snapkv", "h2o", "turboquant"])
def test_questions_leave_the_cache_byte_for_byte_as_it_was(name):
    """As SCBench's same context and different queries, where the cache is rolled back after each answer."""
    model, (name, _, quantizer) = zoo.restless(), name.partition(":")
    method = load_method(name, **({"quantizer": quantizer} if quantizer else {}))
    shared, _ = zoo.padded_batch([300])
    questions, answers = [[5, 6, 7], [9], [11, 12, 13, 14, 15]], [[3, 4], [5], [6, 7, 8]]
    watches = []
    for turns in (None, "reference"):
        watches.append(Watch(method.new_cache(model)))
        options = {"max_new_tokens": 40, "sampling": Sampling(), "observer": watches[-1], "turns": turns}
        ask(model, watches[-1].cache, shared, questions, answers=answers, **options)
    (before, *later), (begun, *talked) = (watch.moments for watch in watches)
    assert len(later) == len(talked) == 3 and any(isinstance(one, bytes) and len(one) > 999 for one in before.values())
    assert all(moment == before for moment in later)
    assert all(moment != begun for moment in talked)  # turns stay
    method.detach(model)


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_turns_may_keep_the_models_own_answers(finish):
    model, method = zoo.restless(), load_method("fp16")
    shared, _ = zoo.padded_batch([60])
    questions, wrong = [[5, 6, 7], [9], [11]], [[50], [51], [52]]
    options = {"max_new_tokens": 8, "sampling": Sampling(), "tokenizer": Letters()}
    free = ask(model, method.new_cache(model), shared, questions[:1], answers=wrong[:1], **options)[0]
    if finish == "stop":
        options["stop"] = [free.text[0][3:5]]
    cache = method.new_cache(model)
    own = ask(model, cache, shared, questions, answers=wrong, turns="own", **options)
    said = [spoken(one, Letters()) for one in own]
    letters = 8 if finish == "length" else free.text[0].index(free.text[0][3:5])
    assert own[0].finish == [finish] and len(said[0]) == letters
    again = ask(model, method.new_cache(model), shared, questions, answers=said, turns="reference", **options)
    assert [one.tokens for one in own] == [one.tokens for one in again]
    assert cache.get_seq_length() == 60 + 5 + sum(map(len, said))
    gold = ask(model, method.new_cache(model), shared, questions, answers=wrong, turns="reference", **options)
    assert gold[0].tokens == own[0].tokens and gold[2].tokens != own[2].tokens
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
