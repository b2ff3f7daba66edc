"""Captured speculation's code against eager rounds: pass by pass on a CPU, with an oracle in the kernel's place."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbench.attention import fused, phases
from kvbench.decoding import speculative
from kvbench.decoding.graphs import Captured
from kvbench.decoding.passes import prefill
from kvbench.decoding.recordable import NotCaptured
from kvbench.decoding.recorded import Recorded
from kvbench.decoding.rounds import CapturedRounds
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.decoding.speculative import replay
from kvbench.errors import CacheError, NonFiniteError
from kvbench.methods import load_method
from kvbench.models import int4
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part
from tests.marks import fast

#: tokens of the prompts, of an answer (groups of 32 fill up at 160), drafts of a round
PROMPTS, NEW, GAMMA = [150, 143], 26, 4


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve recorded passes by the oracle."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))


def made(**options: Any) -> Any:
    method = load_method("quantspec", **{"gamma": GAMMA, **options})
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
    return stopping.tokens, speculative.speculative_decode(model, cache, token, *rest, drafter), cache


GREEDY, SAMPLED = Sampling(), Sampling(0.8, 0.95, 7)
RECORDED: dict[str, dict[str, Any]] = {
    "upper": {},
    "streamingllm": {"draft": "streamingllm", "draft_options": {"budget": 64, "sinks": 4}},
    "kivi": {"draft": "kivi", "draft_options": {"quantizer": "int2", "residual": 32}},
    "an exact layer": {"sensitive_layers": 1},
}


@pytest.mark.parametrize(
    ("name", "sampling"),
    fast(
        itertools.product(RECORDED, (GREEDY, SAMPLED)),
        [("upper", SAMPLED), ("streamingllm", GREEDY), ("kivi", SAMPLED), ("an exact layer", GREEDY)],
    ),
    ids=lambda case: case if isinstance(case, str) else "sampled" if case.temperature else "greedy",
)
@torch.inference_mode()
def test_recorded_rounds_are_eager_rounds(name: str, sampling: Sampling, oracle: None) -> None:
    """Tokens, accepted drafts, bytes: a recorded round drafts gamma tokens even where fewer may be accepted."""
    tokens, mine, cache = rounds(made(**RECORDED[name]), True, sampling)
    wanted, eager, other = rounds(made(**RECORDED[name]), False, sampling)
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
    monkeypatch.setattr("kvbench.decoding.rounds.time.perf_counter", lambda: 0.0)  # no other time passes
    model, method = zoo.restless(), made(target="fp16", draft="kivi", draft_options={"quantizer": "int2"})
    ids, _ = zoo.padded_batch([PROMPTS[0]], seed=3)
    cache = method.new_cache(model)
    token = prefill(model, cache, ids, None).argmax(-1)
    drafter = CapturedRounds(model, cache, method.speculation, Sampling(), 1, capture=False)
    drafter.prepare()
    prepared, stopping = drafter.seconds, Stopping(1, (), (), None)
    rest = (stopping, Sampling(), Sampling().generators(1), 40, 0, method.speculation)
    done = speculative.speculative_decode(model, cache, token, *rest, drafter)
    assert prepared == 200.0 and drafter.seconds > prepared and drafter.seconds % 100.0 == 0.0
    assert sum(each.seconds for each in done) == prepared - drafter.seconds  # what did not really pass was taken off


@torch.inference_mode()
def test_what_was_not_compiled_is_not_called_so() -> None:
    """A model whose layers are in no list."""
    model, plain = zoo.restless(), made()
    cache = plain.new_cache(model)
    mine = CapturedRounds(model, cache, plain.speculation, Sampling(), 1, compile=True, capture=False)
    assert mine.stepping == "graph, compiled"
    mine.draft.compile = False
    assert mine.stepping == "graph"
    bare = Captured(Recorded(torch.nn.Linear(2, 2), cache, 1, 1, torch.device("cpu")), compile=True)  # type: ignore[arg-type]
    assert bare.stepping.startswith("graph (not compiled")


EXACT = {
    "upper": {},
    "int4 weights": {"draft_weights": "int4_all"},
    "full, int4 weights": {"draft": "full", "draft_weights": "int4"},
    "streamingllm": {"draft": "streamingllm", "draft_options": {"budget": 64, "sinks": 4}},
    "snapkv": {"draft": "snapkv", "draft_options": {"window": 8, "budget": 0.5}},
    "kivi": {"draft": "kivi", "draft_options": {"residual": 32}},
    "logquant": {"draft": "logquant", "draft_options": {"window": 16}},
    "fp16 target": {"draft": "streamingllm", "draft_options": {"budget": 64, "sinks": 4}, "target": "fp16"},
}


def decoded(method: Any, lengths: list[int], new: int, sampling: Any = None, eos: tuple[int, ...] = ()) -> Any:
    """Tokens, rounds and the cache of captured rounds, and the prompts."""
    model, batch = zoo.restless(), len(lengths)
    ids, mask = zoo.padded_batch(lengths, seed=3)
    cache = method.new_cache(model, max_length=max(lengths) + new)
    token = prefill(model, cache, ids, mask).argmax(-1)
    sampling = sampling or Sampling()
    engine = CapturedRounds(model, cache, method.speculation, sampling, batch, capture=False)
    engine.prepare()
    stopping = Stopping(batch, eos, (), None)
    rest = (stopping, sampling, sampling.generators(batch), new, 0, method.speculation)
    computed = speculative.speculative_decode(model, cache, token, *rest, engine)
    int4.detach(model)
    return stopping.tokens, computed, cache, ids, engine


def alone(method: Any, ids: Any, points: Any, new: int) -> list[int]:
    """Tokens of the target without a draft, packed at the same points; no two of them tied."""
    tokens, gaps = replay(zoo.restless(), method.alone().new_cache(zoo.restless()), ids, points, new)
    assert min(gaps) > 1e-4
    return tokens


@pytest.mark.parametrize(
    ("gamma", "batch"),
    fast(itertools.product(range(1, 9), (1, 4)), [(1, 1), (4, 1), (8, 1), (2, 4)]),
)
@torch.inference_mode()
def test_greedy_rounds_give_the_target_s_own_tokens(gamma: int, batch: int, oracle: None) -> None:
    """Whatever is accepted; packed at the same points; the target's cache holds the same bytes."""
    method = made(gamma=gamma)
    lengths = [150 - 13 * row for row in range(batch)]
    tokens, found, cache, ids, _ = decoded(method, lengths, 40)
    assert any(n > 0 for r in found for n in r.accepted) and any(n < gamma for r in found for n in r.accepted)
    for row, length in enumerate(lengths):
        assert tokens[row] == alone(method, ids[row : row + 1, -length:], {r.settled[row] for r in found}, 40)
        assert cache.layers[0].real_tokens(row) == length + 39
    assert len(found) > 39 // (gamma + 1) and sum(r.emitted[0] for r in found) == 39


