"""Captured passes over layers on two devices: on a CPU two names of it stand for them, and tapes for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbench
from kvbench.decoding import recordable
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.sampling import Sampling
from kvbench.decoding.segments import Segments, Twins
from kvbench.methods import load_method
from kvbench.parallel.spread import balanced, connect
from tests import zoo
from tests.decoding.tape import Tape, install, tape_on
from tests.marks import fast
from tests.methods.test_quantspec import small

TWO = [torch.device("cpu"), torch.device("cpu", 0)]
SAMPLED = Sampling(0.9, 0.95, 7)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures on tapes; the second layer's tokens lie on the second device."""
    install(monkeypatch)

    def spread(model: Any, cache: Any, *more: Any) -> None:
        for one in filter(None, (cache, cache.follower)):
            one.layers[1].device = TWO[1]

    monkeypatch.setattr(recordable, "eager_reason", spread)


def answer(method: Any, spread: bool, new: int = 30, **more: Any) -> Any:
    model = zoo.restless.__wrapped__()
    if spread:
        connect(model, balanced(model, TWO))
    ids, mask = zoo.padded_batch([60, 53], seed=3)
    cache = method.new_cache(model, max_length=60 + 50)
    return generate(model, cache, ids, mask, max_new_tokens=new, graphs="always" if spread else "never", **more)


METHODS: dict[str, tuple[Any, Any]] = {
    "fp16, sampled": (lambda: load_method("fp16"), SAMPLED),
    "kivi": (lambda: load_method("kivi", quantizer="int4", residual=32), None),
    "logquant, a format that comes up later": (lambda: load_method("logquant", quantizer="int2", window=24), None),
    "streamingllm": (lambda: load_method("streamingllm", budget=32), None),
    "quantspec, sampled drafts": (lambda: small(16, gamma=2), SAMPLED),
    "quantspec, greedy": (lambda: small(16, gamma=4), None),
    "quantspec, drafts with their own cache": (
        lambda: small(16, gamma=3, draft="streamingllm", draft_options={"budget": 32}),
        None,
    ),
}


#: one of each kind of cache; of QuantSpec's rounds those that are drafted greedily, and those with two caches
FAST = ["kivi", "logquant, a format that comes up later", "quantspec, greedy", "quantspec, drafts with their own cache"]


@pytest.mark.parametrize("name", fast(METHODS, FAST))
def test_graphs_of_two_devices_say_what_eager_steps_on_one_say(
    name: str, tapes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, sampling = METHODS[name]
    captured = answer(method(), True, sampling=sampling)
    assert captured.stepping.startswith("graph in ") and int(captured.stepping.split()[2]) > 1
    with monkeypatch.context() as patch:
        patch.setattr(recordable, "eager_reason", lambda *asked: "because")
        eager = answer(method(), False, sampling=sampling)
    assert captured.tokens == eager.tokens
    assert [r.accepted for r in captured.rounds] == [r.accepted for r in eager.rounds]


def test_a_graph_ends_where_the_device_changes() -> None:
    """Graphs and copies in order; what the second graph reads comes from the first one at each replay."""
    x, lengths, seen = torch.ones(3), torch.zeros(1), []
    twin = torch.zeros(1)
    segments = Segments(lambda device: [(lengths, twin)] if device == TWO[1] else [], tape_on)

    def opened() -> torch.device | None:
        seen.append(None if Tape.open is None else Tape.open.device)
        return seen[-1]

    with segments.recording(TWO[0]):
        opened()
        doubled = x * 2
        [there] = segments.cross([doubled], TWO[1])
        opened()
        summed = there + twin
        [back] = segments.cross([summed], TWO[0])
        opened()
        out = back - 1
    opened()
    assert seen == [TWO[0], TWO[1], TWO[0], None] and segments.graphs == 3
    for value in (5.0, 7.0):
        x.fill_(value)
        lengths.fill_(10 * value)
        segments.replay()
        assert out.tolist() == [12 * value - 1] * 3


def test_a_pass_that_fails_ends_its_graph() -> None:
    segments = Segments(lambda device: [], tape_on)
    with pytest.raises(ValueError, match="no more"), segments.recording(TWO[0]):
        segments.cross([], TWO[1])
        raise ValueError("no more")
    with tape_on(TWO[0]):  # another one may begin
        pass


def test_a_twin_is_only_where_layers_are() -> None:
    """A tensor that all layers read where it is has no copies."""
    model = zoo.model("llama")
    cache = kvbench.load_method("fp16").new_cache(model)
    ids, _ = zoo.padded_batch([20], seed=1)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache)
    home = torch.arange(3)
    assert Twins(home, cache.layers).pairs(TWO[0]) == [] and Twins(home, cache.layers).on(TWO[0]) is home
    cache.layers[1].device = TWO[1]
    twins = Twins(home, cache.layers)
    [(source, copy)] = twins.pairs(TWO[1])
    assert source is home and twins.on(TWO[1]) is copy is not home and copy.tolist() == [0, 0, 0]
