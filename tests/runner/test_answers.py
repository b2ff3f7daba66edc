"""The rows of answers: what is generated with which settings, what a row says, and which times it has."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache.progress import Options
from kvbench.decoding.autoregressive import Generation
from kvbench.decoding.round_times import Round
from kvbench.decoding.sampling import Sampling
from kvbench.models.load import byte_tokenizer
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.samples import MEASURED
from kvbench.runner import answers
from kvbench.runner.answers import Answers, answer_row, generation_figures
from kvbench.runner.prompting import EncodedPrompt, sample_seed
from kvbench.runner.rows import Machine
from kvbench.tasks.base import PromptRules, Sample
from tests.run_support import ToyTask

MACHINE = Machine("a cpu", "float32")


def generation(**changes: Any) -> Generation:
    return Generation(
        **{
            "tokens": [[1, 2]],
            "text": ["ab"],
            "finish": ["length"],
            "ttft_s": 0.25,
            "step_s": [0.125],
            "prompt_tokens": [3],
        }
        | changes
    )


def cache_of(**changes: Any) -> Any:
    prefill = SimpleNamespace(path="eager")
    parts = {"search_s": 0.0, "reads_packed": True, "path": "reference", "notes": None}
    return SimpleNamespace(**parts | changes, progress=SimpleNamespace(prefill=prefill))


@pytest.mark.parametrize(("search_s", "ttft_s"), [(0.0, 0.25), (0.5, 0.75), (None, None)])
def test_the_time_to_the_first_token_includes_the_search_and_is_unknown_with_it(search_s, ttft_s) -> None:
    cache = cache_of(search_s=search_s)
    peaks = PhasePeaks(torch.device("cpu"), census=False)
    figures = generation_figures(MACHINE, cache, peaks, False, 1, generation())
    assert figures["ttft_s"] == ttft_s
    assert figures["step_s"] == [0.125]


@pytest.mark.parametrize("warm_up", [True, False])
def test_the_figures_of_a_generation(warm_up: bool) -> None:
    peaks: Any = SimpleNamespace(row=lambda: {"prefill": 7, "decode": 5})
    whole = generation(ttft_s=0.1234567, step_s=[0.7654321, 0.25], stepping="graph, compiled", capture_s=1.23456789)
    cache = cache_of(search_s=1.0, reads_packed=0, path="triton")
    assert generation_figures(MACHINE, cache, peaks, warm_up, 3, whole) == {
        "device": "a cpu",
        "dtype": "float32",
        "arithmetic": "float32",
        "warm_up": warm_up,
        "batch_rows": 3,
        "ttft_s": 1.123457,
        "step_s": [0.765432, 0.25],
        "stepping": "graph, compiled",
        "capture_s": 1.234568,
        "peak_bytes": {"prefill": 7, "decode": 5},
        "attention": {"reads_packed": False, "path": "triton", "prefill": "eager"},
    }


def sample(**changes: Any) -> Sample:
    parts = {"id": "t/0", "task": "t", "prompt": "Read: abc\nAnswer:", "answers": ("xyz",), "max_new_tokens": 4}
    return Sample(**parts | changes)


def row_of(whole: Generation, index: int = 0, of: Sample | None = None, removed: int = 0) -> dict[str, Any]:
    prompt = EncodedPrompt((1, 2, 3, 4, 5), None, removed)
    return answer_row(ToyTask(), of or sample(), prompt, whole, index, {"used": {"total": 9}}, {"step_s": whole.step_s})


def test_a_row_is_that_of_its_own_sample() -> None:
    whole = generation(
        tokens=[[9], [1, 2, 3]],
        text=["?", "aB"],
        finish=["eos", "stop"],
        step_s=[0.5, 0.25, 0.125],
        answer_nll=[(9.0, 9), (1.5, 2)],
    )
    assert row_of(whole, 1, sample(length=64), removed=11) == {
        "id": "t/0",
        "task": "t",
        "length": 64,
        "prompt_tokens": 5,
        "truncated": 11,
        "prediction": "aB",
        "tokens": [1, 2, 3],
        "finish": "stop",
        "scores": {"score": 0.375, "length": 2.0},
        "scorer_version": 1,
        "nll": {"sum": 1.5, "n": 2},
        "kv_bytes": {"used": {"total": 9}},
        MEASURED: {"step_s": [0.5, 0.25, 0.125], "decoded": 2},
    }


def test_a_likelihood_is_left_out_if_there_is_no_reference_and_unknown_if_it_is_not_finite() -> None:
    assert row_of(generation())["nll"] is None
    assert row_of(generation(answer_nll=[(0.0, 0)]))["nll"] is None
    assert row_of(generation(answer_nll=[(math.inf, 3)]))["nll"] == {"sum": None, "n": 3}


def test_only_the_rows_of_warm_up_samples_are_marked() -> None:
    assert row_of(generation(), of=sample(warm_up=True))["warm_up"] is True
    assert "warm_up" not in row_of(generation())


@pytest.mark.parametrize(
    ("tokens", "finish", "steps", "decoded"),
    [([1, 2, 3], "eos", 9, 3), ([1, 2, 3], "length", 9, 2), ([1, 2, 3], "length", 1, 1), ([], "eos", 9, 0)],
)
def test_a_row_decoded_as_many_steps_as_its_tokens_took(tokens, finish, steps, decoded) -> None:
    row = row_of(generation(tokens=[tokens], finish=[finish], step_s=[0.5] * steps))
    assert row[MEASURED]["decoded"] == decoded and "speculation" not in row


def test_rounds_of_speculation_give_a_row_its_own_times() -> None:
    rounds = [
        Round(1.0, [9, 9], drafted=[4, 4], accepted=[3, 1], emitted=[4, 2]),
        Round(0.3333333, [9, 9], drafted=[4, 4], accepted=[1, 1], emitted=[2, 2]),
    ]
    tokens, steps = [[1] * 7, [1] * 5], [1.0, 0.3333333]
    row = row_of(generation(tokens=tokens, finish=["length"] * 2, text=["", ""], step_s=steps, rounds=rounds), 1)
    assert row["speculation"] == {"rounds": 2, "drafted": 8, "accepted": 2, "tokens": 4}
    assert row[MEASURED] == {"step_s": [0.5, 0.5, 0.166667, 0.166667], "decoded": 4, "decode_s": 1.333333}


class Method:
    """A method that records how its caches are made."""

    def __init__(self, notes: Any) -> None:
        self.notes, self.calls = notes, []

    def new_cache(self, model: Any, prompts: Any, max_length: int) -> Any:
        self.calls.append((model, prompts, max_length))

        def bill(row: int) -> Any:
            return SimpleNamespace(as_dict=lambda: {"used": {"total": 3 + row}, "reserved": {"total": 8}})

        return cache_of(notes=self.notes, bill=bill)


def answered(monkeypatch, samples, *, first=False, notes=None, decoding=None, model=None, text=None) -> Any:
    """The rows of a batch, what `generate` was called with, and the method."""
    tokenizer, calls = byte_tokenizer(), []
    tokenizer.pad_token = "#"

    def generate(*args: Any, **named: Any) -> Generation:
        calls.append((args, named))
        return generation(
            tokens=[[1]] * len(samples), text=["a"] * len(samples), finish=["eos"] * len(samples), step_s=[]
        )

    monkeypatch.setattr(answers, "generate", generate)
    method = Method(notes)
    config: Any = SimpleNamespace(
        model=SimpleNamespace(**{"name": "m", "preset": None, "prompt_limit": None, "chat": "none"} | (model or {})),
        method=method,
        decoding=SimpleNamespace(
            **{
                "max_new_tokens": None,
                "temperature": 0.5,
                "top_p": 0.75,
                "top_k": 5,
                "named": lambda system: {"sampler": system},
                "stop": ("S",),
            }
            | (decoding or {})
        ),
        runtime=SimpleNamespace(seed=3, prefill_chunk=16, prefill_rows=2, graphs="never", compile=True),
    )
    loaded: Any = SimpleNamespace(
        model="the model", tokenizer=tokenizer, device=torch.device("cpu"), max_length=100, eos_token_ids=(257,)
    )
    strategy = Answers(config, loaded, ToyTask(), MACHINE, Options(kernels="reference"))
    rows = strategy.rows(samples, first=first, report=None)
    ((args, named),) = calls
    return SimpleNamespace(rows=rows, args=args, named=named, method=method, tokenizer=tokenizer)


def test_a_batch_is_generated_with_the_settings_of_the_run_and_of_its_samples(monkeypatch) -> None:
    rules = {"stop": ("T",), "end_text": "\n.", "say_something": True}
    samples = [
        sample(query="q", query_source="last_chunk", **rules),
        sample(id="t/1", prompt="Longer: abc\nAnswer:", target=" abcdef", query="r", **rules),
    ]
    run = answered(monkeypatch, samples)
    model, cache, ids, mask = run.args
    assert run.tokenizer.pad_token_id > 0
    assert model == "the model" and cache.options == Options(kernels="reference")
    assert ids.shape == (2, 1 + 19) and mask.sum(-1).tolist() == [1 + 17, 1 + 19]
    assert ids[0, :2].tolist() == [run.tokenizer.pad_token_id] * 2
    ((where, prompts, length),) = run.method.calls
    assert where == "the model" and length == 20 + 4
    assert (prompts.queries, list(prompts.query_sources)) == (["q", "r"], ["last_chunk", None])
    assert prompts.decode(run.tokenizer("abc", add_special_tokens=False)["input_ids"]) == "abc"
    sampling = run.named.pop("sampling")
    seeds = [sample_seed(3, one) for one in samples]
    assert sampling == Sampling(temperature=0.5, top_p=0.75, seed=seeds, top_k=5)
    observer = run.named.pop("observer")
    assert isinstance(observer, PhasePeaks)
    tokens = lambda text: run.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    assert run.named == {
        "max_new_tokens": 4,
        "eos_token_ids": (257, *tokens(".")),
        "say_something": True,
        "stop": ("T", "S"),
        "tokenizer": run.tokenizer,
        "prefill_chunk": 16,
        "pad_token_id": run.tokenizer.pad_token_id,
        "answer_ids": [tokens("xyz"), tokens(" abc")],  # as many tokens as may be generated
        "graphs": "never",
        "compile": True,
        "prefill_rows": 2,
        "prompt": None,
    }
    assert [row["id"] for row in run.rows] == ["t/0", "t/1"]
    assert [row["prompt_tokens"] for row in run.rows] == [18, 20]
    assert [row[MEASURED]["batch_rows"] for row in run.rows] == [2, 2]
    assert [row["kv_bytes"]["reserved"]["total"] for row in run.rows] == [4, 4]
    assert [row["kv_bytes"]["used"]["total"] for row in run.rows] == [3, 4]
    assert not any("method" in row for row in run.rows)


def test_the_runs_own_limit_of_new_tokens_goes_before_the_samples(monkeypatch) -> None:
    run = answered(monkeypatch, [sample()], decoding={"max_new_tokens": 2})
    assert run.named["max_new_tokens"] == 2 and len(run.named["answer_ids"][0]) == 2
    assert run.method.calls[0][2] == 18 + 2


@pytest.mark.parametrize(("first", "warm"), [(True, False), (False, True), (False, False)])
def test_the_first_batch_warms_up_and_so_do_warm_up_samples(monkeypatch, first, warm) -> None:
    run = answered(monkeypatch, [sample(warm_up=warm)], first=first)
    assert run.rows[0][MEASURED]["warm_up"] is (first or warm)
    assert run.named["observer"].kind == ("cpu_live_tensors" if first else None)  # the census is of the first batch


def test_a_methods_notes_are_each_of_one_row(monkeypatch) -> None:
    run = answered(monkeypatch, [sample(), sample(id="t/1")], notes=[{"chunks": 1}, {"chunks": 2}])
    assert [row["method"] for row in run.rows] == [{"chunks": 1}, {"chunks": 2}]


def test_prompts_are_cut_to_the_models_limit_and_wrapped(monkeypatch) -> None:
    long = "Read: " + "x" * 200
    assert answered(monkeypatch, [sample(prompt=long)]).rows[0]["prompt_tokens"] == 96  # 100 - 4
    run = answered(monkeypatch, [sample(prompt=long)], model={"prompt_limit": 50, "chat": "<{prompt}>"})
    assert run.rows[0]["prompt_tokens"] == 50 and run.rows[0]["truncated"] == 1 + 206 + 2 - 50
    assert run.tokenizer.decode(run.args[2][0, -1:]) == ">"
    own = sample(prompt=long, rules=PromptRules(limit=30))
    assert answered(monkeypatch, [own], model={"prompt_limit": 50}).rows[0]["prompt_tokens"] == 30
    given = sample(rules=PromptRules(ids=tuple(range(5, 65)), limit=20))
    assert answered(monkeypatch, [given]).rows[0]["prompt_tokens"] == 60  # only what the model can hold counts
