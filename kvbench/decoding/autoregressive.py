"""Prefill and decode on any cache: one token at a time, or by speculation where the method says so.

After every run the cache must have held all tokens but the last one: the model must not have used another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding import graphs as captured_decoding
from kvbench.decoding import speculative
from kvbench.decoding.drafting import prepare
from kvbench.decoding.likelihood import answer_nll
from kvbench.decoding.passes import Rows, check_cache, forward, now, prefill
from kvbench.decoding.rounds import captured_drafter
from kvbench.decoding.sampling import Sampling, choose
from kvbench.decoding.step import Step
from kvbench.decoding.stopping import Stopping
from kvbench.methods.speculation import Speculation


class Observer(Protocol):
    """Observer of a generation's phases: ``prefill``, ``likelihood`` (only with answers), ``decode``, ``end``."""

    def phase(self, name: str) -> None:
        """Begin a phase."""
        ...


@dataclass
class Generation:
    """The output of a batch.

    Args:
        tokens: new tokens of each row, the end-of-sequence token left out.
        text: their text, cut at a stop string; empty without a tokenizer.
        finish: why each row ended: ``eos``, ``stop`` or ``length``.
        ttft_s: seconds from the start of the prefill to the first token.
        step_s: seconds of each decode step after it (each round of speculation); the first is reported apart (it may
            compile or allocate).
        prompt_tokens: real prompt tokens of each row.
        answer_nll: for each row (sum of negative log-likelihoods in nats, tokens) of its reference answer.
        rounds: rounds of speculation; empty where every step gave one token.
        stepping: ``graph`` (a captured step was replayed; ``compiled``, or why not), or ``eager`` with the reason.
        capture_s: seconds that recording it took; in no other figure.
    """

    tokens: list[list[int]]
    text: list[str]
    finish: list[str]
    ttft_s: float
    step_s: list[float]
    prompt_tokens: list[int]
    answer_nll: list[tuple[float, int]] = field(default_factory=list)
    rounds: list[speculative.Round] = field(default_factory=list)
    stepping: str = "eager"
    capture_s: float = 0.0


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
    graphs: captured_decoding.Graphs = "never",
    compile: bool = False,
    prefill_rows: Rows = "auto",
) -> Generation:
    """Answer a batch of prompts.

    Args:
        model: causal language model; runs kvbench's attention (``method.new_cache(model)`` switched it).
        cache: a fresh cache of a kvbench method.
        input_ids: prompts ``[B, T]``, padded on the left.
        attention_mask: ``[B, T]``, 0 at padding; None: no padding.
        max_new_tokens: limit for every row, at least 1.
        sampling: None: greedy.
        eos_token_ids: tokens that end a row.
        stop: strings that end a row; needs `tokenizer`.
        say_something: the first token is not one of `eos_token_ids` (``min_length`` one above the prompt).
        prefill_chunk: prompt tokens a forward pass; None: all at once. The result does not depend on it.
        pad_token_id: fed to rows that have ended while others go on.
        answer_ids: reference answers; their negative log-likelihood on the cached prompt is taken on a copy of it.
        observer: receives each phase as it begins (memory meters are observers).
        speculate: decode by speculation where the cache's method has one (``Method.speculation``); or say how: any
            method's cache may be the target, and lead any other's as the draft (:meth:`kvbench.cache.KVCache.lead`).
        graphs: capture a decode step and replay it: ``auto`` (where it serves and is worth it), ``always`` (where it
            serves) or ``never``.
        compile: captured steps run everything around attention through ``torch.compile``.
        prefill_rows: prompts that are run in one forward pass (:func:`kvbench.decoding.passes.groups`).

    Raises:
        CacheError: the model did not use the cache it was given.
        ValueError: stop strings without a tokenizer, max_new_tokens < 1.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: at least 1")
    sampling = sampling or Sampling()
    batch, width = input_ids.shape
    padded = attention_mask is not None and not bool(attention_mask.all())
    mask = attention_mask if padded else None
    stopping = Stopping(batch, eos_token_ids, stop, tokenizer)
    generators = sampling.generators(batch)
    speculation = speculate if isinstance(speculate, Speculation) else cache.method.speculation if speculate else None
    prepare(model, speculation)
    if speculation is None:
        cache.lead(None)  # a draft's cache would be filled and never used

    tell(observer, "prefill")
    started = now(input_ids)
    logits = prefill(model, cache, input_ids, mask, prefill_chunk, prefill_rows)
    token = choose(_without(logits, eos_token_ids if say_something else ()), sampling, generators)
    finished = now(token)
    ttft = finished - started

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
    graphs: captured_decoding.Graphs = "never",
    compile: bool = False,
) -> dict[str, Any]:
    """Continue from the first new token by captured steps if they serve, else by eager ones; or by speculation.

    Args:
        token, mask, lengths, and what follows: as of :func:`decode`.
        speculation, graphs, compile: as of :func:`generate`.

    Returns:
        ``step_s``, ``rounds``, ``stepping`` and ``capture_s`` of a :class:`Generation`; the tokens are in `stopping`.
    """
    rounds: list[speculative.Round] = []
    rest = (stopping, sampling, generators, max_new_tokens, pad_token_id)
    drafter, captured = None, None
    reason = captured_decoding.refuses(model, cache, graphs, max_new_tokens - 1, token.device, speculation)
    try:
        if reason is None and speculation is not None:
            drafter = captured_drafter(model, cache, speculation, sampling, len(token), compile)
        elif reason is None:
            captured = capture(model, cache, token, lengths, sampling, generators, max_new_tokens - 1, compile)
    except captured_decoding.NotCaptured as error:
        reason = str(error)
    if speculation is not None:
        rounds = speculative.decode(model, cache, token, *rest, speculation, drafter)
        steps = [turn.seconds for turn in rounds]
    elif captured is not None:
        steps = captured_decoding.decode(captured, token, stopping, max_new_tokens)
    else:
        steps = decode(model, cache, token, mask, lengths, *rest)
    recorded = drafter or captured
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
) -> captured_decoding.Captured:
    """Capture a decode step and do its first bookkeeping.

    Raises:
        NotCaptured: it cannot be; cache and generators are as they were.
    """
    states = [generator.get_state() for generator in generators]
    uniforms = captured_decoding.uniforms(sampling, generators, steps)
    captured = captured_decoding.Captured(Step(model, cache, token, lengths, sampling, uniforms), compile=compile)
    try:
        captured.first()
    except captured_decoding.NotCaptured:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)  # the eager steps draw what the captured ones would have
        raise
    return captured


def decode(
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
    """Continue from the first new token until every row has ended; the tokens are in `stopping`.

    Args:
        token: first new token of each row, ``[B]``.
        mask: ``[B, T]`` of the columns in the cache, or None.
        lengths: real tokens of each row in the cache, ``[B]``.

    Returns:
        Seconds of each step.

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


def _without(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return logits ``[B, V]`` with some tokens made impossible (``min_length`` of transformers' generate)."""
    if not tokens:
        return logits
    return logits.index_fill(-1, torch.tensor(list(tokens), device=logits.device), float("-inf"))


def tell(observer: Observer | None, phase: str) -> None:
    if observer is not None:
        observer.phase(phase)
