"""Prefill and decode loops with a kvbench cache: one token at a time, or speculative if the method asks for it.

After every run the cache must have seen all tokens except the last one; otherwise the model has used another cache,
which is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding import recordable
from kvbench.decoding.drafting import prepare_draft
from kvbench.decoding.passes import Rows, check_cache, forward, now, prefill
from kvbench.decoding.recordable import Graphs, NotCaptured
from kvbench.decoding.round_times import Round
from kvbench.decoding.sampling import Sampling, Stopping, choose
from kvbench.decoding.shared_prefill import ReadPrompt
from kvbench.methods.speculation import Speculation

if TYPE_CHECKING:
    from kvbench.decoding.graphs import Captured


class Observer(Protocol):
    """Object that is notified when a phase of a generation begins, for example a memory meter.

    The phases are, in order, ``prefill``, ``likelihood`` (only with reference answers), ``decode``, ``steps`` (the
    part of ``decode`` after a capture) and ``end``.
    """

    def phase(self, name: str) -> None:
        """Receive the notification that the phase `name` begins."""
        ...


@dataclass
class Generation:
    """Result of a generation for a batch: new tokens and texts, times, and how decode steps were run.

    Args:
        tokens: new tokens of each row, without the end-of-sequence token.
        text: text of the new tokens of each row, up to the first stop string; empty without a tokenizer.
        finish: why each row ended: ``eos``, ``stop`` or ``length``.
        ttft_s: seconds from the start of the prefill to the first token.
        step_s: seconds of each decode step after the first token, or of each round of speculation. The first entry may
            include compilation and allocation, so results report it separately.
        prompt_tokens: number of prompt tokens of each row, without padding.
        answer_nll: for each row a pair: negative log-likelihood of its reference answer in nats, and number of tokens
            in this answer. Empty without reference answers.
        rounds: counts and time of each round of speculation; empty without speculation.
        stepping: how decode steps were run, by replays of a CUDA graph or eagerly: ``graph``, ``graph, compiled``,
            ``graph (not compiled: REASON)``, ``eager`` or ``eager (REASON)``.
        capture_s: seconds spent on warm-ups and on capturing CUDA graphs; not included in any other figure.
    """

    tokens: list[list[int]]
    text: list[str]
    finish: list[str]
    ttft_s: float
    step_s: list[float]
    prompt_tokens: list[int]
    answer_nll: list[tuple[float, int]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stepping: str = "eager"
    capture_s: float = 0.0


def tell(observer: Observer | None, phase: str) -> None:
    """Notify `observer` that a phase begins; do nothing if `observer` is None."""
    if observer is not None:
        observer.phase(phase)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    say_something: bool = False,
    tokenizer: Any = None,
    prefill_chunk: int | None = None,
    pad_token_id: int = 0,
    answer_ids: Sequence[Sequence[int]] | None = None,
    observer: Observer | None = None,
    speculate: bool | Speculation = True,
    graphs: Graphs = "never",
    compile: bool = False,
    prefill_rows: Rows = "auto",
    prompt: ReadPrompt | None = None,
) -> Generation:
    """Generate continuations for a batch of prompts, and return their tokens and texts with timings.

    Other loops of this package refer to these arguments.

    Args:
        model: causal language model that runs kvbench's attention (``method.new_cache(model)`` switches it).
        cache: an empty cache of a kvbench method.
        input_ids: prompts ``[B, T]``, padded on the left.
        attention_mask: ``[B, T]``, 0 at padding; None: no padding.
        max_new_tokens: limit on the new tokens of every row, the first one included; at least 1.
        sampling: temperature, top-k, top-p and seeds; None: greedy decoding.
        stop: strings that end a row's continuation; they require `tokenizer`.
        say_something: True: never choose one of `eos_token_ids` as the first token, so that no answer is empty (like
            ``min_length`` in transformers).
        tokenizer: the model's tokenizer, which decodes the new tokens. None: texts are empty, and `stop` must be empty.
        prefill_chunk: prompt tokens per forward pass; None: all at once. It does not affect the result.
        pad_token_id: token fed to rows that have ended while others continue.
        answer_ids: token ids of each row's reference answer. Their negative log-likelihood after the prompt is computed
            on a copy of the cache. None: it is not computed.
        speculate: True: decode speculatively if the method of the cache specifies it (``Method.speculation``); False:
            never; a :class:`Speculation`: decode speculatively with these settings, whatever the method specifies. If
            the draft needs a cache of its own, attach it to `cache` first (:meth:`kvbench.cache.KVCache.lead`).
        graphs: when to capture a decode step as a CUDA graph and replay it: ``auto``: if possible, and if there are
            enough steps to repay the capture; ``always``: if possible; ``never``.
        compile: True: in captured steps, compile everything except attention with ``torch.compile``.
        prefill_rows: number of prompts per forward pass of the prefill; ``auto``: as many as have about 16k tokens
            together; None: all.
        prompt: the prompts as read before, for this cache and those of other methods
            (:func:`kvbench.decoding.shared_prefill.read_prompts`); ``ttft_s`` then includes the time of that reading.
            None: the prompts are read now.

    Raises:
        CacheError: the cache was used before, or the model did not use it.
        NonFiniteError: the logits after a prompt are NaN or Inf, or the method packed NaN or Inf.
        ValueError: there are stop strings but no tokenizer, or `max_new_tokens` is below 1.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    sampling = sampling or Sampling()
    batch, width = input_ids.shape
    padded = attention_mask is not None and not bool(attention_mask.all())
    mask = attention_mask if padded else None
    stopping = Stopping(batch, eos_token_ids, stop, tokenizer)
    generators = sampling.generators(batch)
    speculation = speculate if isinstance(speculate, Speculation) else cache.method.speculation if speculate else None
    prepare_draft(model, speculation)
    if speculation is None:
        cache.lead(None)  # a draft's cache would be filled and never used

    tell(observer, "prefill")
    started = now(input_ids)
    if prompt is None:
        logits = prefill(model, cache, input_ids, mask, prefill_chunk, prefill_rows)
    else:
        logits = prompt.fill(cache)
    token = choose(_without(logits, eos_token_ids if say_something else ()), sampling, generators)
    finished = now(token)
    ttft = finished - started + (0.0 if prompt is None else prompt.seconds)

    nll: list[tuple[float, int]] = []
    if answer_ids is not None:
        tell(observer, "likelihood")
        nll = answer_nll(model, cache, logits, answer_ids, mask, pad_token_id)

    tell(observer, "decode")
    lengths = mask.sum(-1) if mask is not None else torch.full((batch,), width, device=input_ids.device)
    decoded = continued(
        model,
        cache,
        token,
        mask,
        lengths,
        stopping,
        sampling,
        generators,
        max_new_tokens,
        pad_token_id,
        speculation,
        graphs,
        compile,
        observer,
    )
    tell(observer, "end")
    return Generation(
        tokens=stopping.tokens,
        text=stopping.texts(),
        finish=stopping.finish,
        ttft_s=ttft,
        prompt_tokens=[int(n) for n in lengths.tolist()],
        answer_nll=nll,
        **decoded,
    )


