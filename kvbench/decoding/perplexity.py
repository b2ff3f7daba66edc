"""The likelihood of a text: token by token through a cache, in one simulated pass, or without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvbench.attention import reference
from kvbench.attention.logits import logits_of
from kvbench.attention.register import NAME, attention, mask
from kvbench.attention.rope import pre_rope
from kvbench.cache import KVCache
from kvbench.cache.layer import Handle
from kvbench.cache.policy import Policy
from kvbench.decoding.passes import check_cache, forward, prefill

SIMULATED = "kvbench_simulated"

#: default number of tokens of a forward pass: with more, it is hardly faster, and logits take more memory
PASS = 128


def pass_tokens(chunk: int | Literal["auto"]) -> int:
    """Return the number of tokens per forward pass: `chunk`, or :data:`PASS` if it is ``auto``."""
    return PASS if chunk == "auto" else chunk


def exact_chunk(method: Policy[Any], chunk: int) -> int:
    """Return how many tokens attention may process at a time so that the result is as in decoding token by token.

    The answer is `chunk` or 1. Most methods pack or drop tokens after each step. If attention processed several tokens
    at a time, later ones would attend to tokens in full precision that decoding would have packed by then. Hence
    `chunk` is returned only in two cases: the method packs and drops no tokens after the prompt, or it packs each token
    before any token attends to it (``eager``). Methods that observe attention always get 1.

    Args:
        method: the method whose cache is used.
        chunk: number of tokens per forward pass.
    """
    still = (not method.settles or method.eager) and not method.observe_steps
    return chunk if still else 1


@torch.inference_mode()
def decode_nll(
    model: PreTrainedModel,
    cache: KVCache,
    ids: Tensor,
    first: int,
    *,
    prompt: int = 0,
    chunk: int | Literal["auto"] = "auto",
    report: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the negative log-likelihood of the tokens ``first`` to ``T - 1`` of a text, as in decoding with a cache.

    Tokens are teacher-forced: each is predicted from the text's own tokens before it, in the form in which the method's
    cache stores them at that point. For speed, the model runs on a chunk of tokens at once. In each layer, attention
    processes as many of them at a time as possible without changing the result (:func:`exact_chunk`), and the method
    packs or drops tokens in between.

    Args:
        model: causal language model that runs kvbench's attention.
        cache: an empty cache.
        ids: token ids ``[B, T]``, without padding.
        first: index of the first scored token, at least 1 and at least `prompt`.
        prompt: number of tokens at the beginning of the text that are prefilled at once; 0 is treated as 1.
        chunk: tokens per forward pass; ``auto``: :data:`PASS`. It affects the result only by rounding.
        report: function that is called after each pass with the number of tokens processed so far; None: no function.

    Returns:
        For each row, the negative log-likelihood in nats, summed over the scored tokens, fp32 ``[B]``.

    Raises:
        CacheError: the model did not use the cache.
        ValueError: `first`, `prompt` or `chunk` is out of range.
    """
    batch, width = ids.shape
    chunk = pass_tokens(chunk)
    if not chunk >= 1:
        raise ValueError(f"chunk={chunk}: must be at least 1 token")
    if not 0 <= prompt <= width:
        raise ValueError(f"prompt={prompt}: must be from 0 to {width}, the number of tokens in ids")
    if not max(1, prompt) <= first < max(width, 2):
        raise ValueError(
            f"first={first}: must be after the prompt of {prompt} tokens and before the end, that is, from "
            f"{max(1, prompt)} to {width - 1}"
        )
    place = max(1, prompt)
    cache.progress.span = exact_chunk(cache.method, chunk)
    logits = prefill(model, cache, ids[:, :place], None)[:, None] if place < width else None
    total = torch.zeros(batch, device=ids.device)
    begin = place  # the logits at hand predict ids[:, begin:]
    while logits is not None:
        end = begin + logits.shape[1]
        total += _nll(logits, ids[:, begin:end], first - begin)
        begin = end
        if report is not None:
            report(begin)
        last = min(place + chunk, width - 1)
        if place >= last:
            break
        positions = torch.arange(place, last, device=ids.device).expand(batch, -1)
        logits = forward(model, cache, ids[:, place:last], None, positions, all_logits=True)
        place = last
    check_cache(cache, max(width - 1, 1))
    return total


