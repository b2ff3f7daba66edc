"""Decoding of the rest of an answer: captured where possible, otherwise eagerly with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.attention import fused, phases
from kvbench.cache.kernels import roll_together
from kvbench.decoding import graphs, recordable, recorded, rounds
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.passes import prefill
from kvbench.decoding.recorded import Step
from kvbench.decoding.sampling import Sampling
from kvbench.errors import CacheError
from kvbench.methods import load_method
from kvbench.util.attachment import Placement, record_placement
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part
from tests.methods.test_quantspec import small

SAMPLED = Sampling(0.9, 0.95, 7)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes recorded by an oracle on a CPU, which no reason keeps from being tried."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))
    monkeypatch.setattr(recordable, "eager_reason", lambda *asked: None)
    plain = graphs.Captured.__init__

    def on_cpu(self: Any, step: Any, **options: Any) -> None:
        plain(self, step, **{**options, "capture": False})

    monkeypatch.setattr(graphs.Captured, "__init__", on_cpu)


def answer(method: Any, **more: Any) -> Any:
    model = zoo.restless()
    ids, mask = zoo.padded_batch([60, 53], seed=3)
    cache = method.new_cache(model, max_length=60 + 20)
    return generate(model, cache, ids, mask, **{"max_new_tokens": 9, **more})


@pytest.mark.parametrize(("gamma", "sampling"), [(0, None), (2, SAMPLED)], ids=["greedy", "sampled drafts"])
def test_a_captured_answer_is_the_eager_one_and_says_so(gamma: int, sampling: Any, oracle: None) -> None:
    method = small(16, gamma=gamma)
    captured = answer(method, sampling=sampling, graphs="always")
    assert captured.stepping == "graph" and captured.capture_s > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordable, "eager_reason", lambda *asked: "because")
        eager = answer(method, sampling=sampling, graphs="always")
    assert eager.stepping == "eager (because)" and eager.capture_s == 0.0
    assert captured.tokens == eager.tokens
    assert len(captured.step_s) == len(eager.step_s) > 0
    assert len(captured.rounds) == len(eager.rounds) == (len(captured.step_s) if gamma else 0)


@pytest.mark.parametrize("gamma", [0, 2])
def test_an_answer_that_cannot_be_captured_goes_on_eagerly_with_the_same_draws(
    gamma: int, oracle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = small(16, gamma=gamma)
    wanted = answer(method, sampling=SAMPLED)

    def fail(self: Any) -> None:
        raise recordable.NotCaptured("no room")

    monkeypatch.setattr(graphs.Captured, "record" if gamma else "first", fail)
    computed = answer(method, sampling=SAMPLED, graphs="always")
    assert computed.stepping == "eager (no room)" and computed.tokens == wanted.tokens


def test_what_is_compiled_is_asked_for(oracle: None) -> None:
    for gamma in (0, 2):
        computed = answer(small(16, gamma=gamma), graphs="always", compile=True, max_new_tokens=3)
        assert computed.stepping == "graph, compiled"


def test_reasons_to_capture_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = zoo.model.__wrapped__("llama"), torch.device("cuda")
    method = load_method("fp16")
    cache = method.new_cache(model)
    speculation = load_method("quantspec").speculation

    def reason(choice: str = "auto", steps: int = recordable.WORTH, where: Any = device, how: Any = None) -> Any:
        return recordable.eager_reason(model, cache, choice, steps, where, how)  # type: ignore[arg-type]

    few = recordable.WORTH - 1
    assert reason() is None and reason(steps=few) == f"{few} steps: too few for a capture"
    assert reason("always", 1) is None and reason(steps=0) == "no steps"
    assert reason("never") == "runtime.graphs=never" and reason(where=torch.device("mps")) == "no CUDA graphs on mps"
    record_placement(model, Placement(team=SimpleNamespace()))
    assert reason().startswith("tensor parallelism") and reason("always") is None
    record_placement(model, Placement())
    cache.lead(method.new_cache(model))
    assert "with another one" in str(reason()) and reason(how=speculation) is None
    cache.lead(None)
    model.lm_head.to("meta")
    assert "not placed there by runtime.device_map" in str(reason())
    record_placement(model, Placement(devices=(torch.device("cpu"), torch.device("meta"))))
    assert reason() is None and reason(how=speculation) is None


def started(method: Any) -> tuple[Any, graphs.Captured]:
    model = zoo.restless()
    ids, mask = zoo.padded_batch([60, 53], seed=3)
    cache = method.new_cache(model, max_length=80)
    token = prefill(model, cache, ids, mask).argmax(-1)
    return cache, graphs.Captured(Step(model, cache, token, mask.sum(-1), Sampling()))


@torch.inference_mode()
def test_a_capture_that_fails_leaves_the_cache_and_memory_that_ends_is_no_reason(
    oracle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, captured = started(load_method("fp16"))
    failure: Exception = RuntimeError("  not permitted when capturing\nand more lines")

    def fail(self: Any) -> None:
        assert cache.get_seq_length() == 61  # the step's own token has its place
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(graphs.Captured, "record", fail)
        with pytest.raises(recordable.NotCaptured, match=r"^not permitted when capturing$"):
            captured.first()
        assert cache.get_seq_length() == 60
        failure = torch.OutOfMemoryError("full")
        with pytest.raises(torch.OutOfMemoryError):
            captured.first()
        cache.take_back([1, 1])
    captured.first()
    assert captured.captures == 1 and cache.get_seq_length() == 61
    captured.step.version += 1  # a buffer has moved
    with monkeypatch.context() as patch:
        patch.setattr(graphs.Captured, "record", lambda self: fail_again())

        def fail_again() -> None:
            raise failure

        with pytest.raises(torch.OutOfMemoryError):
            captured.next()
        failure = RuntimeError("moved")
        with pytest.raises(
            CacheError, match=r"the next step cannot be captured: moved\.\n  hint: set runtime\.graphs=never"
        ):
            captured.next()


def test_the_reason_of_an_error_is_its_first_line() -> None:
    assert graphs.reason(ValueError("\n a\n b")) == "a"
    assert graphs.reason(ValueError()) == "ValueError"
    assert graphs.reason(ValueError("x" * 300)) == "x" * 200


def test_tokens_arrive_in_the_order_of_their_steps() -> None:
    """The tensor is overwritten by every step; copies that were read are used again."""
    source = torch.tensor([[1], [2]])
    tokens = graphs.Tokens(source)
    for number in range(3):
        source += 10
        tokens.fetch()
        assert len(tokens) == number + 1
    assert [tokens.wait(), tokens.wait()] == [[11, 12], [21, 22]] and len(tokens) == 1
    source += 10
    tokens.fetch()
    assert [tokens.wait(), tokens.wait()] == [[31, 32], [41, 42]] and len(tokens) == 0


@torch.inference_mode()
def test_kernels_are_compiled_once_for_each_kind_of_segment(oracle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step: keys and values of one format each, though there are two layers of them."""
    packs: list[Any] = []
    monkeypatch.setattr(recorded, "warm_packing", lambda segment, x: packs.append((segment.side, tuple(x.shape))))
    _, captured = started(load_method("kivi", quantizer="int4", residual=32))
    captured.step.warm()
    assert packs == [("key", (2, 2, 1, 64)), ("value", (2, 2, 1, 64))]
    rolls: list[Any] = []
    monkeypatch.setattr(roll_together, "warm_rolling", lambda window: rolls.append(window.turn is None))
    _, captured = started(load_method("streamingllm", budget=32))
    captured.step.warm()
    assert rolls == [False, True] and len(packs) == 2  # keys are turned, values are not
    _, captured = started(load_method("snapkv", budget=32, window=8))
    captured.step.warm()  # settles nothing
    assert (len(packs), len(rolls)) == (2, 2)


