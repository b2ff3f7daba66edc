"""Number of spans that run at once on a GPU: limits of memory and of use, on a made-up device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.models.load import Shape
from kvbench.runner import span_likelihood
from kvbench.runner.span_likelihood import cache_bytes, even, pass_bytes, rows_at_once
from kvbench.tasks.work import ScoreText
from tests import zoo

#: 7B
SHAPE = Shape("llama", 32, 32, 32, 128, 4096, 32000)
GIB = 1 << 30


def span(width: int = 4096, mode: str = "decode", chunk: Any = "auto") -> ScoreText:
    return ScoreText(tuple(range(width)), 1, width, 0, mode, 0, chunk)


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that gives the rows for a free memory in GiB, on a GPU that is made up."""

    def rows(name: str, free: float, work: ScoreText | None = None, limit: float | None = None) -> int:
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 11 * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((free - 1) * GIB, 0))
        model = zoo.model()
        loaded: Any = SimpleNamespace(
            model=model,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            storage=torch.bfloat16,
            architecture=SHAPE,
            layout="one device",
        )
        return rows_at_once(load_method(name).alone(), loaded, work or span(), limit)

    return rows


def test_as_many_as_make_a_pass_worth_it(on_gpu) -> None:
    """512 tokens of 16 rows make 8192; without a cache a pass is the whole span; single steps take more rows."""
    assert on_gpu("fp16", 500.0) == on_gpu("kivi", 500.0) == 16
    assert on_gpu("kivi", 500.0, span(chunk=128)) == 64
    assert on_gpu("kivi", 500.0, span(256)) == 32
    assert on_gpu("fp16", 500.0, span(mode="fp16")) == 2
    assert on_gpu("streamingllm", 500.0) == on_gpu("h2o", 500.0) == on_gpu("kivi", 500.0, span(chunk=1)) == 64


def test_as_many_as_fit(on_gpu) -> None:
    """A span of 4096 tokens takes 2 GiB in full precision, and its pass less than half of that."""
    assert cache_bytes(load_method("fp16"), SHAPE, span(), 2) == 2 * GIB
    each = 2 * GIB + pass_bytes(SHAPE, 512, 4096, 512, 2)
    assert 2.3 * GIB < each < 3 * GIB
    rows = on_gpu("fp16", 24.0)
    assert rows == int((0.8 * 24 * GIB - 4096 * 32000 * 12) // (2 * GIB + pass_bytes(SHAPE, 96, 4096, 512, 2)))
    assert 5 <= rows <= 8
    assert on_gpu("kivi", 24.0) > rows  # its cache is smaller
    assert on_gpu("fp16", 100.0, limit=34.0) == rows  # 10 GiB are allocated
    assert on_gpu("fp16", 1.0) == 1  # it may fail, but the run says so


def test_a_cache_is_predicted_by_the_methods_formula() -> None:
    method = load_method("kivi")
    how = {"layers": 32, "query_heads": 32, "heads": 32, "channels": 128}
    assert cache_bytes(method, SHAPE, span(), 2) == kv_bytes(method, 4096, prompt=1, **how).total
    assert cache_bytes(method, SHAPE, span(mode="fp16"), 2) == 0


def test_a_method_without_a_formula_counts_as_full_precision(monkeypatch) -> None:
    method = load_method("kivi")
    monkeypatch.setattr(
        span_likelihood, "kv_bytes", lambda *args, **named: type(method).__mro__[2].layer_bytes(method, None)
    )
    assert cache_bytes(method, SHAPE, span(), 2) == 2 * GIB


def test_batches_of_nearly_equal_size() -> None:
    assert [even(count, 16) for count in (83, 16, 17, 5, 0)] == [14, 16, 9, 5, 16]
