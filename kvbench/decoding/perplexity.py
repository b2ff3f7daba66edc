"""The likelihood of a text: token by token through a cache, in one simulated pass, or without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvbench.attention import chunks, reference
from kvbench.attention.logits import logits_of
from kvbench.attention.register import NAME, mask, model_attention
from kvbench.attention.rope import rotary
from kvbench.cache import KVCache
from kvbench.cache.layer import Handle
from kvbench.cache.policy import Policy
from kvbench.decoding.forced import forced_nll
from kvbench.decoding.passes import check_cache, forward, prefill
from kvbench.decoding.recordable import Graphs
from kvbench.methods.fp16 import FP16
from kvbench.util.attachment import storage_of

#: default number of tokens of a forward pass: with more, it is hardly faster, and logits take more memory
PASS = 128
#: the same on a GPU, where each pass of a lossy method dequantizes all that is stored
GPU_PASS = 512
#: largest number of tokens of a batch whose logits are converted to fp32 at a time
SCORED = 4096

#: index of the first scored token, for all rows or for each
First = int | Sequence[int]


def pass_tokens(chunk: int | Literal["auto"], device: torch.device | None = None) -> int:
    """Return the number of tokens per row and forward pass: `chunk`, or for ``auto`` what suits the device."""
    if chunk != "auto":
        return chunk
    return GPU_PASS if device is not None and device.type == "cuda" else PASS


def exact_chunk(method: Policy[Any], chunk: int) -> int:
    """Return how many tokens attention may process at a time so that the result is as in decoding token by token.

    The answer is `chunk` or 1. Most methods pack or drop tokens after each step. If attention processed several tokens
    at a time, later ones would attend to tokens in full precision that decoding would have packed by then. Hence
    `chunk` is returned only in two cases: the method packs and drops no tokens after the prompt, or it packs each token
    before any token attends to it (``eager``). Methods that observe attention always get 1.

    With 1, several tokens can still share a pass if it is known in advance when each of them is packed or dropped
    (:mod:`kvbench.attention.foreseen`).
    """
    still = (not method.settles or method.eager) and not method.observe_steps
    return chunk if still else 1


@torch.inference_mode()
def decode_nll(
    model: PreTrainedModel,
    cache: KVCache,
    ids: Tensor,
    first: First,
    *,
    mask: Tensor | None = None,
    prompt: int = 0,
    chunk: int | Literal["auto"] = "auto",
    report: Callable[[int], None] | None = None,
    graphs: Graphs = "never",
    compile: bool = False,
) -> Tensor:
    """Return the negative log-likelihood of the tokens ``first`` to ``T - 1`` of a text, as in decoding with a cache.

    Tokens are teacher-forced: each is predicted from the text's own tokens before it, in the form in which the method's
    cache stores them at that point. For speed, the model runs on a chunk of tokens at once. In each layer, attention
    processes as many of them at a time as possible without changing the result (:func:`exact_chunk`,
    :mod:`kvbench.attention.foreseen`), and the method packs or drops tokens in between. If attention must go token by
    token, steps of one token per row are captured as a CUDA graph, where `graphs` allows that.

    Args:
        model: causal language model that runs kvbench's attention.
        cache: an empty cache.
        ids: token ids ``[B, T]``, padded on the left if at all.
        first: index of the first scored token, at least 1 and at least `prompt`; a number per row if rows differ.
        mask: attention mask ``[B, T]``, 0 at padding, which must end before the prompt does; None: no padding.
        prompt: number of columns at the beginning of the text that are prefilled at once; 0 is treated as 1.
        chunk: tokens per row and forward pass; ``auto``: :data:`GPU_PASS` on a GPU, else :data:`PASS`. It affects the
            result only by rounding. With 1, each pass is an ordinary decode step.
        report: called after each pass with the number of tokens processed so far.
        graphs: whether steps may be captured as CUDA graphs, as for :func:`kvbench.decoding.autoregressive.generate`.

    Returns:
        For each row, the negative log-likelihood in nats, summed over the scored tokens, fp32 ``[B]``.

    Raises:
        CacheError: the model did not use the cache.
        ValueError: `first`, `prompt` or `chunk` is out of range, or a row's padding does not end before the prompt.
    """
    batch, width = ids.shape
    size = pass_tokens(chunk, ids.device)
    if not size >= 1:
        raise ValueError(f"chunk={chunk}: must be at least 1 token")
    if not 0 <= prompt <= width:
        raise ValueError(f"prompt={prompt}: must be from 0 to {width}, the number of tokens in ids")
    firsts = _firsts(first, batch)
    for number in firsts:
        if not max(1, prompt) <= number < max(width, 2):
            raise ValueError(
                f"first={number}: must be after the prompt of {prompt} tokens and before the end, that is, from "
                f"{max(1, prompt)} to {width - 1}"
            )
    place = max(1, prompt)
    if mask is not None and not bool(mask[:, place - 1 :].all()):
        raise ValueError(f"prompt={prompt}: a row's padding does not end before the prompt does")
    if place == width:
        prefill(model, cache, ids[:, :place], mask)
        check_cache(cache, place)
        return torch.zeros(batch, device=ids.device)
    cache.progress.span = exact_chunk(cache.method, size)
    # prompts of a cache that was made without them have their padding from the mask
    logits = prefill(model, cache, ids[:, :place], None if mask is None else mask[:, :place])
    total = nll(logits[:, None], ids[:, place : place + 1], firsts, place)
    if report is not None:
        report(place + 1)
    del logits
    lengths = torch.full((batch,), place, device=ids.device) if mask is None else mask[:, :place].sum(-1)
    rest = None
    if size > 1 and cache.progress.span == 1 and not foreseen(cache):
        rest = forced_nll(model, cache, ids, firsts, lengths, report, graphs, compile)
    if rest is None:
        rest = _by_passes(model, cache, ids, firsts, mask, lengths, size, report)
    check_cache(cache, max(width - 1, 1))
    return (total + rest).float()


def _by_passes(
    model: PreTrainedModel,
    cache: KVCache,
    ids: Tensor,
    firsts: list[int],
    mask: Tensor | None,
    lengths: Tensor,
    size: int,
    report: Callable[[int], None] | None,
) -> Tensor:
    """Return each row's negative log-likelihood, fp64 ``[B]``, by passes over `size` uncached tokens each."""
    width, begin = ids.shape[1], cache.get_seq_length()
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for place in range(begin, width - 1, size):
        last = min(place + size, width - 1)
        positions = lengths[:, None] + torch.arange(place - begin, last - begin, device=ids.device)
        seen = None if mask is None else mask[:, :last]
        logits = forward(model, cache, ids[:, place:last], seen, positions, all_logits=True)
        total += nll(logits, ids[:, place + 1 : last + 1], firsts, place + 1)
        del logits  # before the next pass allocates its own
        if report is not None:
            report(last + 1)
    return total