@torch.inference_mode()
def test_a_model_that_skips_a_layer_is_refused(oracle: None) -> None:
    _, captured = started(load_method("fp16"))
    captured.step.advance()
    captured.step.through = SimpleNamespace()  # type: ignore[assignment]
    captured.step.model = lambda **given: SimpleNamespace(logits=torch.zeros(2, 1, 5))  # type: ignore[assignment]
    with pytest.raises(phases.NotServed, match="the model ran attention 0 times for 2 layers"):
        captured.step.forward()
    with pytest.raises(NotImplementedError, match="Recorded must define"):
        recorded.Recorded.run(recorded.Recorded.__new__(recorded.Recorded))


@torch.inference_mode()
def test_captured_rounds_are_prepared_with_the_draft_s_settings(oracle: None) -> None:
    """The engine that a run gets: compiled, though the draft has weights of its own."""
    model, method = zoo.restless(), small(16, gamma=3, draft_weights="int4")
    ids, _ = zoo.padded_batch([60], seed=3)
    cache = method.new_cache(model, max_length=90)
    prefill(model, cache, ids, None)
    engine = rounds.captured_rounds(model, cache, method.speculation, Sampling(), 1, True)
    assert (engine.draft.captures, engine.verifications[3].captures) == (1, 1) and engine.stepping == "graph, compiled"
    assert engine.verifications[3].step.tokens.shape == (1, 4) and engine.draft.step.upper
    assert not engine.verifications[3].step.upper and cache.get_seq_length() == 60
    assert engine.seconds >= engine.draft.seconds + engine.verifications[3].seconds > 0
    method.detach(model)


def test_only_answers_are_decoded_with_the_limit_less_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(recordable, "eager_reason", lambda model, cache, how, steps, *more: asked.append(steps) or "x")
    assert len(answer(load_method("fp16")).tokens[0]) == 9 and asked == [8]
