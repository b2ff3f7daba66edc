"""Captured speculation's code against eager rounds: pass by pass on a CPU, with an oracle in the kernel's place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbench.attention import fused, phases
from kvbench.decoding import speculative
from kvbench.decoding.graphs import Captured, NotCaptured
from kvbench.decoding.passes import prefill
from kvbench.decoding.rounds import CapturedRounds
from kvbench.decoding.sampling import Sampling
from kvbench.decoding.step import Recorded
from kvbench.decoding.stopping import Stopping
from kvbench.methods import load_method
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part

#: tokens of the prompts, of an answer (groups of 32 fill up at 160), drafts of a round
PROMPTS, NEW, GAMMA = [150, 143], 26, 4


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve recorded passes by the oracle."""
    monkeypatch.setattr(phases, "part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))


def made(**options: Any) -> Any:
    method = load_method("quantspec", gamma=GAMMA, **options)
    method.quantizer = replace(method.quantizer, key=replace(method.quantizer.key, group_size=32))
    return method


def rounds(method: Any, captured: bool, sampling: Sampling) -> tuple[Any, Any, Any]:
    """Tokens, rounds and the cache of a padded batch of two."""
    model = zoo.restless()
    ids, mask = zoo.padded_batch(PROMPTS, seed=3)
    cache = method.new_cache(model, max_length=max(PROMPTS) + NEW)
    token = prefill(model, cache, ids, mask).argmax(-1)
    drafter = None
    if captured:
        drafter = CapturedRounds(model, cache, method.speculation, sampling, 2, capture=False)
        drafter.prepare()
        assert cache.get_seq_length() == max(PROMPTS)
    stopping = Stopping(2, (), (), None)
    rest = (stopping, sampling, sampling.generators(2), NEW, 0, method.speculation)
    return stopping.tokens, speculative.decode(model, cache, token, *rest, drafter), cache


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": "streamingllm", "draft_options": {"budget": 64, "sinks": 4}},
        {"draft": "kivi", "draft_options": {"quantizer": "int2", "residual": 32}},
        {"sensitive_layers": 1},
    ],
    ids=["upper", "streamingllm", "kivi", "an exact layer"],
)
@torch.inference_mode()
def test_recorded_rounds_are_eager_rounds(options: dict[str, Any], sampling: Sampling, oracle: None) -> None:
    """Tokens, accepted drafts, bytes: a recorded round drafts gamma tokens even where fewer may be accepted."""
    tokens, mine, cache = rounds(made(**options), True, sampling)
    wanted, eager, other = rounds(made(**options), False, sampling)
    assert tokens == wanted
    assert [(r.accepted, r.emitted, r.drafted) for r in mine] == [(r.accepted, r.emitted, r.drafted) for r in eager]
    assert any(accepted < GAMMA for r in mine for accepted in r.accepted)
    assert cache.bill().used == other.bill().used
    assert cache.path == "oracle"


@torch.inference_mode()
def test_a_draft_that_no_kernel_reads_leaves_the_caches_alone() -> None:
    """H2O observes attention: the target's cache and the draft's are as they were."""
    model = zoo.model("llama", torch.bfloat16)
    ids, mask = zoo.padded_batch(PROMPTS, seed=3)
    method = made(draft="h2o", draft_options={"budget": 64})
    cache = method.new_cache(model, max_length=max(PROMPTS) + NEW)
    prefill(model, cache, ids, mask)
    drafter = CapturedRounds(model, cache, method.speculation, Sampling(), 2, capture=False)
    with pytest.raises(NotCaptured, match="needs attention weights"):
        drafter.prepare()
    assert cache.get_seq_length() == cache.follower.get_seq_length() == max(PROMPTS)


@torch.inference_mode()
def test_recording_anew_is_in_no_rounds_time(oracle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of no known length grow in the middle of a round, and a capture takes a second."""

    def slow(self: Captured) -> None:
        record(self)
        self.seconds += 100.0

    record = Captured.record
    monkeypatch.setattr(Captured, "record", slow)
    model, method = zoo.restless(), made(target="fp16", draft="kivi", draft_options={"quantizer": "int2"})
    ids, _ = zoo.padded_batch([PROMPTS[0]], seed=3)
    cache = method.new_cache(model)
    token = prefill(model, cache, ids, None).argmax(-1)
    drafter = CapturedRounds(model, cache, method.speculation, Sampling(), 1, capture=False)
    drafter.prepare()
    prepared, stopping = drafter.seconds, Stopping(1, (), (), None)
    rest = (stopping, Sampling(), Sampling().generators(1), 40, 0, method.speculation)
    done = speculative.decode(model, cache, token, *rest, drafter)
    assert drafter.seconds >= prepared + 100.0
    assert sum(each.seconds for each in done) < 0.0  # as the hundred seconds did not really pass


@torch.inference_mode()
def test_what_was_not_compiled_is_not_called_so() -> None:
    """Drafts with weights of their own; a model whose layers are in no list."""
    model, plain = zoo.restless(), made()
    cache = plain.new_cache(model)
    mine = CapturedRounds(model, cache, plain.speculation, Sampling(), 1, compile=True, capture=False)
    assert mine.stepping == "graph, compiled"
    mine.draft.compile = False
    assert mine.stepping == "graph"
    own = made(draft_weights="int4")
    other = CapturedRounds(model, own.new_cache(model), own.speculation, Sampling(), 1, compile=True, capture=False)
    assert other.stepping == "graph (not compiled: the draft has weights of its own)"
    own.detach(model)
    bare = Captured(Recorded(torch.nn.Linear(2, 2), cache, 1, 1, torch.device("cpu")), compile=True)  # type: ignore[arg-type]
    assert bare.stepping.startswith("graph (not compiled")
