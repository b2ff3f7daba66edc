"""A captured step's code against eager steps: step by step on a CPU, with an oracle that reads tables as kernels do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.attention import fused, phases
from kvbench.attention.recorded import recording
from kvbench.cache import Prompts
from kvbench.cache.kernels import at_once
from kvbench.decoding import graphs, recordable
from kvbench.decoding import recorded as recorded_module
from kvbench.decoding.autoregressive import decode_eagerly, generate
from kvbench.decoding.passes import prefill
from kvbench.decoding.recorded import Step
from kvbench.decoding.round_passes import Draft, Shared
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.decoding.tables import Ledger
from kvbench.errors import CacheError, NonFiniteError
from kvbench.methods import load_method
from kvbench.methods.fp16 import FP16
from tests import zoo
from tests.decoding.recorded_oracle import Oracle, part
from tests.marks import fast

STARTS = (0, 7)
PROMPT, NEW = 150, 90


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve recorded steps by the oracle."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Oracle))
    monkeypatch.setattr(at_once, "pack_new_tokens", packed_by_torch)
    monkeypatch.setattr(at_once, "packing_refusal", lambda segments: None)  # the models here are fp32


def packed_by_torch(segments: Any, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Pack the token of a step as the kernel does, which has tests of its own."""
    for segment, x, side in zip(segments, (key, value), places.unbind(1), strict=True):
        for row, place in enumerate(side.tolist()):
            if place >= 0:
                segment._encode(slice(row, row + 1), place, x[row : row + 1])


def started(
    method: Any, new: int = NEW, dtype: torch.dtype = torch.float32, **cache_options: Any
) -> tuple[Any, Any, Tensor, Tensor, Tensor]:
    model = zoo.restless() if dtype == torch.float32 else zoo.model("llama", dtype)
    ids, mask = zoo.padded_batch([PROMPT - start for start in STARTS], seed=3)
    cache = method.new_cache(model, **{"max_length": PROMPT + new, **cache_options})
    token = prefill(model, cache, ids, mask).argmax(-1)
    return model, cache, token, mask, mask.sum(-1)


def eagerly(method: Any, new: int = NEW, sampling: Sampling | None = None, eos: tuple[int, ...] = ()) -> Any:
    model, cache, token, mask, lengths = started(method, new)
    stopping, sampling = Stopping(2, eos, (), None), sampling or Sampling()
    decode_eagerly(model, cache, token, mask, lengths, stopping, sampling, sampling.generators(2), new)
    return stopping.tokens, cache


def recorded(
    method: Any, new: int = NEW, sampling: Sampling | None = None, eos: tuple[int, ...] = (), **cache_options: Any
) -> Any:
    model, cache, token, _, lengths = started(method, new, **cache_options)
    sampling = sampling or Sampling()
    numbers = graphs.draw_step_uniforms(sampling, sampling.generators(2), new - 1)
    captured = graphs.Captured(Step(model, cache, token, lengths, sampling, numbers), capture=False)
    captured.first()
    stopping = Stopping(2, eos, (), None)
    steps = graphs.decode_captured(captured, token, stopping, new)
    return stopping.tokens, cache, captured, steps


TILES_OF_64 = {
    "key": {"bits": 4, "group_size": 64, "axis": "channel"},
    "value": {"bits": 2, "group_size": "head_dim", "axis": "token"},
}
SETTINGS = {
    "fp16": ("fp16", {}),
    "kivi": ("kivi", {"quantizer": "int4", "residual": 32}),
    "kivi with sinks": ("kivi", {"quantizer": "int2", "residual": 64, "sinks": 2}),
    "logquant": ("logquant", {"quantizer": "int2", "window": 32}),
    "logquant, W 42": ("logquant", {"quantizer": "int2", "window": 42}),
    "partial_logquant": ("partial_logquant", {"quantizer": "int4", "window": 32}),
    "atom": ("atom", {}),
    "quantspec": ("quantspec", {"gamma": 0}),
    "streamingllm": ("streamingllm", {"budget": 64}),
    "streamingllm, where it was": ("streamingllm", {"budget": 64, "position": "original"}),
    "snapkv": ("snapkv", {"budget": 64}),
    "h2o": ("h2o", {"budget": 0.4}),
    "h2o, largest of a group": ("h2o", {"budget": 40, "group": "max", "per_query": True}),
    "kvarn": ("kvarn", {"sinks": 9, "quantizer": TILES_OF_64}),
    "engine": ("engine", {"format": "q8_0/q4_0"}),
    "mixed": ("kivi", {"quantizer": "int4", "residual": 32, "sinks": 2, "layers": "0:int8/int2"}),
    "mixed with fp16": ("logquant", {"quantizer": "int2", "window": 32, "layers": "0:fp16"}),
    "rotated": ("kivi", {"quantizer": "int4", "residual": 32, "rotation": {"key": "rht_unnormalised", "value": "rht"}}),
}


