"""kvbench's attention and mask as transformers interfaces: one function for every model.

Models call ``fn(module, query, key, value, mask, ...)`` with what ``Cache.update`` returned; a kvbench cache returns a
handle there (:class:`kvbench.cache.layer.Handle`). While the prompt is open the function runs torch's SDPA on the exact
keys and values; afterwards it appends the new tokens and reads the stores. Any other cache, or none, is served as
transformers' own ``sdpa`` would. The mask interface must be registered too: without it transformers passes no mask at
all and padded rows come out wrong without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvbench.attention import fused, observe, prefill, reference
from kvbench.attention.logits import Logits, hands_over, logits_of
from kvbench.attention.rope import pre_rope
from kvbench.cache.layer import Handle, KVLayer
from kvbench.cache.rope import rotated_prompt
from kvbench.errors import CacheError, ModelError
from kvbench.models import int4
from kvbench.models.served import INSTEAD, unserved
from kvbench.util.attachment import attached, attachment, release

NAME = "kvbench"

#: queries of a prompt that are attended at a time where it reads what is stored
QUERIES = 1024

#: arguments of other models' attention that no store can serve
UNSERVED = ("position_bias",)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | Handle,
    value: Tensor | Handle,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for any Hugging Face model.

    Args:
        query: ``[B, Hq, q, D]``, after RoPE.
        key, value: a :class:`Handle`, or tensors ``[B, H, n, D]`` where another cache is in use.
        attention_mask: bool ``[B, 1, q, kv]`` in logical coordinates; a long prompt's padding ``[B, q]``
            (:func:`kvbench.attention.prefill.padding`); or None: causal.
        scaling: factor on the scores; None means 1/sqrt(D).

    Returns:
        ``[B, q, Hq, D]`` and None (no attention weights).

    Raises:
        CacheError: the model needs something that the stores cannot serve, attention weights are asked for, or padding
            is not on the left.
    """
    before = pre_rope.take(module)
    if kwargs.get("output_attentions"):
        raise CacheError(
            "output_attentions=True: kvbench's attention computes no matrix of weights to return.\n"
            "  hint: method.detach(model), then model.set_attn_implementation('eager') and a cache of transformers"
        )
    if not isinstance(key, Handle):
        assert not isinstance(value, Handle)
        return prefill.attend(module, query, key, value, attention_mask, scaling, kwargs)[0], None
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise CacheError(f"{type(module).__name__} uses '{name}' in attention, which kvbench caches do not serve")
    layer, logits = key.layer, logits_of(module, query, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    fresh_keys, fresh_values = key.claim()
    if not layer.sealed:
        see_padding(layer, attention_mask, query.shape[2])
    stored = pre_rope.stored(layer, fresh_keys, before, module, kwargs.get("position_ids"))
    if layer.sealed:
        return step(module, layer, query, stored, fresh_values, attention_mask, scaling, logits), None
    if layer.method.quantized_prefill:
        return stored_prompt(module, layer, query, stored, fresh_values, attention_mask, scaling, logits), None
    return prompt(module, layer, query, fresh_keys, stored, fresh_values, attention_mask, scaling, kwargs), None


def see_padding(layer: KVLayer, mask: Tensor | None, count: int) -> None:
    """Learn the padding of `count` new prompt tokens, once for all layers."""
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
    """Attend exactly over the open prompt, and place the layer after its last token.

    Args:
        stored: the new keys as the layer stores them: `keys` themselves, or what they were before RoPE.
    """
    prompt_keys, values = layer.extend_prompt(stored, values)
    if prompt_keys is not stored or layer.rotation is None:  # of a prompt in one piece, `keys` are the rotated ones
        keys = rotated_prompt(layer, prompt_keys)
    out, layer.progress.prefill.path = prefill.attend(
        module, query, keys, values, mask, scaling, kwargs, layer.progress.options.prefill
    )
    for member in layer.chain():
        if member.method.observe_prompt:
            member.observed = observe.extend(member, query, keys, mask, scaling, logits_of(module, query, kwargs))
    layer.end_chunk(prompt_keys, values)
    return out


def stored_prompt(
    module: torch.nn.Module,
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits,
) -> Tensor:
    """Attend from prompt tokens to what the method stores of the prompt so far, themselves included."""
    layer.progress.prefill.path = "stored"
    layer.place_chunk(keys, values)
    count, outs = query.shape[2], []
    for first in range(0, count, QUERIES):
        last = min(first + QUERIES, count)
        visible = prefill.rows_of(mask, first, last, layer.seen)
        if visible is None:
            seen = torch.arange(layer.seen, device=query.device)
            visible = (seen <= seen[layer.seen - count + first : layer.seen - count + last, None])[None, None]
        outs.append(reference.attend(module, layer, query[:, :, first:last], visible, scaling, logits))
    return torch.cat(outs, 1)


def step(
    module: torch.nn.Module,
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits,
) -> Tensor:
    """Append new tokens to the stores and attend to everything in them; a span at a time if the cache has one."""
    count, span = query.shape[2], layer.progress.span
    if layer.index == 0:
        layer.progress.check_step(mask, layer.batch, count)
    if span is None or span >= count:
        return append_and_attend(module, layer, query, keys, values, mask, scaling, logits)
    outs, last = [], layer.seen
    plain = fused.plain(layer, mask, count)
    for begin in range(0, count, span):
        end = min(begin + span, count)
        layer.seen = last - count + begin
        if begin:  # as before every step; the first one's was done when its tokens arrived
            layer.settle()
        layer.seen = last - count + end
        part = slice(begin, end)
        visible = None if plain else prefill.rows_of(mask, begin, end, last)
        visible = None if visible is None else visible[..., : layer.seen]
        q, k, v = (x[:, :, part] for x in (query, keys, values))
        outs.append(append_and_attend(module, layer, q, k, v, visible, scaling, logits))
    return torch.cat(outs, 1)


def append_and_attend(
    module: torch.nn.Module,
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits,
) -> Tensor:
    """Append new tokens, which see each other exact, and attend to everything in the stores."""
    layer.append(keys, values)
    if layer.method.eager:
        layer.settle(forget=False)
    out = fused.attend(layer, query, mask, scaling, logits)
    return reference.attend(module, layer, query, mask, scaling, logits) if out is None else out


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return a boolean mask in logical coordinates, as for ``sdpa``; attention gathers it by each slot's position."""
    padding = prefill.padding(kwargs)
    return sdpa_mask(*args, **kwargs) if padding is None else padding


def register() -> None:
    """Make ``attn_implementation="kvbench"`` known to transformers (repeating it is harmless)."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def check_served(model: PreTrainedModel) -> None:
    """Raise ModelError where kvbench has no attention for `model`, with what speaks against it."""
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if "num_attention_heads" not in config.to_dict() and not hasattr(config, "num_attention_heads"):
        raise ModelError(f"{name} has no attention heads, so no keys and values to hold: {INSTEAD}")
    reason = unserved(config, name)
    if not reason and getattr(model.config, "is_encoder_decoder", False):
        reason = f"{name} is an encoder and a decoder, whose attention to each other kvbench does not hold: {INSTEAD}"
    if not reason and not getattr(model, "_supports_attention_backend", False):
        reason = f"{name} does not read its attention from transformers' attention interface: {INSTEAD}"
    if not reason and any(sees_later_tokens(module) for module in model.modules()):
        reason = f"{name} attends to later tokens too, so that a cache of earlier ones is not enough: {INSTEAD}"
    if not reason and not one_size(config):
        reason = f"{name} has heads of different sizes or numbers in its layers: {INSTEAD}"
    classes = {type(module) for module in model.modules()} if not reason else ()
    asked = {argument for kind in classes for argument in UNSERVED if hands_over(kind, argument)}
    if asked:
        reason = f"{name} hands '{min(asked)}' to its attention, which kvbench's stores cannot serve: {INSTEAD}"
    if reason:
        raise ModelError(reason)


def sees_later_tokens(module: torch.nn.Module) -> bool:
    """Return True if a layer's attention is not causal (BERT and its kin, unless set up as decoders)."""
    return getattr(module, "is_causal", None) is False and getattr(module, "layer_idx", None) is not None


def one_size(config: Any) -> bool:
    """Return True if all layers have heads of one number and size; a configuration by layers raises for others."""
    try:
        return isinstance(getattr(config, "head_dim", None) or 1, int) and isinstance(config.num_attention_heads, int)
    except Exception:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return False


def attach(model: PreTrainedModel) -> None:
    """Switch `model` to kvbench's attention and remember what it had.

    Raises:
        ModelError: the model's layers are not all softmax attention with a plain key-value cache.
    """
    register()
    check_served(model)
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != NAME:
        attachment(model).attention = config._attn_implementation
        model.set_attn_implementation(NAME)


def detach(model: PreTrainedModel) -> None:
    """Give `model` back the attention that it had before :func:`attach`, and remove all that kvbench attached to it."""
    pre_rope.detach(model)
    int4.detach(model)
    known = attached(model)
    if known is not None and known.attention is not None:
        model.set_attn_implementation(known.attention)
    release(model)
