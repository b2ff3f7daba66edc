"""Answers to several questions on one text, joined to one row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache.progress import Options
from kvbench.decoding.autoregressive import Generation
from kvbench.decoding.round_times import Round
from kvbench.decoding.sampling import Sampling
from kvbench.models.load import byte_tokenizer
from kvbench.results.samples import MEASURED
from kvbench.runner import questions
from kvbench.runner.prompting import sample_seed
from kvbench.runner.questions import SharedTexts, join_generations
from kvbench.runner.rows import Machine
from kvbench.tasks.base import PromptRules, Sample
from kvbench.tasks.work import AskQuestions, Question
from tests.run_support import ToyTask


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
    assert join_generations([answer(name) for name in finishes]).finish == [finish]


def test_tokens_times_and_likelihoods_are_of_all_answers_and_the_first_token_is_of_the_first() -> None:
    whole = join_generations([answer("eos", (1, 2), ttft_s=0.5), answer("eos", (3, 4, 5), ttft_s=0.125)])
    assert whole.tokens == [[1, 2, 3, 4, 5]] and whole.text == ["12\n345"]
    assert whole.step_s == [0.25] * 3 and whole.ttft_s == 0.5
    assert whole.answer_nll == [(3.0, 4)]


def test_rounds_are_of_all_answers_and_the_prompt_of_the_first() -> None:
    first, second = answer("eos"), answer("eos")
    rounds = [Round(0.5, [1], [4], [number], [number + 1]) for number in (1, 2)]
    first.rounds.append(rounds[0])
    second.rounds.append(rounds[1])
    second.prompt_tokens[0] = 9
    whole = join_generations([first, second])
    assert whole.rounds == rounds and whole.prompt_tokens == [7]
    assert whole.stepping == "eager (several questions on one cache)" and whole.capture_s == 0.0


SHARED = "Read: abc"


def asked(
    monkeypatch,
    count=1,
    *,
    first=False,
    notes=None,
    max_new_tokens=None,
    max_length=60,
    shared=SHARED,
    turns="separate",
    history="reference",
    **limits,
):
    """The rows of samples with two questions, what `ask` was called with, and how the caches were made."""
    calls: list[Any] = []
    caches: list[Any] = []

    def ask(*args: Any, **named: Any) -> list[Generation]:
        calls.append((args, named))
        return [answer("eos", (1, 2)), answer("stop", (3,))][: len(args[3])]

    def new_cache(model: Any, prompts: Any, max_length: int) -> Any:
        caches.append((model, prompts, max_length))
        bill = SimpleNamespace(as_dict=lambda: {"used": {"total": 3}, "reserved": {"total": 8}})
        prefill = SimpleNamespace(prefill=SimpleNamespace(path="eager"))
        return SimpleNamespace(
            search_s=0.25, reads_packed=True, path="p", notes=notes, progress=prefill, bill=lambda row: bill
        )

    monkeypatch.setattr(questions, "ask", ask)
    tokenizer = byte_tokenizer()
    config: Any = SimpleNamespace(
        model=SimpleNamespace(prompt_limit=limits.get("prompt_limit"), chat="<{prompt}>"),
        method=SimpleNamespace(new_cache=new_cache),
        decoding=SimpleNamespace(max_new_tokens=max_new_tokens, temperature=0.5, top_p=0.75, top_k=5, stop=("S",)),
        runtime=SimpleNamespace(seed=3, prefill_chunk=16),
    )
    loaded: Any = SimpleNamespace(
        model="model", tokenizer=tokenizer, device=torch.device("cpu"), max_length=max_length, eos_token_ids=(257,)
    )
    work = AskQuestions(
        len(shared), (Question(" Who?", "me", target=" me"), Question(" Why not?", "so")), turns, history
    )
    samples = [
        Sample(
            id=f"t/{number}",
            task="t",
            prompt=shared + " Who?",
            answers=("me",),
            max_new_tokens=4,
            work=work,
            context_span=(6, 9),
            query="Who?",
            stop=("T",),
            rules=PromptRules(limit=5, ids=(1, 2, 3)),
        )
        for number in range(count)
    ]
    strategy = SharedTexts(config, loaded, ToyTask(), Machine("a cpu", "float32"), Options(kernels="reference"))
    rows = strategy.rows(samples, first=first, report=None)
    return SimpleNamespace(rows=rows, calls=calls, caches=caches, tokenizer=tokenizer, samples=samples)


def test_the_shared_text_is_the_prompt_and_each_question_follows_it(monkeypatch) -> None:
    run = asked(monkeypatch)
    (((model, cache, ids, prompts), named),) = run.calls

    def tokens(text: str) -> list[int]:
        return run.tokenizer(text, add_special_tokens=False)["input_ids"]

    assert model == "model" and cache.options == Options(kernels="reference")
    assert ids.tolist() == [[run.tokenizer.bos_token_id, *tokens(SHARED)]]  # no chat wrapper
    assert prompts == [tokens(" Who?"), tokens(" Why not?")]
    assert named.pop("sampling") == Sampling(0.5, 0.75, [sample_seed(3, run.samples[0])], 5)
    observer = named.pop("observer")
    assert observer.kind is None
    assert named == {
        "answers": [tokens(" me"), tokens("so")],
        "max_new_tokens": 4,
        "eos_token_ids": (257,),
        "stop": ("T", "S"),
        "tokenizer": run.tokenizer,
        "prefill_chunk": 16,
        "turns": None,
    }
    ((model, given, length),) = run.caches
    assert model == "model" and length == 10 + 9 + 4
    assert given.context_spans == [(7, 10)] and given.queries == ["Who?"]
    assert given.decode(tokens("abc")) == "abc"
    (row,) = run.rows
    assert (row["prompt_tokens"], row["truncated"], row["prediction"], row["finish"]) == (10, 0, "12\n3", "eos")
    assert row["scores"] == {"score": 0.25, "all": 0.0}
    assert row["nll"] == {"sum": 3.0, "n": 4} and "method" not in row
    assert row["kv_bytes"] == {"used": {"total": 3}, "reserved": {"total": 8}}
    measured = row[MEASURED]
    assert (measured["ttft_s"], measured["decoded"], measured["step_s"]) == (0.75, 1, [0.25])
    assert (measured["batch_rows"], measured["warm_up"]) == (1, False)


def test_turns_are_asked_of_one_cache_or_of_a_new_one_each(monkeypatch) -> None:
    stored, anew = (asked(monkeypatch, turns=turns) for turns in ("stored", "anew"))
    (call,) = stored.calls
    assert call[1]["turns"] == "reference" and [length for *_, length in stored.caches] == [10 + 8 + 11 + 4]
    first, second = (args[2][0].tolist() for args, _ in anew.calls)
    tokens = anew.tokenizer(" Who? me", add_special_tokens=False)["input_ids"]
    assert second == [*first, *tokens] and [named["turns"] for _, named in anew.calls] == [None, None]
    assert [args[3] for args, _ in anew.calls] == [[ids] for ids in call[0][3]]
    assert [length for *_, length in anew.caches] == [33, 33]
    own, again = (asked(monkeypatch, turns=turns, history="own") for turns in ("stored", "anew"))
    assert own.calls[0][1]["turns"] == "own" and [length for *_, length in own.caches] == [10 + 5 + 9 + 2 * 4 + 4]
    first, second = (args[2][0].tolist() for args, _ in again.calls)
    assert second == [*first, *again.tokenizer(" Who?", add_special_tokens=False)["input_ids"], 1, 2]  # its answer
    cut = asked(monkeypatch, turns="stored", shared="Read: " + "x" * 100).rows[0]
    assert cut["prompt_tokens"] == 60 - 4 - 19


def test_only_the_first_of_the_first_texts_warms_up(monkeypatch) -> None:
    rows = asked(monkeypatch, 2, first=True).rows
    assert [row[MEASURED]["warm_up"] for row in rows] == [True, False]
    assert [row["id"] for row in rows] == ["t/0", "t/1"]
    assert not asked(monkeypatch, 1, first=False).rows[0][MEASURED]["warm_up"]


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({}, 60 - 4 - 9),  # the longest question has nine
        ({"max_new_tokens": 6}, 60 - 6 - 9),
        ({"prompt_limit": 40}, 40 - 9),
        ({"prompt_limit": 100}, 60 - 4 - 9),
    ],
)
def test_the_shared_text_leaves_room_for_the_longest_question_and_the_answer(monkeypatch, limits, tokens) -> None:
    run = asked(monkeypatch, shared="Read: " + "x" * 100, **limits)
    assert run.rows[0]["prompt_tokens"] == tokens and run.rows[0]["truncated"] == 107 - tokens
    assert run.calls[0][1]["max_new_tokens"] == limits.get("max_new_tokens", 4)


def test_a_methods_note_is_the_rows(monkeypatch) -> None:
    assert asked(monkeypatch, notes=[{"chunks": 3}]).rows[0]["method"] == {"chunks": 3}


def test_answers_by_speculation_keep_the_steps_of_their_rounds(monkeypatch) -> None:
    def speculated(*args: Any, **named: Any) -> list[Generation]:
        one = answer("length", (1, 2, 3))
        one.rounds.append(Round(0.5, [1], [4], [3], [4]))
        return [one, answer("eos", ())]

    from kvbench.runner import questions as module

    plain = asked(monkeypatch)
    monkeypatch.setattr(module, "join_generations", lambda generations: join_generations(speculated()))
    row = asked(monkeypatch).rows[0]
    assert plain.rows[0][MEASURED]["decoded"] == 1 and row[MEASURED]["decoded"] == 4
