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
    """Decode with eager steps until every row has ended, and return the time of each step.

    Args:
        model: causal language model that runs kvbench's attention.
        cache: the cache, which already contains the prompts.
        token: first new token of each row, ``[B]``; not cached yet.
        mask: attention mask ``[B, T]`` of the columns that are cached; None: no padding.
        lengths: number of cached tokens of each row, without padding, ``[B]``.
        stopping: object to which the new tokens are added, and which decides when a row has ended.
        sampling: how tokens are chosen: temperature, top-k and top-p.
        generators: random generator of each row.
        max_new_tokens: limit on the new tokens of every row, the first token included.
        pad_token_id: token fed to rows that have ended.

    Returns:
        The duration of each step in seconds. The tokens themselves are in `stopping`.

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