def continued(
    model: PreTrainedModel,
    cache: KVCache,
    token: Tensor,
    mask: Tensor | None,
    lengths: Tensor,
    stopping: Stopping,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    max_new_tokens: int,
    pad_token_id: int = 0,
    speculation: Speculation | None = None,
    graphs: Graphs = "never",
    compile: bool = False,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Decode after the prefill until every row has ended, and return the times and the mode of execution.

    Steps are replays of a CUDA graph if `graphs` allows it and a step can be captured, and eager otherwise. Decoding is
    speculative if `speculation` is given.

    Args:
        token: first new token of each row, ``[B]``; not cached yet.
        mask: attention mask ``[B, T]`` of the columns that are cached; None: no padding.
        lengths: number of cached tokens of each row, without padding, ``[B]``.
        stopping: receives the new tokens.

    Returns:
        A dict with the fields ``step_s``, ``rounds``, ``stepping`` and ``capture_s`` of :class:`Generation`.
    """
    rounds: list[Round] = []
    rest = (stopping, sampling, generators, max_new_tokens, pad_token_id)
    engine, captured = None, None
    reason = recordable.eager_reason(model, cache, graphs, max_new_tokens - 1, token.device, speculation)
    try:
        if reason is None and speculation is not None:
            from kvbench.decoding.rounds import captured_rounds

            engine = captured_rounds(model, cache, speculation, sampling, len(token), compile)
        elif reason is None:
            captured = capture(model, cache, token, lengths, sampling, generators, max_new_tokens - 1, compile)
    except NotCaptured as error:
        reason = str(error)
    tell(observer, "steps")
    if speculation is not None:
        from kvbench.decoding import speculative

        rounds = speculative.speculative_decode(model, cache, token, *rest, speculation, engine)
        steps = [turn.seconds for turn in rounds]
    elif captured is not None:
        from kvbench.decoding import graphs as captured_decoding

        steps = captured_decoding.decode_captured(captured, token, stopping, max_new_tokens)
    else:
        steps = decode_eagerly(model, cache, token, mask, lengths, *rest)
    recorded = engine or captured
    return {
        "step_s": steps,
        "rounds": rounds,
        "stepping": f"eager ({reason})" if recorded is None else recorded.stepping,
        "capture_s": 0.0 if recorded is None else recorded.seconds,
    }


def capture(
    model: PreTrainedModel,
    cache: KVCache,
    token: Tensor,
    lengths: Tensor,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    steps: int,
    compile: bool = False,
) -> Captured:
    """Capture a decode step as a CUDA graph, and return the graph, ready for its first replay.

    Random numbers for all `steps` steps are drawn in advance. For `token` and `lengths` see :func:`continued`.

    Raises:
        NotCaptured: the step cannot be captured; the cache holds the same tokens, and the generators have the same
            state, as before the call.
    """
    from kvbench.decoding import graphs as captured_decoding
    from kvbench.decoding.recorded import Step

    states = [generator.get_state() for generator in generators]
    uniforms = captured_decoding.draw_step_uniforms(sampling, generators, steps)
    captured = captured_decoding.Captured(Step(model, cache, token, lengths, sampling, uniforms), compile=compile)
    try:
        captured.first()
    except NotCaptured:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)  # the eager steps draw what the captured ones would have
        raise
    return captured


def _without(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return logits ``[B, V]`` with those of `tokens` set to minus infinity, so that none of them is chosen."""
    if not tokens:
        return logits
    return logits.index_fill(-1, torch.tensor(list(tokens), device=logits.device), float("-inf"))


@torch.inference_mode()
def answer_nll(
    model: PreTrainedModel,
    cache: KVCache,
    logits: Tensor,
    answer_ids: Sequence[Sequence[int]],
    mask: Tensor | None = None,
    pad_token_id: int = 0,
) -> list[tuple[float, int]]:
    """Return the negative log-likelihood of each row's reference answer, given the cached prompt.

    Answers are teacher-forced on a copy of the cache. One forward pass processes all tokens of an answer, so they
    attend to each other in full precision.

    Args:
        cache: the cache after the prefill; it is not changed.
        logits: logits of the prompt's last token, ``[B, V]``.
        answer_ids: tokens of each row's answer (may be empty).
        mask: attention mask of the prompts, ``[B, T]``; None: no padding.

    Returns:
        For each row, the negative log-likelihood of its answer in nats, summed over its tokens, and their number.
    """
    longest = max((len(a) for a in answer_ids), default=0)
    if longest == 0:
        return [(0.0, 0) for _ in answer_ids]
    rows = [list(a) + [pad_token_id] * (longest - len(a)) for a in answer_ids]
    target = torch.tensor(rows, device=logits.device)
    scores = logits.float()[:, None]
    if longest > 1:
        width, count = cache.get_seq_length(), longest - 1
        start = torch.full((len(rows),), width, device=logits.device) if mask is None else mask.sum(-1)
        positions = start[:, None] + torch.arange(count, device=logits.device)
        longer = None if mask is None else torch.nn.functional.pad(mask, (0, count), value=1)
        rest = forward(model, cache.clone(), target[:, :-1], longer, positions, all_logits=True)
        scores = torch.cat([scores, rest.float()], 1)
    losses = -torch.log_softmax(scores, -1).gather(-1, target[..., None]).squeeze(-1)
    return [(float(losses[row, : len(a)].sum()), len(a)) for row, a in enumerate(answer_ids)]


def decode_eagerly(
    model: PreTrainedModel,
    cache: KVCache,
    token: Tensor,
    mask: Tensor | None,
    lengths: Tensor,
    stopping: Stopping,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    max_new_tokens: int,
    pad_token_id: int = 0,
) -> list[float]:
    """Decode with eager steps until every row has ended, and return the seconds of each step.

    Arguments are those of :func:`kvbench.decoding.autoregressive.continued`.

    Raises:
        CacheError: the model did not use the cache.
    """
    steps: list[float] = []
    width = cache.get_seq_length()
    stopping.take(token.tolist())
    for number in range(max_new_tokens - 1):
        if stopping.all_ended:
            break
        started = now(token)
        token = token.masked_fill(torch.tensor(stopping.ended, device=token.device), pad_token_id)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits = forward(model, cache, token[:, None], mask, (lengths + number)[:, None])[:, -1]
        token = choose(logits, sampling, generators)
        steps.append(now(token) - started)
        stopping.take(token.tolist())
    check_cache(cache, width + len(steps))
    return steps
