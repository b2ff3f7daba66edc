"""Likelihoods of given continuations, read through the cache: the context is prefilled, then one token at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.drafting import prepare
from kvbench.decoding.passes import check_cache, forward, prefill
from kvbench.errors import NonFiniteError


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
    the continuation follow one token at a time, each on what the method holds by then, as in decoding.

    Args:
        cache: an empty cache of a kvbench method; it holds the prefilled context afterwards.
        context: token ids, at least one; so has each continuation.
        prefill_chunk: context tokens per forward pass; None: all at once.

    Yields:
        For each continuation: its log-likelihood in nats, summed over its tokens in fp32; True if every token of it is
        the most probable one; and the cache after the last token that was fed, which may be read until the next
        continuation.

    Raises:
        CacheError: the cache was used before, or the model did not use it.
        NonFiniteError: the logits after the context are NaN or Inf, or those after a later token NaN.
    """
    prepare(model, None)
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
