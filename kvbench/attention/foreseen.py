"""Attention of many known tokens in one pass, with the result of decoding them one by one.

When the likelihood of a text is measured, all its tokens are known in advance. Most methods pack or drop a token after
a number of tokens that is known in advance too (``Method.demotions``). A pass over many tokens then need not go token
by token: a token that is packed during the pass takes part twice, in full precision and dequantized, and each query
sees the form in which the cache would have held the token at that query's turn. The result differs from that of single
steps only by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvbench.attention import fused, turns
from kvbench.attention.logits import Logits
from kvbench.cache.layer import KVLayer
from kvbench.cache.rope import rotated_columns, rotated_slots
from kvbench.cache.store import Store

#: name of this path in results
PATH = "sdpa (forms by turn)"


@dataclass(frozen=True)
class Plan:
    """The forms, exact or packed, of all tokens that some query of a pass sees, and which query sees which form.

    The forms are numbered: first the slots of the stores before the pass, then the new tokens in full precision, then
    the slots :attr:`again` of the stores after the pass.

    Args:
        keys: for each column of :attr:`bias`, the number of its key's form, ``[m]``; None: 0, 1, 2 and so on.
        values: the same for the values.
        again: range of slots (first, one past the last) that is read again after the pass; empty if no slot is.
        bias: 0 where a query sees a column, else minus infinity, ``[1 or rows, 1, q, m]`` in the dtype of the queries.
    """

    keys: Tensor | None
    values: Tensor | None
    again: tuple[int, int]
    bias: Tensor


def attend_foreseen(
    layer: KVLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits,
) -> Tensor | None:
    """Append the new tokens of a pass to a layer's stores, and compute their attention as if they had come one by one.

    The method packs or drops what single steps would have packed or dropped.

    Args:
        layer: layer that stores the new tokens; :attr:`KVLayer.seen` already counts them.
        query: queries of the new tokens in the basis in which the layer stores keys, ``[B, Hq, q, D]``.
        keys: keys of the new tokens, before or after RoPE as the layer stores them, ``[B, H, q, D]``.

    Returns:
        The output ``[B, q, Hq, Dv]``; None, with nothing appended, if it is not known in advance when the method packs
        or drops tokens, or if the slots of a layer hold different tokens in different rows or heads.
    """
    count, last = query.shape[2], layer.seen
    if layer.index == 0:
        layer.progress.plans.clear()
    groups = layer.row_groups()
    times = [layer.method.demotions(layer, last - layer.start(rows.indices(layer.batch)[0])) for rows in groups]
    if any(time is None for time in times) or any(order is not None for order in layer.order):
        return None
    plain = fused.plain_mask(layer, mask, count)
    moments = [time for time in times if time is not None]
    if plain and (out := turns.attend_by_turns(layer, query, keys, values, moments, scaling, logits)) is not None:
        return out
    stored_keys, stored_values = layer.rotated(keys, values)
    if layer.rope is not None:
        stored_keys = rotated_columns(layer, last - count, keys)
    stored_keys, stored_values = stored_keys.to(query.dtype), stored_values.to(query.dtype)
    layer.seen = last - count  # as before the pass, for what reads or appends; `turns.store_pass` puts it back
    # for each group of rows, columns, keys and values: copies, as the buffers change below
    before = [_with(_slots(layer, rows, query.dtype), stored_keys[rows], stored_values[rows]) for rows in groups]
    lengths = [layer.lengths(rows) for rows in groups]
    turns.store_pass(layer, keys, values, last)
    layer.paths.add(PATH)
    plans: dict[Any, Plan] = layer.progress.plans
    outputs = []
    for rows, old, shape, time in zip(groups, before, lengths, times, strict=True):
        row = rows.indices(layer.batch)[0]
        here = rows.start, rows.stop, layer.window, query.device, id(mask), id(layer.method)
        key = (last, count, *here, str(shape), str(layer.lengths(rows)))
        if key not in plans:
            assert time is not None
            columns = old[0], layer.positions(row)
            plans[key] = planned(columns, time, last - count, count, layer.start(row), None if plain else mask, query)
        plan = plans[key]
        forms = [old[1], old[2]]
        first, stop = plan.again
        if first < stop:
            fresh = _dequantized_slots(layer, rows, first, stop, query.dtype)
            forms = [torch.cat([x, y], 2) for x, y in zip(forms, fresh, strict=True)]
        if plan.keys is not None and plan.values is not None:
            forms = [x.index_select(2, index) for x, index in zip(forms, (plan.keys, plan.values), strict=True)]
        bias = plan.bias if plan.bias.shape[0] == 1 else plan.bias[rows]
        outputs.append(biased(query[rows], forms[0], forms[1], bias, scaling, logits))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def planned(
    columns: tuple[Tensor, Tensor],
    times: tuple[Tensor, Tensor],
    first: int,
    count: int,
    start: int,
    mask: Tensor | None,
    like: Tensor,
) -> Plan:
    """Return the forms of all tokens that the queries of a pass see, for rows with equal padding and equal segments.

    Args:
        columns: column of the token in each slot before the pass, and in each slot after it.
        times: for each token of the text, after how many tokens its key, and its value, is packed or dropped
            (:meth:`kvbench.cache.policy.Policy.demotions`).
        first: column of the first query.
        start: column of the first real token.
        mask: mask of the queries over columns, as :func:`attend_foreseen` takes it; None: causal.
        like: tensor with the dtype and the device of the result.
    """
    n = first + count - start
    base, later, chosen = turns.forms(columns, times, first, count, start)
    # only the slots that some later form needs are read again, in one range
    again = torch.cat([index[index >= len(base[0])] for index in chosen]) - len(base[0])
    bounds = (int(again.min()), int(again.max()) + 1) if len(again) else (0, 0)
    token, begin, end = (torch.cat(parts) for parts in zip(base, later, strict=True))
    device = like.device
    # the same on the device: the mask may be large
    place, begin, end = (x.to(device) for x in (token, begin, end))
    turn = torch.arange(first - start, n, device=device)[:, None]
    visible = (place <= turn) & (begin <= turn) & (turn < end)
    if mask is not None:
        shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        visible = visible & shown.index_select(-1, place + start)
    else:
        visible = visible[None, None]
    bias = torch.zeros(visible.shape, dtype=like.dtype, device=device).masked_fill_(~visible, float("-inf"))
    if len(token) == len(base[0]):
        return Plan(None, None, (0, 0), bias)
    numbers = [torch.cat([torch.arange(len(base[0])), index]) for index in chosen]
    # slots after the pass are numbered from the first that is read
    index = [torch.where(x >= len(base[0]), x - bounds[0], x).to(device) for x in numbers]
    return Plan(index[0], index[1], bounds, bias)


def biased(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, logits: Logits) -> Tensor:
    """Return the attention of several queries per row with an additive mask.

    Args:
        bias: 0 or minus infinity, ``[1 or B, 1, q, m]``.
    """
    batch, query_heads, count, channels = query.shape
    heads, group = keys.shape[1], query_heads // keys.shape[1]
    if logits.plain:
        # the query heads of a KV head are further queries of one head, so its keys and values are not copied
        grouped = query.reshape(batch, heads, group * count, channels)
        wide = bias if group == 1 else bias.repeat(1, 1, group, 1)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=wide, scale=scaling)
        return out.reshape(batch, query_heads, count, -1).transpose(1, 2)
    grouped = (query.float() * scaling).reshape(batch, heads, group * count, channels)
    scores = (grouped @ keys.float().transpose(-1, -2)).view(batch, query_heads, count, -1)
    scores = logits.capped(scores) + bias.float()
    column = logits.column(scores)
    weights = torch.softmax(scores if column is None else torch.cat([scores, column], -1), -1)[..., : keys.shape[2]]
    out = weights.reshape(batch, heads, group * count, -1) @ values.float()
    return out.reshape(batch, query_heads, count, -1).transpose(1, 2).to(query.dtype)


def _slots(layer: KVLayer, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the column of the token in each slot, and the keys (after RoPE) and values in all slots, dequantized."""
    keys, values = _dequantized_slots(layer, rows, 0, layer.length(rows), dtype)
    return layer.positions(rows.indices(layer.batch)[0]), keys, values


def _with(slots: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append the keys and values of new tokens to those that :func:`_slots` returned."""
    return slots[0], torch.cat([slots[1], keys], 2), torch.cat([slots[2], values], 2)


def _dequantized_slots(layer: KVLayer, rows: slice, first: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys (after RoPE) and the values of consecutive slots, dequantized, ``[rows, H, n, D]``."""
    keys, values = layer.stores()
    exact = torch.float32 if layer.rope is not None else dtype
    parts = [
        rotated_slots(layer, rows, a, b, keys.read(rows, a, b, exact)).to(dtype)
        for a, b in _cuts(keys, rows, first, stop)
    ]
    others = [values.read(rows, a, b, dtype) for a, b in _cuts(values, rows, first, stop)]
    return _joined_parts(parts, keys, rows, dtype), _joined_parts(others, values, rows, dtype)


def _cuts(store: Store, rows: slice, first: int, stop: int) -> Sequence[tuple[int, int]]:
    return list(pairwise(store.cuts(rows, first, stop))) if first < stop else []


def _joined_parts(parts: Sequence[Tensor], store: Store, rows: slice, dtype: torch.dtype) -> Tensor:
    if not parts:
        return store.tail.view(rows)[:, :, :0].to(dtype)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)
