"""The likelihood of a text under a cache: token by token through it, in one simulated pass, or without one."""

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

#: tokens of a pass of the model where none are asked for: more make it little faster, and their logits larger
PASS = 128


def pass_tokens(chunk: int | Literal["auto"]) -> int:
    """Return the tokens of a pass of the model: `chunk`, or :data:`PASS`."""
    return PASS if chunk == "auto" else chunk


def exact_chunk(method: Policy[Any], chunk: int) -> int:
    """Return the tokens that attention may take at a time: `chunk` if nothing moves while decoding, else 1.

    A method that demotes tokens does so after each of them (KIVI's values leave its window one by one), so a token of a
    longer chunk would see some that it should not see exact any more. Methods that store tokens before these are seen
    (``eager``) leave nothing to demote.
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
    """Return the negative log-likelihood of tokens ``first..T-1``, teacher-forced through the cache.

    Every token is predicted from what the cache holds in the method's formats, as if the tokens came one by one: the
    model runs over a chunk of them at once, and in each layer attention takes as many of them at a time as leave every
    other token in the format that it would have (:func:`exact_chunk`), and lets the method settle in between.

    Args:
        cache: fresh.
        ids: ``[B, T]``, no padding.
        first: first scored token, at least 1 and at least `prompt`.
        prompt: tokens that are a prompt (prefilled at once); at least 1 are.
        chunk: tokens of a pass of the model (:func:`pass_tokens`). The sums do not depend on it but for rounding.
        report: called after each pass with the number of the T tokens that are done.

    Returns:
        Sums in nats, ``[B]`` fp32.

    Raises:
        CacheError: the model did not use the cache.
        ValueError: no token could be scored, or tokens of the prompt, or more than there are, were asked for.
    """
    batch, width = ids.shape
    chunk = pass_tokens(chunk)
    if not chunk >= 1:
        raise ValueError(f"chunk={chunk}: a step takes at least one token")
    if not 0 <= prompt <= width:
        raise ValueError(f"prompt={prompt}: ids have {width} tokens, so a prompt has 0 to {width}")
    if not max(1, prompt) <= first < max(width, 2):
        raise ValueError(
            f"first={first}: scored tokens come behind the prompt of {prompt} and before the end: "
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
    """Return the same sums from one forward pass without a cache, ``[B]`` fp32.

    Raises:
        ValueError: the first token was to be scored, which nothing predicts, or more than there are.
    """
    _check_first(ids, first)
    logits = model(input_ids=ids, use_cache=False).logits
    return _nll(logits[:, :-1], ids[:, 1:], first - 1)


@torch.inference_mode()
def simulated_nll(model: PreTrainedModel, cache: KVCache, ids: Tensor, first: int) -> Tensor:
    """Return the same sums from one forward pass with all keys and values in the method's formats.

    Each layer's keys and values are placed as a prompt is, and every token attends to what was placed, causally, itself
    included (as KVQuant, Atom and QuaRot simulate it). ``[B]`` fp32.

    Raises:
        ValueError: as :func:`forward_nll`.
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
    """Attend to the window's own keys and values after they were placed; ``[B, q, Hq, D]``."""
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
        raise ValueError(f"first={first}: of {ids.shape[1]} tokens 1 to {ids.shape[1] - 1} can be scored")


def _nll(logits: Tensor, target: Tensor, skip: int) -> Tensor:
    """Return sums over targets ``[B, n]`` from ``skip`` on, fp32."""
    skip = max(skip, 0)
    if skip >= target.shape[1]:
        return torch.zeros(target.shape[0], device=target.device)
    scores = logits[:, skip:].float()
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target[:, skip:].flatten(), reduction="none")
    return losses.view(target.shape[0], -1).sum(-1)
