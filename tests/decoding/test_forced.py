"""Teacher-forced steps in the form in which a CUDA graph records them, on a CPU: the likelihoods of eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.attention import fused, phases
from kvbench.attention.phases import NotServed
from kvbench.attention.recorded import recording
from kvbench.decoding import forced, graphs, perplexity
from kvbench.decoding.forced import forced_nll
from kvbench.decoding.passes import prefill
from kvbench.decoding.perplexity import decode_nll
from kvbench.methods import load_method
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part

PROMPT, WIDTH = 40, 90
SETTINGS = {
    "fp16": ("fp16", {}),
    "kivi": ("kivi", {"quantizer": "int4", "residual": 32}),
    "streamingllm": ("streamingllm", {"budget": 48}),
    "h2o": ("h2o", {"budget": 0.4}),
}


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve recorded steps by the oracle."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))


def text() -> tuple[torch.Tensor, torch.Tensor]:
    return zoo.padded_batch([WIDTH, WIDTH - 9], seed=6)


def started(name: str) -> tuple[Any, Any, Any, torch.Tensor, torch.Tensor]:
    model, (kind, options) = zoo.restless(), SETTINGS[name]
    ids, mask = text()
    cache = load_method(kind, **options).new_cache(model, max_length=WIDTH)
    prefill(model, cache, ids[:, :PROMPT], mask[:, :PROMPT])
    return model, cache, ids, mask, mask[:, :PROMPT].sum(-1)


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_have_the_likelihoods_of_eager_ones(oracle, name) -> None:
    """Rows with padding, and another first scored token in each."""
    kind, options = SETTINGS[name]
    method, firsts = load_method(kind, **options), [PROMPT, 67]
    model, cache, ids, mask, lengths = started(name)
    shown: list[int] = []
    computed = forced_nll(model, cache, ids, firsts, lengths, shown.append, capture=False)
    # the first of the scored tokens is predicted by the prompt, not by a step
    whole = decode_nll(model, method.new_cache(model, max_length=WIDTH), ids, firsts, mask=mask, prompt=PROMPT, chunk=1)
    again = method.new_cache(model, max_length=WIDTH)
    with torch.inference_mode():
        first = -prefill(model, again, ids[:, :PROMPT], mask[:, :PROMPT]).log_softmax(-1)[0, ids[0, PROMPT]]
    assert computed is not None and computed.dtype == torch.float64
    assert torch.allclose(computed, (whole - torch.tensor([float(first), 0.0])).double(), rtol=1e-6)
    assert cache.get_seq_length() == WIDTH - 1 and shown == [WIDTH]
    method.detach(model)


def test_a_step_that_cannot_be_recorded_leaves_the_cache_as_it_was(monkeypatch) -> None:
    model, cache, ids, _, lengths = started("streamingllm")

    def refuse(*args: Any) -> None:
        raise NotServed("no kernel")

    monkeypatch.setattr(fused, "check_plain_causal", refuse)
    assert forced_nll(model, cache, ids, [PROMPT] * 2, lengths, capture=False) is None
    assert cache.get_seq_length() == PROMPT
    assert forced_nll(model, cache, ids, [PROMPT] * 2, lengths, graphs="always") is None  # no graphs on a CPU
    assert forced_nll(model, cache, ids[:, : PROMPT + 1], [PROMPT] * 2, lengths, capture=False) is None  # no step


def test_only_methods_that_go_token_by_token_are_captured(monkeypatch) -> None:
    asked: list[Any] = []

    def captured(model: Any, cache: Any, ids: torch.Tensor, *args: Any) -> None:
        asked.append((type(cache.method).__name__, args[3:]))

    monkeypatch.setattr(perplexity, "forced_nll", captured)
    model, ids = zoo.model(), text()[0][:1, :30]
    for name in ("fp16", "kivi", "atom", "logquant", "streamingllm", "h2o"):
        method = load_method(name)
        for chunk in (1, 20):
            decode_nll(model, method.new_cache(model), ids, 1, chunk=chunk, graphs="always", compile=True)
        method.detach(model)
    assert asked == [("StreamingLLM", ("always", True)), ("H2O", ("always", True))]


def test_progress_is_reported_from_time_to_time(oracle, monkeypatch) -> None:
    monkeypatch.setattr(forced, "REPORTED", 20)
    model, cache, ids, _, lengths = started("fp16")
    shown: list[int] = []
    forced_nll(model, cache, ids, [PROMPT] * 2, lengths, shown.append, capture=False)
    assert shown == [PROMPT + 21, PROMPT + 41, WIDTH]


def test_warm_ups_of_a_capture_leave_no_trace(oracle) -> None:
    sums = []
    for times in (0, 2):
        model, cache, ids, _, lengths = started("fp16")
        step = forced.Forced(model, cache, ids, [PROMPT] * 2, lengths)
        step.advance()
        with torch.inference_mode(False), torch.no_grad(), recording(model, step.serve):
            for _ in range(times):
                graphs.rehearse(step)
            step.run()
        assert step.number.tolist() == [PROMPT + 1] and torch.equal(step.tokens, ids[:, PROMPT + 1 : PROMPT + 2])
        sums.append(step.total.tolist())
    assert sums[0] == sums[1] and min(sums[0]) > 0
