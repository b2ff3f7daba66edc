"""Prefill and decode, one token at a time, on any cache.

kvbench runs its own loop because transformers' ``generate`` may replace a foreign cache without a word (Phi-3 longrope
past its original length) and cannot say which prefill chunk is the last. Both are checked here: after every run the
cache must have held all tokens but the last one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.likelihood import answer_nll
from kvbench.decoding.sampling import Sampling, choose
from kvbench.decoding.stopping import Stopping
from kvbench.errors import CacheError


class Observer(Protocol):
    """Told when a phase begins: ``prefill``, ``likelihood`` (only with answers), ``decode``, ``end``."""

    def phase(self, name: str) -> None:
        """A phase begins."""
        ...


@dataclass
class Generation:
    """What a batch gave.

    Args:
        tokens: new tokens of each row, the end-of-sequence token left out.
        text: their text, cut at a stop string; empty without a tokenizer.
        finish: why each row ended: ``eos``, ``stop`` or ``length``.
        ttft_s: seconds from the start of the prefill to the first token.
        step_s: seconds of each decode step after it; the first is reported apart (it may compile or allocate).
        prompt_tokens: real prompt tokens of each row.
        answer_nll: for each row (sum of negative log-likelihoods in nats, tokens) of its reference answer.
    """

    tokens: list[list[int]]
    text: list[str]
    finish: list[str]
    ttft_s: float
    step_s: list[float]
    prompt_tokens: list[int]
    answer_nll: list[tuple[float, int]] = field(default_factory=list)


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
) -> Generation:
    """Answer a batch of prompts.

    Args:
        model: causal language model; runs kvbench's attention (``method.new_cache(model)`` switched it).
        cache: a fresh cache of a kvbench method.
        input_ids: prompts ``[B, T]``, padded on the left.
        attention_mask: ``[B, T]``, 0 at padding; None: no padding.
        max_new_tokens: limit for every row, at least 1.
        sampling: greedy where None.
        eos_token_ids: tokens that end a row.
        stop: strings that end a row; needs `tokenizer`.
        say_something: the first token is none of `eos_token_ids` (``min_length`` one above the prompt).
        prefill_chunk: prompt tokens a forward pass; None: all at once. The result does not depend on it.
        pad_token_id: fed to rows that have ended while others go on.
        answer_ids: reference answers; their negative log-likelihood on the cached prompt is taken on a copy of it.
        observer: told when a phase begins (memory meters hook on it).

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

    _tell(observer, "prefill")
    started = _now(input_ids)
    logits = prefill(model, cache, input_ids, mask, prefill_chunk)
    token = choose(_without(logits, eos_token_ids if say_something else ()), sampling, generators)
    finished = _now(token)
    ttft = finished - started

    nll: list[tuple[float, int]] = []
    if answer_ids is not None:
        _tell(observer, "likelihood")
        nll = answer_nll(model, cache, logits, answer_ids, mask, pad_token_id)

    _tell(observer, "decode")
    lengths = mask.sum(-1) if mask is not None else torch.full((batch,), width, device=input_ids.device)
    steps = decode(model, cache, token, mask, lengths, stopping, sampling, generators, max_new_tokens, pad_token_id)
    _tell(observer, "end")
    check_cache(cache, width + len(steps))
    return Generation(
        tokens=stopping.tokens,
        text=stopping.texts(),
        finish=stopping.finish,
        ttft_s=ttft,
        step_s=steps,
        prompt_tokens=[int(n) for n in lengths.tolist()],
        answer_nll=nll,
    )


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
    """Go on from the first new token until every row has ended; what came out is in `stopping`.

    Args:
        token: first new token of each row, ``[B]``.
        mask: ``[B, T]`` of the columns in the cache, or None.
        lengths: real tokens of each row in the cache, ``[B]``.

    Returns:
        Seconds of each step.
    """
    steps: list[float] = []
    stopping.take(token.tolist())
    for number in range(max_new_tokens - 1):
        if stopping.all_ended:
            break
        started = _now(token)
        token = token.masked_fill(torch.tensor(stopping.ended, device=token.device), pad_token_id)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits = forward(model, cache, token[:, None], mask, (lengths + number)[:, None])[:, -1]
        token = choose(logits, sampling, generators)
        steps.append(_now(token) - started)
        stopping.take(token.tolist())
    return steps


def prefill(
    model: PreTrainedModel, cache: KVCache, input_ids: Tensor, mask: Tensor | None, chunk: int | None = None
) -> Tensor:
    """Run the prompt ``[B, T]``; logits of its last token, ``[B, V]``. Every token attends to exact keys and values."""
    batch, width = input_ids.shape
    if mask is None:
        positions = torch.arange(width, device=input_ids.device).expand(batch, width)
    else:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    chunk = chunk or width
    if chunk < width:
        cache.open_prefill()
    logits = input_ids.new_empty(0)
    for first in range(0, width, chunk):
        last = min(first + chunk, width)
        part = None if mask is None else mask[:, :last]
        logits = forward(model, cache, input_ids[:, first:last], part, positions[:, first:last])
    cache.finalize()
    check_cache(cache, width)
    return logits[:, -1]


def forward(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    *,
    all_logits: bool = False,
) -> Tensor:
    """One forward pass of new tokens ``[B, q]``; logits ``[B, q, V]`` (``[B, 1, V]`` unless `all_logits`)."""
    keep = {} if all_logits else {"logits_to_keep": 1}
    return model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **keep,
    ).logits


def check_cache(cache: KVCache, expected: int) -> None:
    """Raise CacheError unless the cache has seen `expected` columns: the model must not have replaced it."""
    if cache.get_seq_length() != expected:
        raise CacheError(
            f"the cache holds {cache.get_seq_length()} tokens where {expected} went through the model: the model used "
            "another cache. This run's figures would not be the method's"
        )


def _without(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits ``[B, V]`` with some tokens made impossible (``min_length`` of transformers' generate)."""
    if not tokens:
        return logits
    return logits.index_fill(-1, torch.tensor(list(tokens), device=logits.device), float("-inf"))


def _tell(observer: Observer | None, phase: str) -> None:
    if observer is not None:
        observer.phase(phase)


def _now(tensor: Tensor) -> float:
    """Host clock once everything queued on the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
