"""Requests to engines and their streamed answers, from recorded exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.endpoint.engines import LLAMACPP, LLAMACPP_PYTHON, SERVED, SGLANG, UNKNOWN, VLLM
from kvbench.endpoint.wire import Answer, Ask, BrokenAnswer, WrongAnswer, request, same_text
from tests.endpoint.fake_server import tokenizer

RECORDED = Path(__file__).with_name("recorded")
ASK = Ask((504, 3575, 282, 4649, 314), "The capital of France is", 3, seed=7, at_least=1)


class Plain:
    """The fast tokenizer of tiny with transformers' names."""

    def __len__(self) -> int:
        return tokenizer().get_vocab_size()

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)


def taken(engine: str) -> Answer:
    """The answer of a recorded stream whose events arrive every .1 s."""
    answer = Answer()
    for number, line in enumerate((RECORDED / f"{engine}.txt").read_text().splitlines()):
        answer.take(line, number / 20)
    return answer


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_a_recorded_answer(engine: str) -> None:
    answer = taken(engine)
    assert (answer.text, answer.ids, answer.finish) == (" Paris.\n", [7042, 30, 198], "length")
    assert (answer.prompt_tokens, answer.cached) == (5, 0)
    if SERVED[engine].logprobs:
        assert [place[0][0] for place in answer.tops] == answer.ids
        assert answer.tops[1][1] == (28, pytest.approx(-1.6577, abs=1e-4))
    else:
        assert not answer.tops
    # vLLM's second event has two tokens, which share its time
    assert answer.step_s(3) == pytest.approx([0.05, 0.05] if engine == "vllm" else [0.1, 0.1])


def test_requests() -> None:
    path, body = request(LLAMACPP, "name", ASK, 20, prefix_reuse=False)
    assert path == "/completion"
    assert (body["prompt"], body["n_predict"], body["n_probs"]) == (list(ASK.ids), 3, 20)
    assert (body["cache_prompt"], body["temperature"], body["top_k"], body["min_p"]) == (False, 0.0, 0, 0.0)
    assert request(LLAMACPP, "name", ASK, 20, prefix_reuse=True)[1]["cache_prompt"] is True
    path, body = request(VLLM, "name", ASK, 100, prefix_reuse=False)
    assert (path, body["model"], body["prompt"], body["max_tokens"]) == ("/v1/completions", "name", list(ASK.ids), 3)
    assert (body["logprobs"], body["return_tokens_as_token_ids"], body["return_token_ids"]) == (20, True, True)
    assert (body["min_tokens"], body["seed"]) == (1, 7)
    assert "logprobs" not in request(SGLANG, "name", ASK, 20, prefix_reuse=False)[1]
    for engine in (UNKNOWN, LLAMACPP_PYTHON):
        body = request(engine, "name", ASK, 20, prefix_reuse=False)[1]
        assert body["prompt"] == ASK.text
        assert not {"return_token_ids", "min_tokens", "top_k", "logprobs"} & body.keys()


@pytest.mark.parametrize(
    "line",
    [
        "data: {not json",
        'data: {"error": {"message": "out of blocks"}}',
        'data: {"choices": [{"text": "", "finish_reason": "abort"}]}',
        'data: {"choices": [{"token_ids": ["x"]}]}',
        "error: aborted",
    ],
)
def test_a_broken_line_is_no_answer(line: str) -> None:
    with pytest.raises(BrokenAnswer):
        Answer().take(line, 0.0)


def test_answers_that_contradict_their_request() -> None:
    ids = [300, 301, 302]
    text = tokenizer().decode(ids)
    right = Answer(text, ids, prompt_tokens=5)
    right.check(ASK, Plain())
    for wrong, told in (
        (Answer(text, ids, prompt_tokens=6), "read 6 prompt tokens where 5"),
        (Answer(text, [*ids, 303], prompt_tokens=5), "4 tokens where 3"),
        (Answer(text, [300, 301, 305], prompt_tokens=5), "not those of the text"),
        (Answer(text, [300, 301, 10**6], prompt_tokens=5), "not those of the text"),
    ):
        with pytest.raises(WrongAnswer, match=told):
            wrong.check(ASK, Plain())


def test_texts_may_differ_in_spaces_and_in_a_character_that_is_not_whole() -> None:
    ids = tokenizer().encode("one two", add_special_tokens=False).ids
    assert same_text(Plain(), ids, " one two ")
    assert same_text(Plain(), ids, "one t\ufffd")
    assert not same_text(Plain(), ids, "one three")
    assert not same_text(Plain(), ids, "")
