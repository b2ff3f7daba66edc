"""Spans of a text as rows: which likelihood is measured, on which cache, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache.progress import Options
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods.base import QUERY_TOKENS
from kvbench.results.samples import MEASURED
from kvbench.runner import span_likelihood
from kvbench.runner.rows import Machine
from kvbench.runner.span_likelihood import TextSpans
from kvbench.tasks.base import Sample
from kvbench.tasks.work import ScoreText
from tests.run_support import ToyTask

WIDTH = 100


class Method:
    """A method that records what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def alone(self) -> Any:
        self.calls.append(("alone",))
        return self

    def check_windows(self, mode: str, prompt: int) -> None:
        self.calls.append(("check", mode, prompt))

    def detach(self, model: Any) -> None:
        self.calls.append(("detach", model))

    def new_cache(self, model: Any, prompts: Any, max_length: int) -> Any:
        self.calls.append(("cache", model, prompts, max_length))

        def bill(row: int) -> Any:
            return SimpleNamespace(as_dict=lambda: {"used": {"total": 10 + row}, "reserved": {"total": 9}})

        return SimpleNamespace(reads_packed=1, path="reference", bill=bill)


def span(name: str, start: int = 0, **changes: Any) -> Sample:
    parts = {"first": 60, "bytes": 123, "document": 5, "mode": "decode", "prefill": 0, "chunk": "auto"}
    work = ScoreText(tuple(range(start, start + WIDTH)), **parts | changes)
    return Sample(id=name, task="text", prompt="", answers=(), max_new_tokens=1, work=work)


def run(monkeypatch, samples, sums=(2.5, 4.0), max_length=WIDTH, report=None) -> Any:
    """The rows, the calls of the three measures, and the method."""
    calls: list[tuple[Any, ...]] = []

    def measure(name: str, cached: bool) -> Any:
        def measured(model: Any, *args: Any, **named: Any) -> torch.Tensor:
            calls.append((name, model, *args, named))
            if "report" in named:
                named["report"](25)
            rows = args[cached].shape[0]
            return torch.tensor(sums[:rows])

        return measured

    monkeypatch.setattr(span_likelihood, "decode_nll", measure("decode", True))
    monkeypatch.setattr(span_likelihood, "simulated_nll", measure("simulated", True))
    monkeypatch.setattr(span_likelihood, "forward_nll", measure("forward", False))
    method: Any = Method()
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    loaded: Any = SimpleNamespace(
        model="the model", max_length=max_length, device=torch.device("cpu"), tokenizer=SimpleNamespace(decode=decode)
    )
    strategy = TextSpans(method, loaded, ToyTask(), Machine("a cpu", "float32"), Options(kernels="reference"))
    return SimpleNamespace(
        rows=strategy.rows(samples, first=True, report=report), calls=calls, method=method, decode=decode
    )


def test_spans_are_decoded_together_and_each_row_is_its_own(monkeypatch) -> None:
    shown: list[Any] = []
    metrics = run(monkeypatch, [span("a"), span("b", 7)], report=lambda share, line: shown.append((share, line)))
    ((name, model, cache, ids, first, named),) = metrics.calls
    assert (name, model, first) == ("decode", "the model", [60, 60])
    assert cache.options == Options(kernels="reference")
    assert ids.tolist() == [list(range(WIDTH)), list(range(7, 7 + WIDTH))]
    assert (named["prompt"], named["chunk"]) == (0, 128)
    assert shown == [(0.5, "a: 25 of 100 tokens")]  # a quarter of each of two samples
    assert ("check", "decode", 0) in metrics.method.calls
    assert metrics.method.calls[-1] == ("cache", "the model", None, WIDTH)
    own, other = metrics.rows
    peaks = own[MEASURED].pop("peak_bytes")
    assert (peaks["prefill"], peaks["decode"], peaks["kind"]) == (None, None, None)
    assert own == {
        "id": "a",
        "task": "text",
        "length": None,
        "prompt_tokens": WIDTH,
        "truncated": 0,
        "prediction": "",
        "tokens": [],
        "finish": "window",
        "scores": {"score": 0.25, "length": 0.0},
        "scorer_version": 1,
        "nll": {"sum": 2.5, "n": 40},
        "window": {"mode": "decode", "prefill": 0, "chunk": 128, "bytes": 123, "document": 5},
        "kv_bytes": {"used": {"total": 10}, "reserved": {"total": 4}},
        MEASURED: {
            "device": "a cpu",
            "dtype": "float32",
            "arithmetic": "float32",
            "warm_up": False,
            "batch_rows": 2,
            "ttft_s": None,
            "step_s": [],
            "decoded": 0,
            "attention": {"reads_packed": True, "path": "reference"},
        },
    }
    assert (other["id"], other["nll"]["sum"], other["kv_bytes"]["used"]["total"]) == ("b", 4.0, 11)


