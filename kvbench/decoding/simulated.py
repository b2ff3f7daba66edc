"""One pass over a text with simulated quantization: every token attends to stored, quantized keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvbench.attention import reference
from kvbench.attention.logits import logits_of
from kvbench.attention.register import NAME, attention, mask
from kvbench.attention.rope import pre_rope
from kvbench.cache import KVCache
from kvbench.cache.layer import Handle
from kvbench.decoding.passes import check_cache, forward

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
    logits = logits_of(module, query, kwargs)
    out = reference.attend(module, layer, layer.rotated_queries(query), attention_mask, scaling, logits)
    return layer.restored(out), None
