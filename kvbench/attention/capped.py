"""Attention of a prompt to itself where scores are capped or heads have sinks; never all scores at once.

Torch's SDPA has neither. A sink, though, is one more key: every query has a few channels more, which hold its head's
sink, the keys have zeros there, and one key has ones there and nothing else, and a value of zeros. So sinks run on
SDPA's fast back ends. A cap is not linear in the scores: these are made here, for some KV heads and a few queries at a
time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.attention.logits import Logits

#: scores that are made at a time: 64 MiB in fp32 (some four such tensors live together), or what a CPU's caches hold
SCORES = {"cpu": 1 << 20}
MOST_SCORES = 1 << 24
#: channels that are added for a sink: in three pieces its value is exact in every dtype, and 8 keep the alignment that
#: SDPA's fast back ends ask for
CHANNELS = 8


def with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Extend keys by one in front, whose score is the sink of the query's head, so that SDPA serves sinks.

    Args:
        query: ``[B, Hq, q, D]``. keys, values: ``[B, H, n, D]``.
        mask: ``[B or 1, heads or 1, q, n]``, or None.
        sinks: ``[Hq]``.
        causal: `mask` is None and stands for a causal one: a query that sees the sink alone is put in front too.

    Returns:
        query, keys and values with 8 channels more, and the mask; the output's last q queries and first Dv channels
        count.
    """
    batch, heads, count, channels = query.shape
    # fp16 ends at 65504; a sink that is so far from all scores decides alone or not at all
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


def attend(
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
    """Compute attention with capped scores, for some KV heads and queries at a time.

    Args:
        query: ``[B, Hq, q, D]``; the last q of the n tokens.
        keys, values: ``[B, H, n, D]``.
        mask: ``[B or 1, heads or 1, q, n]`` (bool or additive), or None.
        causal: what None stands for; else everything is visible.
        dropout: of probabilities (training).

    Returns:
        ``[B, q, Hq, Dv]``.
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
    """Compute attention of a few queries ``[B, Hq, q, D]``, whose scores are made in fp32; ``[B, Hq, q, Dv]``."""
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
    """Multiply batches ``[N, m, k] [N, k, n]`` in fp32; half precision uses matrix instructions."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16) and not torch.is_grad_enabled():
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def causal(module: torch.nn.Module, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Return True if a missing mask stands for a causal one, by the rule of transformers' ``sdpa``."""
    given = kwargs.get("is_causal")
    return mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if given is None else given)