@pytest.mark.parametrize("name", fast(EXACT, ["int4 weights", "snapkv", "logquant", "fp16 target"]))
@torch.inference_mode()
def test_every_draft_is_verified_to_the_target_s_tokens(name: str, oracle: None) -> None:
    method = made(**EXACT[name])
    tokens, found, cache, ids, _ = decoded(method, PROMPTS, 40)
    for row, length in enumerate(PROMPTS):
        assert tokens[row] == alone(method, ids[row : row + 1, -length:], {r.settled[row] for r in found}, 40)
    if cache.follower is not None:
        assert cache.follower.get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 7)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_an_end_of_sequence_among_the_drafts_ends_a_row_as_in_eager_rounds(sampling: Sampling, oracle: None) -> None:
    """The device has counted more tokens than the row has; the other row goes on over a cache of the right lengths."""
    method = made(draft="fp16", target="fp16")  # every draft is accepted
    free = decoded(method, PROMPTS, NEW, sampling)[0]
    place = next(i for i in range(2, 5) if free[1][i] not in free[1][:i] and free[1][i] not in free[0][:i])
    eos = (free[1][place],)
    tokens, found, cache, _, _ = decoded(method, PROMPTS, NEW, sampling, eos)
    assert tokens[1] == free[1][:place] and len(tokens[0]) > place
    assert tokens[0] == (free[0][: free[0].index(eos[0])] if eos[0] in free[0] else free[0])
    ended = next(r for r in found if r.emitted[1] <= r.accepted[1])
    assert ended.emitted[1] == place and all(r.emitted[1] == 0 for r in found[found.index(ended) + 1 :])
    assert cache.layers[0].real_tokens(1) == PROMPTS[1] + place


