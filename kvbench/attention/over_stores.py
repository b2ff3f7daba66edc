"""Attention of new tokens over all tokens that a layer stores: in decode steps, and in quantized prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.attention import chunks, foreseen, fused, prefill, reference
from kvbench.attention.logits import Logits
from kvbench.cache.layer import KVLayer

#: queries of a prompt that are computed at a time if they attend to the stores (``method.quantized_prefill``)
QUERIES = 1024


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

    This is the prefill of methods that set ``quantized_prefill``: prompt tokens attend to quantized keys and values,
    including their own.

    Args:
        keys: keys of the new tokens in the form that the layer stores, ``[B, H, q, D]``.
        mask: mask of the new queries, as :func:`kvbench.attention.prefill.attend_prompt` takes it.
    """
    layer.progress.prefill.path = "stored"
    layer.place_chunk(keys, values)
    query = layer.rotated_queries(query)
    out = chunks.attend_tiles(layer, query, mask, scaling, logits)
    if out is not None:
        return layer.restored(out)
    count, outs = query.shape[2], []
    for first in range(0, count, QUERIES):
        last = min(first + QUERIES, count)
        visible = prefill.rows_of(mask, first, last, layer.seen)
        if visible is None:
            seen = torch.arange(layer.seen, device=query.device)
            visible = (seen <= seen[layer.seen - count + first : layer.seen - count + last, None])[None, None]
        outs.append(reference.attend_reference(module, layer, query[:, :, first:last], visible, scaling, logits))
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
    many tokens gives the results of calls with `span` tokens each. If it is known in advance when the method packs or
    drops each token, they are processed in one pass (:mod:`kvbench.attention.foreseen`). Otherwise, they are processed
    `span` at a time, and the method may pack or drop tokens in between.

    Args:
        keys: keys of the new tokens in the form that the layer stores, ``[B, H, q, D]``.
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
        together = foreseen.attend_foreseen(layer, query, keys, values, mask, scaling, logits)
        if together is not None:
            return together
    outs, last = [], layer.seen
    plain = fused.plain_mask(layer, mask, count)
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

    Arguments and result are those of :func:`step`, but in the basis in which the layer stores keys and values.

    New tokens see each other in full precision, unless the method sets ``eager``, which packs them before their
    attention is computed.
    """
    layer.append(keys, values)
    if layer.method.eager:
        layer.settle(forget=False)
    attend = chunks.attend_tiles if chunks.prefers_tiles(layer, query) else fused.attend_fused
    out = attend(layer, query, mask, scaling, logits)
    return reference.attend_reference(module, layer, query, mask, scaling, logits) if out is None else out
