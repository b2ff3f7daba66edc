"""Answers to several questions on one text, joined to one row."""

from __future__ import annotations

import pytest

from kvbench.decoding.autoregressive import Generation
from kvbench.runner.questions import joined


def answer(finish: str, tokens: tuple[int, ...] = (1,), ttft_s: float = 0.5) -> Generation:
    return Generation(
        tokens=[list(tokens)],
        text=["".join(map(str, tokens))],
        finish=[finish],
        ttft_s=ttft_s,
        step_s=[0.25] * (len(tokens) - 1),
        prompt_tokens=[7],
        answer_nll=[(1.5, 2)],
    )


@pytest.mark.parametrize(
    ("finishes", "finish"),
    [
        (("eos", "eos"), "eos"),
        (("length", "eos"), "length"),
        (("eos", "length"), "length"),
        (("stop", "length", "eos"), "length"),
        (("stop", "eos"), "stop"),
    ],
)
def test_one_answer_that_was_cut_is_enough_for_the_row_to_be_cut(finishes, finish) -> None:
    assert joined([answer(name) for name in finishes]).finish == [finish]


def test_tokens_times_and_likelihoods_are_of_all_answers_and_the_first_token_is_of_the_first() -> None:
    whole = joined([answer("eos", (1, 2), ttft_s=0.5), answer("eos", (3, 4, 5), ttft_s=0.125)])
    assert whole.tokens == [[1, 2, 3, 4, 5]] and whole.text == ["12\n345"]
    assert whole.step_s == [0.25] * 3 and whole.ttft_s == 0.5
    assert whole.answer_nll == [(3.0, 4)]