#: each of them is like another one: the rest of the list runs fast
ALIKE = {"kivi", "logquant", "streamingllm, where it was", "h2o, largest of a group", "mixed with fp16", "mixed"}


@pytest.mark.parametrize("name", fast(SETTINGS, SETTINGS.keys() - ALIKE))
@torch.inference_mode()
def test_a_recorded_step_does_what_eager_steps_do(name: str, oracle: None) -> None:
    """Tokens, bytes, lengths and every stored code; a padded batch of two, windows flushed and moved several times."""
    method_name, options = SETTINGS[name]
    method = load_method(method_name, **options)
    if name == "quantspec":
        method.quantizer = replace(method.quantizer, key=replace(method.quantizer.key, group_size=32))
    new = NEW if method_name == "streamingllm" else 55  # its windows go back to the front after 64 steps
    tokens, cache, _, steps = recorded(method, new)
    wanted, eager = eagerly(method, new)
    assert tokens == wanted
    assert len(steps) == new - 1
    assert cache.bill().used == eager.bill().used
    assert cache.get_seq_length() == eager.get_seq_length() == PROMPT + new - 1
    assert cache.path == "oracle"
    same = total = 0
    for mine, other in zip(cache.layers, eager.layers, strict=True):
        for row in range(2):
            one = slice(row, row + 1)
            assert torch.equal(mine.positions(row), other.positions(row))
            for store, twin in zip(mine.stores(), other.stores(), strict=True):
                assert store.signature(row) == twin.signature(row)
                for segment, alike in zip(store.segments, twin.segments, strict=True):
                    if segment.packed:
                        count = segment.length(one)
                        equal = segment.codes(one, 0, count) == alike.codes(one, 0, count)
                        same, total = same + int(equal.sum()), total + equal.numel()
    assert same >= 0.999 * total  # what was packed came from hidden states that are equal but for rounding


