"""Forward passes over a kvbench cache: the prompt, a step of new tokens, and the check that the model used the cache.

kvbench runs its own loops because transformers' ``generate`` may replace a foreign cache without a word (Phi-3 longrope
past its original length) and cannot say which prefill chunk is the last.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.slices import sliced
from kvbench.errors import CacheError


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
    with sliced(model, batch * min(chunk, width)):
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


def now(tensor: Tensor) -> float:
    """Host clock once everything queued on the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