def test_a_prompt_is_the_context_and_what_follows_it_the_question(monkeypatch) -> None:
    metrics = run(monkeypatch, [span("a", prefill=30, chunk=4), span("b", 7, prefill=30, chunk=4)])
    (*_, named) = metrics.calls[0]
    assert (named["prompt"], named["chunk"]) == (30, 4)
    assert metrics.rows[0]["window"]["chunk"] == 4 and metrics.rows[0]["window"]["prefill"] == 30
    prompts = metrics.method.calls[-1][2]
    assert (prompts.starts, prompts.lengths) == ([0, 0], [30, 30])
    assert prompts.context_spans == [(0, 30), (0, 30)]
    assert prompts.input_ids.tolist() == [list(range(30)), list(range(7, 37))]
    assert prompts.queries == [metrics.decode(range(30 + at, 30 + at + QUERY_TOKENS)) for at in (0, 7)]
    assert prompts.decode is metrics.decode


def test_one_pass_without_a_cache_leaves_the_method_out(monkeypatch) -> None:
    metrics = run(monkeypatch, [span("a", mode="fp16", prefill=30)])
    ((name, model, ids, first, named),) = metrics.calls
    assert (name, model, ids.shape, first, named) == ("forward", "the model", (1, WIDTH), [60], {})
    assert metrics.method.calls[-1] == ("detach", "the model")
    (row,) = metrics.rows
    assert row["kv_bytes"] is None and row["window"]["chunk"] is None
    assert row[MEASURED]["attention"] == {"reads_packed": False, "path": "none"}


def test_one_pass_over_what_is_stored_has_a_cache_and_no_prompt(monkeypatch) -> None:
    metrics = run(monkeypatch, [span("a", mode="simulated", prefill=30)])
    ((name, _, cache, _, first, _),) = metrics.calls
    assert (name, first) == ("simulated", [60]) and cache.options == Options(kernels="reference")
    assert metrics.method.calls[-1] == ("cache", "the model", None, WIDTH)
    assert metrics.rows[0]["kv_bytes"]["used"]["total"] == 10 and metrics.rows[0]["window"]["chunk"] is None


def test_spans_with_different_first_tokens_run_together(monkeypatch) -> None:
    metrics = run(monkeypatch, [span("a", first=60), span("b", 7, first=90)])
    assert [(call[3].shape[0], call[4]) for call in metrics.calls] == [(2, [60, 90])]
    assert [row["nll"]["n"] for row in metrics.rows] == [40, 10]


def test_spans_of_different_lengths_run_apart(monkeypatch) -> None:
    """Each row's bytes are those of a cache of its own length."""
    short = replace(span("b"), work=replace(span("b").work, ids=tuple(range(80))))
    metrics = run(monkeypatch, [span("a"), short, span("c"), span("d")])
    assert [tuple(call[3].shape) for call in metrics.calls] == [(1, WIDTH), (1, 80), (2, WIDTH)]
    assert [row["id"] for row in metrics.rows] == ["a", "b", "c", "d"]
    assert [row["nll"]["n"] for row in metrics.rows] == [40, 20, 40, 40]
    assert [row[MEASURED]["batch_rows"] for row in metrics.rows] == [1, 1, 2, 2]


def spans(rows_at_once: Any, *, layout: str = "one device") -> TextSpans:
    loaded: Any = SimpleNamespace(
        model="the model",
        max_length=WIDTH,
        device=torch.device("cpu"),
        tokenizer=SimpleNamespace(decode=str),
        layout=layout,
    )
    method: Any = Method()
    return TextSpans(
        method, loaded, ToyTask(), Machine("a cpu", "float32"), Options(), rows_at_once=rows_at_once, batch_size=3
    )


def test_a_batch_that_does_not_fit_is_halved_if_its_size_was_chosen_here(monkeypatch) -> None:
    tried: list[int] = []

    def measured(model: Any, cache: Any, ids: torch.Tensor, first: Any, **named: Any) -> torch.Tensor:
        tried.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.arange(1.0, len(ids) + 1)

    monkeypatch.setattr(span_likelihood, "decode_nll", measured)
    samples = [span(name) for name in "abcde"]
    rows = spans("auto").rows(samples, first=True, report=None)
    assert tried == [5, 2, 3, 1, 2]
    assert [row["id"] for row in rows] == list("abcde")
    assert [row["nll"]["sum"] for row in rows] == [1, 2, 1, 1, 2]
    for strategy in (spans(5), spans("auto", layout="tensor_parallel")):
        with pytest.raises(torch.OutOfMemoryError):
            strategy.rows(samples, first=True, report=None)
    monkeypatch.setattr(span_likelihood, "decode_nll", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        spans("auto").rows(samples, first=True, report=None)


def test_on_a_cpu_batches_have_the_runs_size_unless_told_otherwise() -> None:
    samples = [span(name) for name in "abcde"]
    assert spans("auto").size(samples) == 3 and spans(4).size(samples) == 4


@pytest.mark.parametrize("sums", [(1.0, math.nan), (math.inf, 1.0)])
def test_a_likelihood_that_is_not_a_number_is_an_error(monkeypatch, sums) -> None:
    with pytest.raises(NonFiniteError, match=r"^a: the likelihood of the text is not a number"):
        run(monkeypatch, [span("a"), span("b")], sums)


def test_a_span_longer_than_the_models_limit_is_refused(monkeypatch) -> None:
    assert len(run(monkeypatch, [span("a")], max_length=WIDTH).rows) == 1
    with pytest.raises(ConfigError, match=r"dataset\.window=100.*model\.max_length=99"):
        run(monkeypatch, [span("a")], max_length=WIDTH - 1)