def foreseen(cache: KVCache) -> bool:
    """Return True if it is known in advance when each token of a cache is packed or dropped, in every layer.

    Passes over many tokens then need not go token by token (:mod:`kvbench.attention.foreseen`). The cache already
    contains the prompts.
    """
    return all(
        layer.method.demotions(layer, layer.real_tokens(0)) is not None and all(order is None for order in layer.order)
        for layer in cache.kv_layers
    )


@torch.inference_mode()
def forward_nll(model: PreTrainedModel, ids: Tensor, first: First) -> Tensor:
    """Return the negative log-likelihood of the tokens ``first`` to ``T - 1`` of a text, computed in one pass.

    No cache is needed, except where the model computes in a wider dtype than caches store: keys and values are then
    those of the full-precision cache.

    Args:
        ids: token ids ``[B, T]``, without padding.
        first: index of the first scored token, at least 1, because no token predicts token 0; a number per row if rows
            differ.

    Returns:
        For each row, the negative log-likelihood in nats, summed over the scored tokens, fp32 ``[B]``.

    Raises:
        ValueError: `first` is not between 1 and T - 1.
    """
    firsts = _check_first(ids, first)
    if storage_of(model) == model.dtype:
        logits = model(input_ids=ids, use_cache=False).logits
    else:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        logits = forward(model, FP16().new_cache(model), ids, None, positions, all_logits=True)
    return nll(logits[:, :-1], ids[:, 1:], firsts, 1).float()


