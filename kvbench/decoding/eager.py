"""Eager decode steps: one forward pass per token, launched by the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.passes import check_cache, forward, now
from kvbench.decoding.sampling import Sampling, choose
from kvbench.decoding.stopping import Stopping


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
