"""Forward passes with a kvbench cache: the prompt, a step of new tokens, and the check that the model used the cache.

kvbench has its own loops for two reasons. Transformers' ``generate`` may replace a cache without a warning (for Phi-3
longrope beyond its original length). And it does not tell the cache which prefill chunk is the last.
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

#: number of prompts in one forward pass (:func:`prefill_groups`)
Rows = int | Literal["auto"] | None
#: number of tokens of a pass over several prompts; with more it needs more memory but is no faster
TOGETHER = 16384


def prefill(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int | None = None,
    rows: Rows = "auto",
) -> Tensor:
    """Run the model on the prompts to fill the cache, and return the logits of each prompt's last token, ``[B, V]``.

    Prompt tokens attend to keys and values in full precision, unless the method sets ``quantized_prefill``.

    Args:
        cache: an empty cache, which holds the prompts afterwards.
        input_ids: prompts ``[B, T]``, padded on the left.
        mask: attention mask ``[B, T]``; None: no padding.
        chunk: tokens per forward pass; None: the whole prompt at once.
        rows: prompts per forward pass (:func:`prefill_groups`); fewer need less memory.

    Raises:
        CacheError: the cache was used before, or the model used another cache.
        NonFiniteError: the returned logits contain NaN or +Inf, so no token can be chosen from them.
    """
    logits = _prompt(model, cache, input_ids, mask, chunk, rows)
    bad = (torch.isnan(logits) | torch.isposinf(logits)).any(-1).nonzero()
    if len(bad):
        damaged = "download the weights again, since they must be damaged"
        remedy = (
            damaged if logits.dtype == torch.float32 else f"set model.dtype=float32; if the error remains, {damaged}"
        )
        raise NonFiniteError(
            f"the model's logits after the prompt of row {int(bad[0])} contain NaN or Inf: either the model's weights "
            f"contain them too, or its activations exceed the range of {str(logits.dtype).removeprefix('torch.')}.\n"
            f"  hint: {remedy}"
        )
    return logits


def _prompt(
    model: PreTrainedModel, cache: KVCache, input_ids: Tensor, mask: Tensor | None, chunk: int | None, rows: Rows
) -> Tensor:
    if cache.get_seq_length():
        raise CacheError(
            f"the cache already contains {cache.get_seq_length()} tokens of another prompt: create a "
            "new one for each prompt with "
            "method.new_cache(model), or call cache.reset(). For several questions on one text, see "
            "kvbench.decoding.questions"
        )
    batch, width = input_ids.shape
    slice_size = cache.options.mlp_chunk
    if mask is None:
        positions = torch.arange(width, device=input_ids.device).expand(batch, width)
    else:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    parts = (
        [slice(0, batch)] if chunk is not None and chunk < width else prefill_groups(cache, batch, width, mask, rows)
    )
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


def prefill_groups(cache: KVCache, batch: int, width: int, mask: Tensor | None, rows: Rows) -> list[slice]:
    """Divide a batch into groups of prompts that are prefilled one after another; return a slice of rows for each.

    If several groups are impossible, there is only one. This is so if the cache stores keys before RoPE, if prompts
    attend to quantized keys and values, or if there is padding that was not declared when the cache was created.

    Args:
        width: columns of the padded prompts.
        rows: prompts per group; ``auto``: as many as have :data:`TOGETHER` tokens together, at least 1; None: all.
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
    """Run the model on new tokens, append these to the cache, and return their logits.

    The tokens go one by one if the model cannot continue the states of its layers with several at once (Jamba).

    Args:
        input_ids: new tokens ``[B, q]``.
        mask: attention mask ``[B, T + q]`` of the T cached and q new columns; None: no padding.
        positions: positions of the new tokens, ``[B, q]``.
        all_logits: True: return the logits of all new tokens, ``[B, q, V]``; False: of the last one, ``[B, 1, V]``.
    """
    count = input_ids.shape[1]
    if count > 1 and cache.one_by_one:
        seen = cache.get_seq_length()
        steps = [
            forward(
                model,
                cache,
                input_ids[:, i : i + 1],
                None if mask is None else mask[:, : seen + i + 1],
                positions[:, i : i + 1],
            )
            for i in range(count)
        ]
        return torch.cat(steps if all_logits else steps[-1:], 1)
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
    """Raise CacheError unless each row of the cache has received `expected` tokens, padding included.

    If the number differs, the model has used another cache.
    """
    if cache.get_seq_length() != expected:
        raise CacheError(
            f"the cache contains {cache.get_seq_length()} tokens, but {expected} went through the "
            "model, so the model used "
            "another cache and this run would not measure the method"
        )


def now(tensor: Tensor) -> float:
    """Wait for the device of a tensor to finish all work queued before this call, and return the time in seconds.

    Only differences between two such times are meaningful.
    """
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