@torch.inference_mode()
def test_recorded_steps_of_runs_in_place(oracle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cocktail without module II: the tokens of eager steps; only the newest runs' numbers are made anew."""
    model, (ids, mask) = zoo.restless(), zoo.padded_batch([PROMPT - start for start in STARTS], seed=3)
    method = load_method("cocktail", encoder="bm25", chunk_size=8, split=(10, 40, 50), reorder=False)
    prompts = Prompts.from_batch(ids, mask, decode=lambda ids: " ".join(map(str, ids)))
    made: list[Any] = []
    whole = recorded_module.laid_out
    monkeypatch.setattr(recorded_module, "laid_out", lambda *given: made.append(given) or whole(*given))

    def begun() -> tuple[Any, Tensor]:
        cache = method.new_cache(model, prompts, max_length=PROMPT + NEW)
        return cache, prefill(model, cache, ids, mask).argmax(-1)

    cache, token = begun()
    wanted = Stopping(2, (), (), None)
    decode_eagerly(model, cache, token, mask, mask.sum(-1), wanted, Sampling(), Sampling().generators(2), NEW)
    monkeypatch.setattr(fused, "check_plain_causal", lambda *given: None)  # as on a GPU
    cache, token = begun()
    assert len(cache.layers[0].stores()[0].segments) > 6
    step = Step(model, cache, token, mask.sum(-1), Sampling())
    captured = graphs.Captured(step, capture=False)
    captured.first()
    made.clear()
    stopping = Stopping(2, (), (), None)
    graphs.decode_captured(captured, token, stopping, NEW)
    assert stopping.tokens == wanted.tokens and not made
    layout = step._layout
    tails = [store.tail for layer in cache.kv_layers for store in layer.stores()]
    places = [
        [(k.starts[r] + k.lengths[r] - 1, v.starts[r] + v.lengths[r] - 1) for r in range(2)]
        for k, v in zip(tails[::2], tails[1::2], strict=True)
    ]
    assert layout is not None and (whole(cache, places).numbers == layout.numbers).all()
    for tail in tails[:2]:  # somebody has taken a token back: everything is looked up again
        tail.lengths[0] -= 1
    step.advance()
    assert len(made) == 1


@torch.inference_mode()
def test_buffers_that_move_are_recorded_anew(oracle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without max_length fp16's buffers grow; with one nothing moves. A capture takes a second, which no step pays."""
    method = load_method("fp16")

    def slow(self: graphs.Captured) -> None:
        record(self)
        self.seconds += 100.0

    record = graphs.Captured.record
    with monkeypatch.context() as patch:
        patch.setattr(graphs.Captured, "record", slow)
        patch.setattr(graphs.time, "perf_counter", lambda: 0.0)  # no other time passes
        tokens, _, captured, steps = recorded(method, new=90, max_length=None)
    assert captured.captures > 1 and captured.seconds == 100.0 * captured.captures
    assert len(steps) == 89 and sum(steps) == -100.0 * (captured.captures - 1)  # the first was before the steps
    assert tokens == eagerly(method, new=90)[0]
    assert recorded(method, new=90)[2].captures == 1


@torch.inference_mode()
def test_a_format_that_comes_up_later_is_recorded_anew(oracle: None) -> None:
    """A prompt shorter than the window has nothing packed at first."""
    method = load_method("logquant", quantizer="int2", window=64)
    tokens, cache, captured, _ = recorded(method)
    assert cache.bill().used.codes > 0
    assert captured.captures == 2
    assert tokens == eagerly(method)[0]


@torch.inference_mode()
def test_sampling_draws_as_eager_steps_do(oracle: None) -> None:
    """Same seed, same tokens; another seed, others."""
    method, sampling = load_method("fp16"), Sampling(1.0, 0.9, 5)
    tokens = recorded(method, sampling=sampling)[0]
    assert tokens == eagerly(method, sampling=sampling)[0]
    assert tokens != recorded(method, sampling=Sampling(1.0, 0.9, 6))[0]


@torch.inference_mode()
def test_a_step_too_many_is_taken_back(oracle: None) -> None:
    """Rows end at different steps; the cache then holds what an eager run's holds."""
    method = load_method("kivi", quantizer="int4", residual=32)
    sampling = Sampling(1.0, seed=1)
    free = eagerly(method, sampling=sampling)[0]
    eos = (free[0][20], free[1][30])
    wanted, eager = eagerly(method, sampling=sampling, eos=eos)
    assert all(0 < len(row) < NEW - 1 for row in wanted)
    tokens, cache, _, steps = recorded(method, sampling=sampling, eos=eos)
    assert tokens == wanted
    assert cache.get_seq_length() == eager.get_seq_length() == PROMPT + len(steps)
    assert cache.bill().used == eager.bill().used


@torch.inference_mode()
def test_an_answer_that_ends_at_once_leaves_no_step(oracle: None) -> None:
    """The first token is the end: the step that was recorded is taken back."""
    model, cache, token, _, lengths = started(load_method("fp16"))
    captured = graphs.Captured(Step(model, cache, token, lengths, Sampling()), capture=False)
    captured.first()
    assert graphs.decode_captured(captured, token, Stopping(2, token.tolist(), (), None), NEW) == []
    assert cache.get_seq_length() == PROMPT


class AllWeights(FP16):
    """A method that looks at every probability of a step."""

    observe_steps = True


@torch.inference_mode()
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda: AllWeights(), "needs attention weights"),
        (lambda: load_method("logquant", window=8), "groups of 8 tokens"),
        (lambda: load_method("atom", prefill="quantized"), "packed before they attend"),
    ],
)
def test_what_no_kernel_serves_is_refused_and_leaves_the_cache_alone(method: Any, reason: str) -> None:
    """The message is the row's."""
    made = method()
    model, cache, token, mask, lengths = started(made, dtype=torch.bfloat16)
    before = cache.get_seq_length()
    captured = graphs.Captured(Step(model, cache, token, lengths, Sampling()), capture=False)
    with pytest.raises(recordable.NotCaptured, match=reason):
        captured.first()
    assert cache.get_seq_length() == before
    stopping = Stopping(2, (), (), None)
    decode_eagerly(model, cache, token, mask, lengths, stopping, Sampling(), Sampling().generators(2), 8)
    assert [len(row) for row in stopping.tokens] == [8, 8]
    assert cache.get_seq_length() == before + 7