@pytest.mark.parametrize(
    ("options", "wanted", "new"),
    [({}, range(3, 5), 120), ({"draft": "snapkv", "target": "fp16"}, range(1), 50)],
    ids=["groups", "nothing packed"],
)
@torch.inference_mode()
def test_the_host_updates_the_cache_before_a_round_only_to_pack(
    options: dict[str, Any], wanted: range, new: int, oracle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 32 tokens: once in 32 tokens, and not with a target that packs nothing."""
    flushes: list[int] = []
    flush = CapturedRounds._flush
    monkeypatch.setattr(CapturedRounds, "_flush", lambda self: flushes.append(1) or flush(self))
    decoded(made(**options), PROMPTS[:1], new)
    assert len(flushes) in wanted


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 7)], ids=["greedy", "sampled"])
@torch.inference_mode()
@pytest.mark.slow  # 5 s
def test_a_forced_acceptance_is_drawn_from_the_rows_generators(sampling: Sampling, oracle: None) -> None:
    """Eager and captured rounds accept the same numbers: all, none, or as chance has it."""
    for forced in (0.0, 0.6, 1.0):
        method = made(forced_acceptance=forced)
        mine = rounds(method, True, sampling)
        eager = rounds(method, False, sampling)
        assert mine[0] == eager[0]
        counts = [[(r.accepted, r.emitted, r.drafted) for r in found[1]] for found in (mine, eager)]
        assert counts[0] == counts[1]
        drafted, accepted = (sum(sum(getattr(r, name)) for r in mine[1]) for name in ("drafted", "accepted"))
        assert accepted == {0.0: 0, 1.0: drafted}.get(forced, accepted) and (forced in (0.0, 1.0) or accepted > 0)


@torch.inference_mode()
def test_gamma_is_chosen_for_each_round_and_its_verification_captured_once(
    oracle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many drafts as the chooser says, in both engines; every round's times are reported to it but the last's."""
    wanted = [4, 4, 2, 1, 7, 2, 4] + [3] * 60
    recorded: list[tuple[Any, ...]] = []

    class Chooser:
        def __init__(self, choices: Any) -> None:
            assert tuple(choices) == tuple(range(1, 9))
            self.rounds = iter(wanted)

        def next(self) -> int:
            return next(self.rounds)

        def record(self, *round: Any) -> None:
            recorded.append(round)

    monkeypatch.setattr(speculative, "Gamma", Chooser)
    method = made(gamma="auto")
    tokens, found, _, ids, engine = decoded(method, PROMPTS[:1], 50)
    assert tokens[0] == alone(method, ids, {r.settled[0] for r in found}, 50)
    assert sorted(engine.verifications) == [1, 2, 3, 4, 7] and engine.draft.captures == 1
    assert all(one.captures == 1 for one in engine.verifications.values())
    assert [given[:3] for given in recorded] == [(g, r.drafted, r.accepted) for g, r in zip(wanted, found[:-1])]  # noqa: B905
    recorded.clear()
    model = zoo.restless()
    stopping, cache = Stopping(1, (), (), None), method.new_cache(model)
    token = prefill(model, cache, ids, None).argmax(-1)
    rest = (Sampling(), Sampling().generators(1), 50, 0, method.speculation)
    eager = speculative.speculative_decode(model, cache, token, stopping, *rest)
    assert stopping.tokens == tokens and [r.accepted for r in eager] == [r.accepted for r in found]
    assert all(seconds > 0 for given in recorded for seconds in given[3:]) and len(recorded) == len(eager) - 1


@torch.inference_mode()
def test_nan_in_the_cache_and_passes_that_can_be_captured_no_longer_are_named(
    oracle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in captured steps: where the NaN is, and what to type."""
    for failure, error, message in (
        ("nan", NonFiniteError, "layer 1: NaN or Inf in the value"),
        ("observes", CacheError, r"runtime\.graphs=never"),
    ):
        method, model = made(), zoo.restless()
        cache = method.new_cache(model, max_length=PROMPTS[0] + 60)
        token = prefill(model, cache, zoo.padded_batch(PROMPTS[:1], seed=3)[0], None).argmax(-1)
        engine = CapturedRounds(model, cache, method.speculation, Sampling(), 1, capture=False)
        engine.prepare()
        tail = cache.layers[1].stores()[1].tail
        if failure == "nan":
            tail.buffer.fill_(float("nan"))
        else:
            with torch.inference_mode(False):
                tail.buffer = torch.zeros_like(tail.buffer)
            monkeypatch.setattr(fused, "check_plain_causal", not_served)
        rest = (Stopping(1, (), (), None), Sampling(), Sampling().generators(1), 60, 0, method.speculation)
        with pytest.raises(error, match=message):
            speculative.speculative_decode(model, cache, token, *rest, engine)


def not_served(*given: Any) -> None:
    raise phases.NotServed("no more")
