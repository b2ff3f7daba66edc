"""kvbench's attention and mask, registered with transformers: one function for every model.

Models call ``fn(module, query, key, value, mask, ...)`` with what ``Cache.update`` returned, which for a kvbench cache
is a handle (:class:`kvbench.cache.layer.Handle`). During prefill the function runs torch's SDPA on keys and values in
full precision. During decoding it appends the new tokens to the stores and computes attention to all stored tokens
(:mod:`kvbench.attention.over_stores`). With any other cache, or none, it does what transformers' own ``sdpa`` does. The
mask function must be registered too: without it transformers passes no mask at all, and padded rows give wrong results
without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvbench.attention import observe, prefill, served
from kvbench.attention.logits import logits_of
from kvbench.attention.over_stores import step, stored_prompt
from kvbench.attention.rope import rotary
from kvbench.attention.served import UNSERVED, check_served
from kvbench.attention.served import check_speculation as check_speculation
from kvbench.cache.layer import Handle, KVLayer
from kvbench.cache.rope import rotated_prompt
from kvbench.errors import CacheError
from kvbench.models import int4
from kvbench.util.attachment import attached, attachment, release

NAME = "kvbench"


def model_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | Handle,
    value: Tensor | Handle,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for any Hugging Face model; models call it through transformers' attention interface.

    Args:
        query: after RoPE, ``[B, Hq, q, D]``.
        key: the :class:`Handle` that a kvbench cache returns from ``update`` in place of keys; or the keys,
            ``[B, H, n, D]``, if another cache or none is in use.
        value: the same :class:`Handle`; or the values, ``[B, H, n, Dv]``.
        attention_mask: one of: a bool mask ``[B, 1, q, kv]``, where kv counts all tokens seen so far, including padding
            and dropped tokens; for a long prompt, bool ``[B, q]``, False at padding
            (:func:`kvbench.attention.prefill.padding`);
            None for causal attention.
        **kwargs: other arguments of the attention interface, including a softcap, sinks and a sliding window.

    Returns:
        The output ``[B, q, Hq, Dv]``, and None in place of attention weights.

    Raises:
        CacheError: the model passes an argument that the stores cannot serve, attention weights are requested, or
            padding is not on the left.
    """
    before = rotary.take(module)  # the keys before RoPE, if the cache stores these
    if kwargs.get("output_attentions"):
        raise CacheError(
            "output_attentions=True: kvbench's attention does not compute attention weights, so it "
            "cannot return them.\n"
            "  hint: call method.detach(model) and model.set_attn_implementation('eager'), and use a "
            "cache of transformers"
        )
    if not isinstance(key, Handle):
        assert not isinstance(value, Handle)
        return prefill.attend_prompt(module, query, key, value, attention_mask, scaling, kwargs)[0], None
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise CacheError(f"{type(module).__name__} uses '{name}' in attention, which kvbench caches do not support")
    layer, logits = key.layer, logits_of(module, query, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    fresh_keys, fresh_values = key.claim()
    if not layer.sealed:  # the prompt is not complete
        see_padding(layer, attention_mask, query.shape[2])
    stored = rotary.stored(layer, fresh_keys, before, module, kwargs.get("position_ids"))
    if layer.sealed:
        return step(module, layer, query, stored, fresh_values, attention_mask, scaling, logits), None
    if layer.method.quantized_prefill:
        return stored_prompt(module, layer, query, stored, fresh_values, attention_mask, scaling, logits), None
    return prompt(module, layer, query, fresh_keys, stored, fresh_values, attention_mask, scaling, kwargs), None


def see_padding(layer: KVLayer, mask: Tensor | None, count: int) -> None:
    """Tell the cache where the new prompt tokens have padding; does nothing on any layer but the first."""
    for member in layer.chain():
        if member.index == 0:
            member.progress.see(mask, layer.batch, count)


def prompt(
    module: torch.nn.Module,
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    stored: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Compute the prefill attention of new prompt tokens over the prompt so far, in full precision.

    The prompt may arrive in several chunks. After its last token, the method decides which tokens are packed, and the
    keys and values of the prompt are written to the layer's stores.

    Args:
        keys: keys of the new tokens after RoPE, ``[B, H, q, D]``.
        stored: keys of the new tokens in the form that the layer stores: `keys` themselves, or the keys before RoPE.
        mask: mask of the new queries, as :func:`kvbench.attention.prefill.attend_prompt` takes it.
    """
    prompt_keys, values = layer.extend_prompt(stored, values)
    if prompt_keys is not stored or layer.rope is None:  # of a prompt in one piece, `keys` are the rotated ones
        keys = rotated_prompt(layer, prompt_keys)
    keys = keys.to(query.dtype)
    exact, logits = values.to(query.dtype), logits_of(module, query, kwargs)
    lse = observe.wanted_lse(layer, query, keys, exact, mask, logits, kwargs)
    out, layer.progress.prefill.path = prefill.attend_prompt(
        module, query, keys, exact, mask, scaling, kwargs, layer.progress.options.prefill, lse
    )
    for member in layer.chain():
        if member.method.observe_prompt:
            member.observed = observe.extend(member, query, keys, mask, scaling, logits, lse)
    layer.end_chunk(prompt_keys, values)
    return out


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Create the attention mask of a forward pass; transformers calls this as its mask function.

    Returns:
        The mask that transformers' ``sdpa`` would get: bool ``[B, 1, q, kv]``, where kv counts all tokens seen so far,
        including padding and dropped tokens, or None. For a long prompt with left padding, bool ``[B, T]`` instead,
        False at padding (:func:`kvbench.attention.prefill.padding`).
    """
    padding = prefill.padding(kwargs)
    return sdpa_mask(*args, **kwargs) if padding is None else padding


def register() -> None:
    """Register ``attn_implementation="kvbench"`` with transformers; repeated calls are harmless."""
    AttentionInterface.register(NAME, model_attention)
    AttentionMaskInterface.register(NAME, mask)


def attach(model: PreTrainedModel) -> None:
    """Switch a model to kvbench's attention; :func:`detach` restores the previous implementation.

    Raises:
        ModelError: kvbench does not support the model's attention (:func:`check_served`).
    """
    register()
    check_served(model)
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != NAME:
        attachment(model).attention = config._attn_implementation
        model.set_attn_implementation(NAME)
    served.attach_refusal(model)


def detach(model: PreTrainedModel) -> None:
    """Restore the attention that a model had before :func:`attach`, and remove all of kvbench's hooks from it."""
    served.detach_refusal(model)
    rotary.detach_pre_rope(model)
    int4.detach(model)
    known = attached(model)
    if known is not None and known.attention is not None:
        model.set_attn_implementation(known.attention)
    release(model)
