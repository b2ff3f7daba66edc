"""Several questions or continuations on one cached text: answers are generated, continuations get a likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding import speculative
from kvbench.decoding.autoregressive import Generation, Observer, answer_nll, decode_eagerly, tell
from kvbench.decoding.drafting import prepare_draft
from kvbench.decoding.passes import check_cache, forward, now, prefill
from kvbench.decoding.round_times import Round
from kvbench.decoding.sampling import Sampling, Stopping, choose
from kvbench.errors import NonFiniteError


@torch.no_grad()
def ask(
    model: PreTrainedModel,
    cache: KVCache,
    shared_ids: Tensor,
    questions: Sequence[Sequence[int]],
    *,
    answers: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    eos_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    prefill_chunk: int | None = None,
    observer: Observer | None = None,
    turns: Literal["reference", "own"] | None = None,
) -> list[Generation]:
    """Prefill a text once, then answer several questions about it, each with a copy of the cache.

    The tokens of a question are processed in one forward pass. They attend to each other in full precision, and to the
    text in the form in which the method has stored it.

    Arguments that are not listed are those of :func:`kvbench.decoding.autoregressive.generate`.

    Args:
        cache: an empty cache; afterwards it contains the shared text.
        shared_ids: token ids of the shared text, ``[1, T]``.
        questions: token ids of each question, at least one token each.
        answers: token ids of each question's reference answer, whose likelihood is part of the result.
        prefill_chunk: tokens of the shared text per forward pass; None: all at once.
        turns: the answers of the earlier turns, if the questions are turns of a conversation: each question and its
            answer then stay in `cache`, where later questions see them. ``own`` answers are those of the model, up to
            the stop string; like ``reference`` ones they are appended in one forward pass. None: no question sees
            another, and `cache` is afterwards as it was before the first one.

    Returns:
        The generation for each question, in order. The time to first token includes the prefill of the shared text only
        in the first generation. ``prompt_tokens`` is the number of tokens in the shared text and the question together.
    """
    speculation = cache.method.speculation
    prepare_draft(model, speculation)
    tell(observer, "prefill")
    started = now(shared_ids)
    prefill(model, cache, shared_ids, None, prefill_chunk)
    shared = now(shared_ids) - started
    width = shared_ids.shape[1]
    results: list[Generation] = []
    for question, answer in zip(questions, answers, strict=True):
        tell(observer, "decode")
        twin = cache.clone() if turns is None else cache
        ids = torch.tensor([list(question)], device=shared_ids.device)
        length = width + ids.shape[1]
        generators, stopping = sampling.generators(1), Stopping(1, eos_token_ids, stop, tokenizer)
        started = now(ids)
        logits = _append(model, twin, ids)
        if turns is not None:
            twin = cache.clone()  # the model's own answer is no part of the conversation
        token = choose(logits, sampling, generators)
        first = now(token) - started + (shared if not results else 0.0)
        nll = answer_nll(model, twin, logits, [answer])
        rounds: list[Round] = []
        if speculation is None:
            lengths = torch.tensor([length], device=ids.device)
            steps = decode_eagerly(model, twin, token, None, lengths, stopping, sampling, generators, max_new_tokens)
        else:
            rounds = speculative.speculative_decode(
                model, twin, token, stopping, sampling, generators, max_new_tokens, 0, speculation
            )
            steps = [turn.seconds for turn in rounds]
        for layer, copied in zip(cache.kv_layers, twin.kv_layers, strict=True):
            layer.paths |= copied.paths  # the caller asks `cache` which kernels served
        results.append(
            Generation(
                tokens=stopping.tokens,
                text=stopping.texts(),
                finish=stopping.finish,
                ttft_s=first,
                step_s=steps,
                prompt_tokens=[length],
                answer_nll=nll,
                rounds=rounds,
            )
        )
        if turns is not None:
            appended = answer if turns == "reference" else spoken(results[-1], tokenizer)
            width = length + len(appended)
            if appended:
                _append(model, cache, torch.tensor([list(appended)], device=ids.device))
    tell(observer, "end")
    return results


def spoken(generation: Generation, tokenizer: Any) -> list[int]:
    """Return the tokens of an answer as a later turn sees them: without those of the stop string that ended it."""
    tokens, count = generation.tokens[0], len(generation.tokens[0])
    if generation.finish[0] == "stop":
        while count and len(tokenizer.decode(tokens[:count], skip_special_tokens=True)) > len(generation.text[0]):
            count -= 1
    return tokens[:count]


def _append(model: PreTrainedModel, cache: KVCache, ids: Tensor) -> Tensor:
    """Append tokens ``[1, q]`` to a cache, and to the draft's cache; return the logits of the last one, ``[1, V]``."""
    start = cache.get_seq_length()
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    logits = forward(model, cache, ids, None, positions)[:, -1]
    if cache.follower is not None:
        cache.follower.follow(cache, [ids.shape[1]])
    return logits


@torch.inference_mode()
def continuation_likelihoods(
    model: PreTrainedModel,
    cache: KVCache,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
    prefill_chunk: int | None = None,
) -> Iterator[tuple[float, bool, KVCache]]:
    """Yield the log-likelihood of each continuation of a context, in order.

    All context tokens but the last are prefilled once, exactly, and stored as the method stores them. The last one and
    the continuation follow one token at a time, and the method packs or drops tokens in between, as in decoding.

    Args:
        cache: an empty cache of a kvbench method; it holds the prefilled context afterwards.
        context: token ids, at least one; each continuation must also have at least one.
        prefill_chunk: context tokens per forward pass; None: all at once.

    Yields:
        For each continuation: its log-likelihood in nats, summed over its tokens in fp32; True if each of its tokens is
            the most probable one at its place; and the cache after the last token that was fed to the model, to be read
            before the next continuation is requested.

    Raises:
        CacheError: the cache was used before, or the model did not use it.
        NonFiniteError: the logits after the context are NaN or Inf, or those after a later token NaN.
    """
    prepare_draft(model, None)
    cache.lead(None)  # a draft's cache would be filled and never used
    device = model.device
    first = max(1, len(context) - 1)
    logits = prefill(model, cache, torch.tensor([list(context[:first])], device=device), None, prefill_chunk)
    for continuation in continuations:
        twin = cache.clone()
        scores = logits[0].float()
        if len(context) > first:
            scores = _step(model, twin, context[-1], device)
        total, greedy = 0.0, True
        for place, token in enumerate(continuation):
            total += float(torch.log_softmax(scores, -1)[token])
            greedy = greedy and int(scores.argmax()) == token
            if place + 1 < len(continuation):
                scores = _step(model, twin, token, device)
        check_cache(twin, len(context) + len(continuation) - 1)
        if math.isnan(total):
            raise NonFiniteError(f"the logits within a continuation of {len(continuation)} tokens are NaN")
        yield total, greedy, twin


def _step(model: PreTrainedModel, cache: KVCache, token: int, device: torch.device) -> Tensor:
    """Return the logits after one more token, ``[V]`` in fp32."""
    ids = torch.tensor([[token]], device=device)
    positions = torch.tensor([[cache.get_seq_length()]], device=device)
    return forward(model, cache, ids, None, positions)[0, -1].float()