@torch.inference_mode()
def forward_nll(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """Return the negative log-likelihood of the tokens ``first`` to ``T - 1`` of a text, computed without a cache.

    Args:
        model: causal language model.
        ids: token ids ``[B, T]``, without padding.
        first: index of the first scored token, at least 1, because no token predicts token 0.

    Returns:
        For each row, the negative log-likelihood in nats, summed over the scored tokens, fp32 ``[B]``.

    Raises:
        ValueError: `first` is not between 1 and T - 1.
    """
    _check_first(ids, first)
    logits = model(input_ids=ids, use_cache=False).logits
    return _nll(logits[:, :-1], ids[:, 1:], first - 1)


@torch.inference_mode()
def simulated_nll(model: PreTrainedModel, cache: KVCache, ids: Tensor, first: int) -> Tensor:
    """Return the negative log-likelihood of the tokens ``first`` to ``T - 1`` of a text, with simulated quantization.

    There is one forward pass. In each layer, the method first stores the keys and values of the whole text as if the
    text were a prompt. Then every token attends causally to these stored, quantized keys and values, including its own.
    KVQuant, Atom and QuaRot simulate quantization like this in their evaluations.

    Args:
        model: causal language model that runs kvbench's attention.
        cache: an empty cache.
        ids: token ids ``[B, T]``, without padding.
        first: index of the first scored token, at least 1, because no token predicts token 0.

    Returns:
        For each row, the negative log-likelihood in nats, summed over the scored tokens, fp32 ``[B]``.

    Raises:
        CacheError: the model did not use the cache.
        ValueError: `first` is not between 1 and T - 1.
    """
    _check_first(ids, first)
    AttentionInterface.register(SIMULATED, _simulated)
    AttentionMaskInterface.register(SIMULATED, mask)
    model.set_attn_implementation(SIMULATED)
    for layer in cache.layers:  # every query of the window attends, so a sliding layer drops nothing
        layer.window = None
    try:
        batch, width = ids.shape
        positions = torch.arange(width, device=ids.device).expand(batch, -1)
        logits = forward(model, cache, ids, None, positions, all_logits=True)
    finally:
        model.set_attn_implementation(NAME)
    check_cache(cache, width)
    return _nll(logits[:, :-1], ids[:, 1:], first - 1)


def _simulated(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Place the new keys and values in the stores, then attend to these: ``[B, q, Hq, Dv]`` and None."""
    if not isinstance(key, Handle):
        return attention(module, query, key, value, attention_mask, scaling, **kwargs)
    layer = key.layer
    keys, values = key.claim()
    if layer.index == 0:
        layer.progress.see(attention_mask, layer.batch, query.shape[2])
    keys = pre_rope.stored(layer, keys, pre_rope.take(module), module, kwargs.get("position_ids"))
    layer.place(keys, values)
    if attention_mask is None:
        count = query.shape[2]
        attention_mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()[None, None]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return reference.attend(module, layer, query, attention_mask, scaling, logits_of(module, query, kwargs)), None


def _check_first(ids: Tensor, first: int) -> None:
    if not 1 <= first < max(ids.shape[1], 2):
        raise ValueError(f"first={first}: must be from 1 to {ids.shape[1] - 1}, because ids has {ids.shape[1]} tokens")


def _nll(logits: Tensor, target: Tensor, skip: int) -> Tensor:
    """Return each row's summed negative log-likelihood of the targets ``skip..n-1``, fp32 ``[B]``.

    Args:
        logits: ``[B, n, V]``.
        target: the tokens that they predict, ``[B, n]``.
        skip: number of targets of each row, from the first on, that do not count.
    """
    skip = max(skip, 0)
    if skip >= target.shape[1]:
        return torch.zeros(target.shape[0], device=target.device)
    scores = logits[:, skip:].float()
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target[:, skip:].flatten(), reduction="none")
    return losses.view(target.shape[0], -1).sum(-1)