@torch.inference_mode()
def test_nan_in_the_cache_is_named(oracle: None) -> None:
    """As eager steps name it, when the token is packed."""
    model, cache, token, _, lengths = started(load_method("kivi", quantizer="int4", residual=32))
    captured = graphs.Captured(Step(model, cache, token, lengths, Sampling()), capture=False)
    captured.first()
    cache.layers[1].stores()[1].tail.buffer.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="layer 1: NaN or Inf in the value"):
        graphs.decode_captured(captured, token, Stopping(2, (), (), None), NEW)


@torch.inference_mode()
def test_a_step_that_can_be_recorded_no_longer_says_what_to_type(oracle: None) -> None:
    """Its layers have changed under it."""
    model, cache, token, _, lengths = started(load_method("fp16"))
    captured = graphs.Captured(Step(model, cache, token, lengths, Sampling()), capture=False)
    captured.first()
    cache.method.observe_steps = True  # type: ignore[misc]
    cache.layers[0].stores()[0].tail.buffer = cache.layers[0].stores()[0].tail.buffer.clone()
    with pytest.raises(CacheError, match=r"runtime\.graphs=never"):
        captured.next()


@pytest.mark.parametrize(
    ("graphs_setting", "new", "said"),
    [("never", 80, "runtime.graphs=never"), ("auto", 80, "no CUDA graphs on cpu"), ("always", 80, "no CUDA graphs")],
)
def test_generate_says_how_it_stepped(graphs_setting: Any, new: int, said: str) -> None:
    """On a CPU: eagerly, and why."""
    model = zoo.model("llama")
    ids, _ = zoo.padded_batch([20], seed=1)
    cache = load_method("fp16").new_cache(model)
    generation = generate(model, cache, ids, max_new_tokens=new, graphs=graphs_setting)
    assert generation.stepping.startswith("eager (") and said in generation.stepping
    assert generation.capture_s == 0.0


def test_few_steps_are_not_worth_a_capture() -> None:
    """Unless one is asked for."""
    model, device = zoo.model("llama"), torch.device("cuda")
    cache = load_method("fp16").new_cache(model)
    assert "too few" in str(recordable.eager_reason(model, cache, "auto", 10, device))
    assert recordable.eager_reason(model, cache, "always", 10, device) is None
    assert recordable.eager_reason(model, cache, "auto", 100, device) is None
    assert recordable.eager_reason(model, cache, "always", 0, device) == "no steps"
    cache.lead(load_method("fp16").new_cache(model))
    assert "shares its prompt" in str(recordable.eager_reason(model, cache, "always", 10, device))


@torch.inference_mode()
def test_a_rehearsal_of_the_last_step_stays_in_bounds(oracle: None) -> None:
    """Warm-ups run a step several times; draws and drafts have places for as many steps as there are."""
    sampling = Sampling(1.0, seed=3)
    model, cache, token, _, lengths = started(load_method("fp16"))
    numbers = graphs.draw_step_uniforms(sampling, sampling.generators(2), 1)
    drawn = Step(model, cache, token, lengths, sampling, numbers)
    shared = Shared(2, 1, sampling, None, zoo.VOCABULARY, token.device)
    ledger = Ledger(cache, 2, token.device)
    ledger.refresh(2)
    draft = Draft(model, ledger, shared, False)
    draft.build(ledger.layout)  # type: ignore[arg-type]
    shared.pending.copy_(token)
    shared.lengths.copy_(lengths)
    draft.restart()
    drawn.begin(token, lengths)
    drawn.advance()
    for step in (drawn, draft):
        with recording(model, step.serve):
            for _ in range(3):
                graphs.rehearse(step)
            assert torch.equal(step.tokens[:, 0], token) and torch.equal(step.positions[:, 0], lengths)
            step.run()
        assert not torch.equal(step.tokens[:, 0], token)


@torch.inference_mode()
def test_a_copy_of_the_cache_meets_formats_by_itself(oracle: None) -> None:
    """Tokens that a copy added do not become a phase of the original's step, which would then be recorded again."""
    model, cache, token, _, lengths = started(load_method("logquant", quantizer="int2", window=64))
    captured = graphs.Captured(Step(model, cache, token, lengths, Sampling()), capture=False)
    captured.first()
    recorded_once = captured.step.version
    twin = cache.clone()
    twin.take_back([1, 1])
    other = graphs.Captured(Step(model, twin, token, lengths, Sampling()), capture=False)
    other.first()
    graphs.decode_captured(other, token, Stopping(2, (), (), None), NEW)
    assert other.captures > 1
    captured.replay()
    captured.next()
    assert captured.step.version == recorded_once