@torch.inference_mode()
def simulated_nll(model: PreTrainedModel, cache: KVCache, ids: Tensor, first: First) -> Tensor:
    """Return the negative log-likelihood of the tokens ``first`` to ``T - 1`` of a text, with simulated quantization.

    There is one forward pass. In each layer, the method first stores the keys and values of the whole text as if the
    text were a prompt. Then every token attends causally to these stored, quantized keys and values, including its own.
    KVQuant, Atom and QuaRot simulate quantization like this in their evaluations.

    `ids`, `first`, result and errors are as for :func:`forward_nll`. CacheError is raised if the model did not use the
    cache.
    """
    firsts = _check_first(ids, first)
    return nll(simulated_logits(model, cache, ids)[:, :-1], ids[:, 1:], firsts, 1).float()


def _check_first(ids: Tensor, first: First) -> list[int]:
    firsts = _firsts(first, len(ids))
    for number in firsts:
        if not 1 <= number < max(ids.shape[1], 2):
            raise ValueError(
                f"first={number}: must be from 1 to {ids.shape[1] - 1}, because ids has {ids.shape[1]} tokens"
            )
    return firsts


def _firsts(first: First, batch: int) -> list[int]:
    if isinstance(first, int):
        return [first] * batch
    if len(first) != batch:
        raise ValueError(f"first has {len(first)} numbers for {batch} rows")
    return list(first)


def nll(logits: Tensor, target: Tensor, firsts: Sequence[int], place: int) -> Tensor:
    """Return each row's summed negative log-likelihood of consecutive tokens, fp64 ``[B]``.

    Logits are converted to fp32 for a few tokens at a time.

    Args:
        logits: ``[B, n, V]``.
        target: the tokens that the logits predict, ``[B, n]``.
        firsts: for each row, the index in the text of the first token that counts.
        place: index in the text of ``target[:, 0]``.
    """
    total = torch.zeros(len(target), dtype=torch.float64, device=target.device)
    step = max(1, SCORED // len(target))
    limits = torch.tensor(firsts, device=target.device)[:, None] - place
    for begin in range(max(min(firsts) - place, 0), target.shape[1], step):
        part = target[:, begin : begin + step]
        scores = logits[:, begin : begin + step].float().flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(scores, part.flatten(), reduction="none").view(part.shape)
        counted = torch.arange(begin, begin + part.shape[1], device=target.device) >= limits
        total += losses.double().where(counted, 0.0).sum(-1)
    return total


SIMULATED = "kvbench_simulated"


@torch.inference_mode()
def simulated_logits(model: PreTrainedModel, cache: KVCache, ids: Tensor) -> Tensor:
    """Return the logits of a text without padding in one pass with simulated quantization, ``[B, T, V]``.

    :func:`kvbench.decoding.perplexity.simulated_nll` describes the pass.

    Raises:
        CacheError: the model did not use the cache.
    """
    AttentionInterface.register(SIMULATED, _simulated)
    AttentionMaskInterface.register(SIMULATED, mask)
    model.set_attn_implementation(SIMULATED)
    for layer in cache.kv_layers:  # every query of the window attends, so a sliding layer drops nothing
        layer.window = None
    try:
        batch, width = ids.shape
        positions = torch.arange(width, device=ids.device).expand(batch, -1)
        logits = forward(model, cache, ids, None, positions, all_logits=True)
    finally:
        model.set_attn_implementation(NAME)
    check_cache(cache, width)
    return logits


def _simulated(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then return attention to the stored ones, ``[B, q, Hq, Dv]``, and None."""
    if not isinstance(key, Handle):
        return model_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    layer = key.layer
    keys, values = key.claim()
    if layer.index == 0:
        layer.progress.see(attention_mask, layer.batch, query.shape[2])
    keys = rotary.stored(layer, keys, rotary.take(module), module, kwargs.get("position_ids"))
    layer.place(keys, values)
    scaling, logits = query.shape[-1] ** -0.5 if scaling is None else scaling, logits_of(module, query, kwargs)
    query = layer.rotated_queries(query)
    out = chunks.attend_tiles(layer, query, attention_mask, scaling, logits)
    if out is None:
        if attention_mask is None:
            count = query.shape[2]
            attention_mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()[None, None]
        out = reference.attend_reference(module, layer, query, attention_mask, scaling, logits)
    return layer.restored(out), None
