"""Forward passes over a kvbench cache: the prompt, a step of new tokens, and the check that the model used the cache.

kvbench runs its own loops because transformers' ``generate`` may replace a foreign cache without a word (Phi-3 longrope
past its original length) and cannot say which prefill chunk is the last.
"""

from __future__ import annotations

import time
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.slices import sliced
from kvbench.errors import CacheError, NonFiniteError

#: prompts that are run in one forward pass
Rows = int | Literal["auto"] | None
#: tokens of a pass over several prompts: more make it no faster, only larger
TOGETHER = 16384


def prefill(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int | None = None,
    rows: Rows = "auto",
) -> Tensor:
    """Run the prompt ``[B, T]``; logits of its last token, ``[B, V]``. Every token attends to exact keys and values.

    Args:
        chunk: tokens a forward pass; None: the whole prompt at once.
        rows: prompts a forward pass (:func:`groups`): the memory of a pass, packed cache apart, grows with them.

    Raises:
        CacheError: the cache was used before, or the model used another one.
        NonFiniteError: the logits are not numbers, so every answer would be the token 0.
    """
    logits = _prompt(model, cache, input_ids, mask, chunk, rows)
    bad = (torch.isnan(logits) | torch.isposinf(logits)).any(-1).nonzero()
    if len(bad):
        raise NonFiniteError(
            f"the model's logits behind the prompt of row {int(bad[0])} hold NaN or Inf: its weights do, or "
            f"its numbers pass the range of {str(logits.dtype).removeprefix('torch.')}.\n"
            "  hint: model.dtype=float32 tells which; damaged weights have to be fetched again"
        )
    return logits


def _prompt(
    model: PreTrainedModel, cache: KVCache, input_ids: Tensor, mask: Tensor | None, chunk: int | None, rows: Rows
) -> Tensor:
    if cache.get_seq_length():
        raise CacheError(
            f"the cache holds {cache.get_seq_length()} tokens of another prompt already: make a new one for each, "
            "method.new_cache(model), or call cache.reset(); several questions on one text: kvbench.decoding.questions"
        )
    batch, width = input_ids.shape
    slice_size = cache.options.mlp_chunk
    if mask is None:
        positions = torch.arange(width, device=input_ids.device).expand(batch, width)
    else:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    parts = [slice(0, batch)] if chunk is not None and chunk < width else groups(cache, batch, width, mask, rows)
    if len(parts) > 1:
        last_logits = []
        for part in parts:
            with cache.only(part, batch), sliced(model, (part.stop - part.start) * width, slice_size):
                own = None if mask is None else mask[part]
                last_logits.append(forward(model, cache, input_ids[part], own, positions[part])[:, -1])
        cache.finalize()
        check_cache(cache, width)
        return torch.cat(last_logits)
    chunk = chunk or width
    if chunk < width:
        cache.open_prefill()
    logits = input_ids.new_empty(0)
    with sliced(model, batch * min(chunk, width), slice_size):
        for first in range(0, width, chunk):
            last = min(first + chunk, width)
            seen = None if mask is None else mask[:, :last]
            logits = forward(model, cache, input_ids[:, first:last], seen, positions[:, first:last])
    cache.finalize()
    check_cache(cache, width)
    return logits[:, -1]


def groups(cache: KVCache, batch: int, width: int, mask: Tensor | None, rows: Rows) -> list[slice]:
    """Return the rows whose prompts are run together.

    Args:
        rows: so many at a time; ``auto``: as many as make :data:`TOGETHER` tokens; None: all of them. All at once where
            the cache cannot take them in groups: keys before RoPE, prompts read through what is stored, padding that
            it does not know.
    """
    if rows == "auto":
        rows = max(1, TOGETHER // width)
    if (
        rows is None
        or rows >= batch
        or not cache.takes_groups()
        or (mask is not None and not cache.progress.prefill.prompts)
    ):
        return [slice(0, batch)]
    return [slice(first, min(first + rows, batch)) for first in range(0, batch, rows)]


def forward(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    *,
    all_logits: bool = False,
) -> Tensor:
    """Run one forward pass of new tokens ``[B, q]``; logits ``[B, q, V]`` (``[B, 1, V]`` unless `all_logits`)."""
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
    """Return the host's clock once everything queued on the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
