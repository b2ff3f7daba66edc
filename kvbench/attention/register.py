"""kvbench's attention and mask, registered with transformers: one function for every model.

Models call ``fn(module, query, key, value, mask, ...)`` with what ``Cache.update`` returned, which for a kvbench cache
is a handle (:class:`kvbench.cache.layer.Handle`). During prefill the function runs torch's SDPA on keys and values in
full precision. During decoding it appends the new tokens to the stores and computes attention to all stored tokens.
With any other cache, or none, it does what transformers' own ``sdpa`` does. The mask function must be registered too:
without it transformers passes no mask at all, and padded rows give wrong results without an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvbench.attention import foreseen, fused, observe, prefill, reference
from kvbench.attention.logits import Logits, hands_over, logits_of
from kvbench.attention.rope import pre_rope
from kvbench.cache.layer import Handle, KVLayer
from kvbench.cache.rope import rotated_prompt
from kvbench.errors import CacheError, ModelError
from kvbench.models import int4
from kvbench.models.layers import LayerKind, layer_kinds
from kvbench.models.served import INSTEAD, unserved
from kvbench.util.attachment import attached, attachment, release

NAME = "kvbench"

#: queries of a prompt that are computed at a time if they attend to the stores (``method.quantized_prefill``)
QUERIES = 1024

#: arguments that some models pass to attention and that kvbench's stores cannot serve
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
    """Compute attention for any Hugging Face model; models call it through transformers' attention interface.

    Args:
        module: the model's attention module.
        query: queries of the new tokens, ``[B, Hq, q, D]``, after RoPE.
        key: the :class:`Handle` that a kvbench cache returns from ``update`` in place of keys; or the keys,
            ``[B, H, n, D]``, if another cache or none is in use.
        value: the same :class:`Handle`; or the values, ``[B, H, n, Dv]``.
        attention_mask: one of: a bool mask ``[B, 1, q, kv]``, where kv counts all tokens seen so far, including padding
            and dropped tokens; for a long prompt, bool ``[B, q]``, False at padding
            (:func:`kvbench.attention.prefill.padding`);
            None for causal attention.
        scaling: factor by which scores are multiplied; None for 1/sqrt(D).
        **kwargs: other arguments of the attention interface, including a softcap, sinks and a sliding window.

    Returns:
        The output ``[B, q, Hq, Dv]``, and None in place of attention weights.

    Raises:
        CacheError: the model passes an argument that the stores cannot serve, attention weights are requested, or
            padding is not on the left.
    """
    before = pre_rope.take(module)
    if kwargs.get("output_attentions"):
        raise CacheError(
            "output_attentions=True: kvbench's attention does not compute attention weights, so it "
            "cannot return them.\n"
            "  hint: call method.detach(model) and model.set_attn_implementation('eager'), and use a "
            "cache of transformers"
        )
    if not isinstance(key, Handle):
        assert not isinstance(value, Handle)
        return prefill.attend(module, query, key, value, attention_mask, scaling, kwargs)[0], None
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise CacheError(f"{type(module).__name__} uses '{name}' in attention, which kvbench caches do not support")
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
    """Tell the cache where the new prompt tokens have padding; does nothing on any layer but the first.

    Args:
        layer: the layer whose attention is being computed.
        mask: the mask or the padding that the model passed (:func:`attention`), or None.
        count: number of new tokens.
    """
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
        module: the model's attention module.
        layer: layer that stores the new tokens.
        query: queries of the new tokens, ``[B, Hq, q, D]``.
        keys: keys of the new tokens after RoPE, ``[B, H, q, D]``.
        stored: keys of the new tokens in the form that the layer stores: `keys` themselves, or the keys before RoPE.
        values: values of the new tokens, ``[B, H, q, Dv]``.
        mask: mask of the new queries, as :func:`kvbench.attention.prefill.attend` takes it.
        scaling: factor by which scores are multiplied.
        kwargs: other arguments of the attention interface.

    Returns:
        The output ``[B, q, Hq, Dv]``.
    """
    prompt_keys, values = layer.extend_prompt(stored, values)
    if prompt_keys is not stored or layer.rope is None:  # of a prompt in one piece, `keys` are the rotated ones
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
    """Quantize and store new prompt tokens, then compute their attention over all stored tokens.

    This is the prefill of methods that set ``quantized_prefill``: the attention of the prompt reads quantized keys and
    values too, including those of the token itself.

    Args:
        module: the model's attention module.
        layer: layer that stores the new tokens.
        query: queries of the new tokens, ``[B, Hq, q, D]``.
        keys: keys of the new tokens in the form that the layer stores, ``[B, H, q, D]``.
        values: values of the new tokens, ``[B, H, q, Dv]``.
        mask: mask of the new queries, as :func:`kvbench.attention.prefill.attend` takes it.
        scaling: factor by which scores are multiplied.
        logits: the model's softcap and sinks.

    Returns:
        The output ``[B, q, Hq, Dv]``.
    """
    layer.progress.prefill.path = "stored"
    layer.place_chunk(keys, values)
    query = layer.rotated_queries(query)
    count, outs = query.shape[2], []
    for first in range(0, count, QUERIES):
        last = min(first + QUERIES, count)
        visible = prefill.rows_of(mask, first, last, layer.seen)
        if visible is None:
            seen = torch.arange(layer.seen, device=query.device)
            visible = (seen <= seen[layer.seen - count + first : layer.seen - count + last, None])[None, None]
        outs.append(reference.attend(module, layer, query[:, :, first:last], visible, scaling, logits))
    return layer.restored(torch.cat(outs, 1))


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
    """Append the new tokens of a decode step to a layer's stores, and compute their attention over all cached tokens.

    If ``layer.progress.span`` is set (for perplexity, :func:`kvbench.decoding.perplexity.decode_nll`), one call with
    many tokens gives the same results as one call for each so many of them. If it is known in advance when the method
    packs or drops each token, they are processed in one pass (:mod:`kvbench.attention.foreseen`). Otherwise, they are
    processed that many at a time, and the method may pack or drop tokens in between.

    Args:
        module: the model's attention module.
        layer: layer that stores the new tokens.
        query: queries of the new tokens, ``[B, Hq, q, D]``.
        keys: keys of the new tokens in the form that the layer stores, ``[B, H, q, D]``.
        values: values of the new tokens, ``[B, H, q, Dv]``.
        mask: bool or additive ``[B or 1, 1, q, kv]``, where kv counts all tokens seen so far, including padding and
            dropped tokens; None for causal attention.
        scaling: factor by which scores are multiplied.
        logits: the model's softcap and sinks.

    Returns:
        The output ``[B, q, Hq, Dv]``.
    """
    count, span = query.shape[2], layer.progress.span
    if layer.index == 0:
        layer.progress.check_step(mask, layer.batch, count)
    query = layer.rotated_queries(query)
    if span is None or span >= count:
        out = append_and_attend(module, layer, query, keys, values, mask, scaling, logits)
    else:
        out = in_spans(module, layer, query, keys, values, mask, scaling, logits, span)
    return layer.restored(out)


