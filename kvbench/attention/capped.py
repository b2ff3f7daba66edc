"""Attention of a prompt to itself in models with a softcap or attention sinks, in bounded memory.

Torch's SDPA supports neither. Sinks are turned into one extra key, so that SDPA's fast back ends can serve them. Every
query gets a few extra channels that hold its head's sink. Ordinary keys are zero in these channels. The extra key is
one in them and zero elsewhere, and its value is zero. A softcap is not linear in the scores and cannot be expressed
that way, so capped scores are computed here, for some KV heads and a block of queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.attention.logits import Logits

#: scores that are computed at a time: 64 MiB in fp32 (about four such tensors exist at once); fewer on a CPU, whose
#: caches should hold them
SCORES = {"cpu": 1 << 20}
MOST_SCORES = 1 << 24
#: channels that are added for a sink. Three would do: a sum of three numbers of any dtype represents a sink exactly.
#: Eight keep the alignment that SDPA's fast back ends require
CHANNELS = 8


def with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Express a model's attention sinks as one extra key before all others, so that plain SDPA can compute them.

    Extra channels are appended to queries and keys, such that the score of a query with the extra key is the sink of
    that query's head. The value of the extra key is zero.

    Args:
        mask: ``[B or 1, Hq or 1, q, n]`` (bool or additive), or None.
        scaling: factor by which the scores of tokens are multiplied; sinks are not multiplied.
        causal: True if `mask` is None and attention is causal. A query of zeros is then put in front as well, so that
            SDPA's causal mask still lets query i see key i.

    Returns:
        Four arguments for SDPA: query, keys and values with 8 extra channels and the extra key in front, and the mask.
        In SDPA's output, only the last q queries and the first Dv channels are meaningful.
    """
    batch, heads, count, channels = query.shape
    # clamped to the range of fp16 (65504): a sink that far from all scores takes all of the probability, or none
    parts, rest = query.new_zeros(heads, CHANNELS), (sinks.float() / scaling).clamp(-3e4, 3e4)
    for i in range(3):
        parts[:, i] = rest.to(query.dtype)
        rest = rest - parts[:, i].float()
    query = torch.cat([query, parts[None, :, None].expand(batch, heads, count, CHANNELS)], -1)
    pad = torch.nn.functional.pad
    if causal:
        query = pad(query, (0, 0, 1, 0))
    first = keys.new_zeros(*keys.shape[:2], 1, channels + CHANNELS)
    first[..., channels : channels + 3] = 1
    keys = torch.cat([first, pad(keys, (0, CHANNELS))], 2)
    values = pad(values, (0, CHANNELS, 1, 0))
    if mask is not None:
        mask = pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    return query, keys, values, mask


def attend_capped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits,
    *,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention with a softcap, for a few KV heads and queries at a time to bound the memory for scores.

    Args:
        query: queries of the new tokens, ``[B, Hq, q, D]``. With a causal mask, these are the last q of the n tokens.
        mask: ``[B or 1, Hq or 1, q, n]`` (bool or additive), or None.
        causal: what ``mask=None`` means. True: causal attention. False: every query sees every key.
        dropout: probability with which attention weights are dropped (training).
    """
    batch, query_heads, count, _ = query.shape
    heads, width = keys.shape[1:3]
    group = query_heads // heads
    most = SCORES.get(query.device.type, MOST_SCORES)
    wide = min(max(1, most // (batch * group * width * min(count, 128))), heads)
    outs = []
    for head in range(0, heads, wide):
        kv, q = slice(head, head + wide), slice(head * group, (head + wide) * group)
        part_keys, block = keys[:, kv], max(1, most // (batch * keys[:, kv].shape[1] * group * width))
        parts = []
        for first in range(0, count, block):
            last = min(first + block, count)
            stop = width - count + last if mask is None and causal else width
            visible = mask if mask is None else mask[:, q if mask.shape[1] > 1 else slice(None), first:last]
            if mask is None and causal:
                visible = torch.ones(last - first, stop, dtype=torch.bool, device=query.device)
                visible = visible.tril(width - count + first)[None, None]
            parts.append(
                _tile(
                    query[:, q, first:last],
                    part_keys[:, :, :stop],
                    values[:, kv, :stop],
                    visible,
                    scaling,
                    logits.sinks_of(q),
                    dropout,
                )
            )
        outs.append(torch.cat(parts, 2))
    return torch.cat(outs, 1).transpose(1, 2).contiguous()


def _tile(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, logits: Logits, dropout: float
) -> Tensor:
    """Return the attention ``[B, Hq, q, Dv]`` of a few queries ``[B, Hq, q, D]``, with all their scores in fp32."""
    batch, query_heads, count, _ = query.shape
    heads = keys.shape[1]
    rows = query.reshape(batch * heads, -1, query.shape[-1])
    scores = _product(rows, keys.flatten(0, 1).transpose(1, 2)).view(batch, query_heads, count, -1)
    scores = logits.capped(scores * scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    sink = logits.column(scores)
    weights = torch.softmax(scores if sink is None else torch.cat([scores, sink], -1), -1)
    weights = weights[..., : scores.shape[-1]].nan_to_num(0.0)  # padding sees nothing
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    weights = weights.to(values.dtype).view(batch * heads, -1, scores.shape[-1])
    out = _product(weights, values.flatten(0, 1))
    return out.view(batch, query_heads, count, -1).to(query.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product ``[N, m, n]`` of batches ``[N, m, k]`` and ``[N, k, n]``, accumulated in fp32.

    Half precision on a GPU is multiplied by tensor cores; everything else is converted to fp32 first.
    """
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16) and not torch.is_grad_enabled():
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def causal(module: torch.nn.Module, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Return True if a causal mask must be applied, by the rule of transformers' ``sdpa``.

    That is the case only if no mask is given, there is more than one query, and ``is_causal`` is True.

    Args:
        module: the model's attention module; its attribute ``is_causal`` is used unless `kwargs` contain ``is_causal``.
        query: queries of the new tokens, ``[B, Hq, q, D]``. For a single query (q = 1) the result is False, because it
            sees all keys.
    """
    given = kwargs.get("is_causal")
    return mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if given is None else given)
