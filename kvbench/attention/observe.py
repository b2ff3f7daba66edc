"""Attention probabilities of the prompt, for methods that observe them (SnapKV's last queries, H2O's column sums)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.attention import fused
from kvbench.attention.cpu import columns
from kvbench.attention.logits import PLAIN, Logits
from kvbench.attention.prefill import leaves_lse, rows_of
from kvbench.cache.layer import KVLayer

#: scores that are computed at a time, which bounds the memory for any prompt: 256 MiB in fp32; fewer on a CPU, whose
#: caches should hold them
SCORES = {"cpu": 1 << 22}
MOST_SCORES = 1 << 26


def probabilities(
    query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float, first: int, logits: Logits = PLAIN
) -> Tensor:
    """Compute the attention probabilities of consecutive queries of the prompt in fp32.

    Args:
        keys: ``[B, H, T, D]``, the first T keys of the prompt; later ones must not be visible to these queries.
        mask: ``[B or 1, 1, q, T]`` (bool or additive) for these queries, or None for causal attention.
        first: column of the first query in the padded batch. It matters only without a mask.

    Returns:
        ``[B, Hq, q, T]``. A query that sees no key, such as one at padding, has only zeros. With sinks, a query's
        probabilities sum to less than 1.
    """
    batch, query_heads, count, channels = query.shape
    heads, width = keys.shape[1:3]
    q = (query.float() * scaling).reshape(batch, heads, -1, channels)
    scores = (q @ keys.float().transpose(-1, -2)).view(batch, query_heads, count, width)
    scores = logits.capped(scores)
    if mask is None:
        mask = torch.ones(count, width, dtype=torch.bool, device=query.device).tril(first)[None, None]
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    else:
        scores = scores + mask.float()
    sink = logits.column(scores)
    if sink is None:
        return torch.softmax(scores, -1).nan_to_num_(0.0)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :width].nan_to_num(0.0)


def wanted_lse(
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    logits: Logits,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """Return a buffer for each query's log-sum-exp, fp32 ``[B, Hq, q]``, or None if :func:`extend` does not need it.

    Column sums by the CPU kernel need it. The mask must be an ordinary causal one, and torch's attention must be able
    to return log-sum-exps. Arguments are those of :func:`kvbench.attention.prefill.attend_prompt`.
    """
    if all(member.method.observe_prompt != -1 for member in layer.chain()):
        return None
    if layer.progress.options.kernels == "reference" or columns.refuses_columns(query, keys) is not None:
        return None
    if len(query) != layer.batch:
        return None  # some rows of a batch whose prompts are read one after another
    plain = mask is None or mask.ndim == 2 or fused.plain_mask(layer, mask, query.shape[2])
    whole = mask is not None or query.shape[2] == keys.shape[2]  # without a mask, SDPA aligns queries with first keys
    if not plain or not whole or not leaves_lse(query, keys, values, mask, logits, kwargs):
        return None
    return query.new_zeros(query.shape[:3], dtype=torch.float32)


def extend(
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits = PLAIN,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute the attention statistics that a method wants of the prompt, updated with a new chunk of the prompt.

    The attribute ``observe_prompt`` of the layer's method selects the statistics. With n > 0 (SnapKV), they are the
    attention probabilities of the prompt's last n queries. With -1 (H2O), they are column sums: the total probability
    that each token receives from all queries. Column sums slow down prefill, because all T x T scores are computed a
    second time, in fp32 and block by block: on a CPU by a kernel (:mod:`kvbench.attention.cpu.columns`).

    Args:
        layer: layer of the chunk. Its ``observed`` contains the result for the earlier chunks, or None.
        keys: all keys of the prompt so far, ``[B, H, T, D]``.
        lse: each query's log-sum-exp (:func:`wanted_lse`), from which a kernel adds up columns; None: in plain torch.

    Returns:
        The updated statistics, to be stored in ``layer.observed``: probabilities ``[B, Hq, n, T]``, with fewer queries
        than n if the prompt is shorter; or column sums ``[B, Hq, 1, T]``.
    """
    wanted, count, width = layer.method.observe_prompt, query.shape[2], keys.shape[2]
    before = layer.observed
    if before is not None:
        before = torch.nn.functional.pad(before, (0, width - before.shape[-1]))
    most = SCORES.get(query.device.type, MOST_SCORES)
    heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
    # KV heads whose keys are converted to fp32 at a time: all of them would take twice the memory of the layer's keys
    wide = min(max(1, most // (keys.shape[0] * width * keys.shape[-1])), heads)
    parts = [(slice(h, h + wide), slice(h * group, (h + wide) * group)) for h in range(0, heads, wide)]
    if wanted > 0:
        new = min(wanted, count)
        part_mask = rows_of(mask, count - new, count, width)
        seen = torch.empty(*query.shape[:2], new, width, device=query.device)
        for kv, q in parts:
            newest = query[:, q, count - new :]
            seen[:, q] = probabilities(newest, keys[:, kv], part_mask, scaling, width - new, logits.sinks_of(q))
        if before is None or new == wanted:
            return seen
        return torch.cat([before[:, :, -(wanted - new) :], seen], 2)
    shape = (*query.shape[:2], 1, width)
    sums = query.new_zeros(shape, dtype=torch.float32) if before is None else before.clone()
    if lse is not None:
        starts = [layer.start(row) for row in range(len(query))]
        columns.add_received(sums[:, :, 0], query, keys, lse, starts, scaling)
        return sums
    for kv, q in parts:
        own = keys[:, kv].float()
        block = max(1, most // (own.shape[0] * own.shape[1] * group * width))
        for first in range(0, count, block):
            last = min(first + block, count)
            stop = width - count + last  # no query of the block sees a later key
            rows = rows_of(mask, first, last, width)
            rows = None if rows is None else rows[..., :stop]
            here, column = query[:, q, first:last], width - count + first
            part = probabilities(here, own[:, :, :stop], rows, scaling, column, logits.sinks_of(q))
            sums[:, q, :, :stop] += part.sum(2, keepdim=True)
    return sums