def in_spans(
    module: torch.nn.Module,
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits,
    span: int,
) -> Tensor:
    """Append many new tokens, and compute their attention as if they had come `span` at a time; as :func:`step` does.

    Queries and output are in the basis in which the layer stores keys and values.
    """
    count = query.shape[2]
    if not layer.method.eager:  # a form by turn is that before a token's own step; these pack it first
        together = foreseen.attend(layer, query, keys, values, mask, scaling, logits)
        if together is not None:
            return together
    outs, last = [], layer.seen
    plain = fused.plain(layer, mask, count)
    for begin in range(0, count, span):
        end = min(begin + span, count)
        layer.seen = last - count + begin
        if begin:  # as before every step; for the first span it was done when the tokens arrived
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
    """Append new tokens to a layer's stores, and compute their attention in one pass, without packing in between.

    Queries and output are in the basis in which the layer stores keys and values.

    New tokens see each other in full precision, unless the method sets ``eager``, which packs them before their
    attention is computed.

    Args:
        module: the model's attention module.
        layer: layer that stores the new tokens.
        query: queries of the new tokens, ``[B, Hq, q, D]``.
        keys: keys of the new tokens in the form that the layer stores, ``[B, H, q, D]``.
        values: values of the new tokens, ``[B, H, q, Dv]``.
        mask: bool or additive ``[B or 1, 1, q, kv]``, where kv counts all tokens seen so far, including padding and
            dropped tokens; None for causal attention.
        scaling: factor by which scores are multiplied.
        logits: the model's softcap and sinks.

    Returns:
        The output ``[B, q, Hq, Dv]``.
    """
    layer.append(keys, values)
    if layer.method.eager:
        layer.settle(forget=False)
    out = fused.attend(layer, query, mask, scaling, logits)
    return reference.attend(module, layer, query, mask, scaling, logits) if out is None else out


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Create the attention mask of a forward pass; transformers calls this as its mask function.

    Args:
        *args: positional arguments of transformers' mask interface.
        **kwargs: keyword arguments of the same interface.

    Returns:
        The mask that transformers' ``sdpa`` would get: bool ``[B, 1, q, kv]``, where kv counts all tokens seen so far,
        including padding and dropped tokens, or None. For a long prompt with left padding, bool ``[B, T]`` instead,
        False at padding (:func:`kvbench.attention.prefill.padding`).
    """
    padding = prefill.padding(kwargs)
    return sdpa_mask(*args, **kwargs) if padding is None else padding


def register() -> None:
    """Register ``attn_implementation="kvbench"`` with transformers; repeated calls are harmless."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def check_served(model: PreTrainedModel) -> None:
    """Raise ModelError if kvbench does not support a model's attention; the message gives the reason."""
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if "num_attention_heads" not in config.to_dict() and not hasattr(config, "num_attention_heads"):
        raise ModelError(f"{name} has no attention heads, so it has no keys and values to cache; {INSTEAD}")
    reason = unserved(config, name)
    if not reason and getattr(model.config, "is_encoder_decoder", False):
        reason = f"{name} is an encoder-decoder model, whose cross-attention kvbench does not support; {INSTEAD}"
    if not reason and not uses_interface(model):
        reason = f"{name} does not use transformers' attention interface; {INSTEAD}"
    if not reason and not any(kind.attends for kind in layer_kinds(model.config)):
        reason = f"{name} has no layers with softmax attention, so no keys and values to cache; {INSTEAD}"
    if not reason and any(sees_later_tokens(module) for module in model.modules()):
        reason = f"{name} also attends to later tokens, so a cache of earlier tokens is not enough; {INSTEAD}"
    if not reason and not one_size(config):
        reason = f"{name} has layers with different head sizes or numbers of heads; {INSTEAD}"
    classes = {type(module) for module in model.modules()} if not reason else ()
    asked = {argument for kind in classes for argument in UNSERVED if hands_over(kind, argument)}
    if asked:
        reason = f"{name} hands '{min(asked)}' to its attention, which kvbench does not support; {INSTEAD}"
    if reason:
        raise ModelError(reason)


def check_speculation(speculation: Any, kinds: Sequence[LayerKind], name: str) -> None:
    """Raise ModelError if a method speculates on a hybrid model, whose layers cannot take rejected tokens back.

    Args:
        speculation: the method's speculative decoding; None if it does not speculate.
        kinds: kinds of the model's layers.
        name: name of the model's class for the message.
    """
    if speculation is not None and any(kind.states for kind in kinds):
        raise ModelError(
            f"{name} has layers with a state of fixed size (linear attention, Mamba or convolution), which cannot go "
            "back over rejected drafts, so it cannot decode speculatively.\n"
            "  hint: choose a method without speculation, such as method=kivi"
        )


def uses_interface(model: PreTrainedModel) -> bool:
    """Return True if a model computes attention through transformers' attention interface.

    Many hybrid models do without saying so (``_supports_attention_backend``). This looks for the interface's name in
    the byte code of their attention modules.

    Args:
        model: the model.
    """
    if getattr(model, "_supports_attention_backend", False):
        return True
    classes = {type(module) for module in model.modules() if getattr(module, "is_causal", None) is not None}
    codes = [getattr(inspect.unwrap(kind.forward), "__code__", None) for kind in classes]
    return bool(codes) and all(code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


def sees_later_tokens(module: torch.nn.Module) -> bool:
    """Return True if a module is an attention module in which tokens also attend to later tokens.

    This is so in BERT-like models, unless they are configured as decoders.

    Args:
        module: any module of the model.
    """
    return getattr(module, "is_causal", None) is False and getattr(module, "layer_idx", None) is not None


def one_size(config: Any) -> bool:
    """Return True if all layers of a model have the same number of heads and the same head size.

    Args:
        config: the text model's configuration. Transformers raises an error on reading an attribute that differs
            between layers; this function then returns False.
    """
    try:
        return isinstance(getattr(config, "head_dim", None) or 1, int) and isinstance(config.num_attention_heads, int)
    except Exception:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return False


def attach(model: PreTrainedModel) -> None:
    """Switch a model to kvbench's attention; :func:`detach` restores the previous implementation.

    Args:
        model: causal language model.

    Raises:
        ModelError: kvbench does not support the model's attention (:func:`check_served`).
    """
    register()
    check_served(model)
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != NAME:
        attachment(model).attention = config._attn_implementation
        model.set_attn_implementation(NAME)


def detach(model: PreTrainedModel) -> None:
    """Restore the attention that a model had before :func:`attach`, and remove all of kvbench's hooks from it."""
    pre_rope.detach(model)
    int4.detach(model)
    known = attached(model)
    if known is not None and known.attention is not None:
        model.set_attn_implementation(known.attention)
    release(model)
