"""Attention over the stores in plain torch: what kernels are tested against, and the path where none can serve.

It reads keys and values one block of tokens at a time, in any format, and merges the blocks by log-sum-exp in fp32
(online softmax; Cocktail eq. 4-5 and LogQuant eq. 4 are this merge over storage formats). At any time, at most one
block of one segment is dequantized to full precision, and keys and values are never concatenated.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvbench.attention import ragged
from kvbench.attention.logits import PLAIN, Logits
from kvbench.attention.merge import BLOCK, ELEMENTS, MASKED, Merge, grouped, largest_block
from kvbench.cache.layer import KVLayer
from kvbench.cache.rope import rotated_slots
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.store import Store
from kvbench.quantizers.engine.arithmetic import Arithmetic


def attend_reference(
    module: torch.nn.Module,
    layer: KVLayer,
    query: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits = PLAIN,
) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens; arguments: :mod:`kvbench.attention`."""
    outputs = []
    groups = layer.row_groups()
    if len(groups) > 1 and query.device.type != "cpu" and layer.rounding(query.shape[2]) is None:
        together = ragged.attend_ragged(layer, query, mask, scaling, logits)
        if together is not None:
            return together
    if layer.method.reading_order(layer, slice(0, 1)) is not None:  # rows may differ in their order
        groups = [slice(row, row + 1) for row in range(layer.batch)]
    for rows in groups:
        slot_mask = mask_over_slots(layer, rows, query, mask)
        outputs.append(attend_rows(module, layer, rows, query[rows], slot_mask, scaling, logits))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_rows(
    module: torch.nn.Module,
    layer: KVLayer,
    rows: slice,
    query: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits = PLAIN,
) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens, for rows whose segments are equally long.

    Args:
        mask: mask over the slots of these rows (:func:`mask_over_slots`), or None if every slot is visible.
    """
    keys, values = layer.stores()
    full_keys, full_values = keys.only_full(rows), values.only_full(rows)
    observed = layer.method.observe_steps
    if full_keys is not None and full_values is not None and logits.plain and not observed and not layer.rope:
        layer.paths.add("sdpa")
        full_keys, full_values = full_keys.to(query.dtype), full_values.to(query.dtype)
        if mask is None and query.shape[2] == 1 and query.device.type == "cpu":
            return one_token(query, full_keys, full_values, scaling)
        return sdpa_attention_forward(module, query, full_keys, full_values, mask, scaling=scaling)[0]
    layer.paths.update(("reference", "packed") if full_keys is None or full_values is None else ("reference",))
    if observed or query.device.type != "cpu":
        out, probabilities = merge_blocks(layer, rows, query, mask, scaling, logits, keep=observed)
        if probabilities is not None:
            layer.method.observe(layer, rows, probabilities)
    else:
        out = in_caches(layer, rows, query, mask, scaling, logits)
    return out.transpose(1, 2).to(query.dtype)


def in_caches(
    layer: KVLayer, rows: slice, query: Tensor, mask: Tensor | None, scaling: float, logits: Logits
) -> Tensor:
    """Compute the output of :func:`merge_blocks` for so few rows at a time that a CPU's caches hold their blocks."""
    first, last, _ = rows.indices(layer.batch)
    longest = max((stop - start for start, stop in slot_blocks(layer, rows)), default=1)
    row_elements = longest * layer.heads * max(layer.key_dim, layer.value_dim)  # of one row's largest block
    step = max(ELEMENTS // row_elements, 1)
    outs = []
    for row in range(first, last, step):
        some = slice(row, min(row + step, last))
        part = slice(some.start - first, some.stop - first)
        visible = mask[part] if mask is not None and mask.shape[0] > 1 else mask
        outs.append(merge_blocks(layer, some, query[part], visible, scaling, logits, together=last - first)[0])
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def merge_blocks(
    layer: KVLayer,
    rows: slice,
    query: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits = PLAIN,
    *,
    keep: bool = False,
    together: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention one block of slots at a time, and combine the blocks by an online softmax.

    Args:
        mask: as for :func:`attend_rows`.
        keep: True to return the probabilities as well, for a method that observes attention.
        together: number of rows for which blocks are chosen, if `rows` are only some of them.

    Returns:
        The output in fp32, ``[rows, Hq, q, Dv]``; and the probabilities ``[rows, Hq, q, slots]``, or None unless
        `keep`.
    """
    keys, values = layer.stores()
    batch, query_heads, count, _ = query.shape
    group, upper = query_heads // layer.heads, layer.progress.upper
    rounding, observed = layer.rounding(count), list[Tensor]()
    dtype = torch.float32 if rounding is None else rounding.stored
    q, sums = grouped(layer, query, scaling), None
    if rounding is not None:
        q, sums = rounded_queries(layer, query, scaling, rounding)
    merge = Merge(layer, q, query_heads, logits, rounding)
    for start, stop in slot_blocks(layer, rows, together):
        # a block may lie in several segments, of which those of values end elsewhere than those of keys
        parts = [
            q @ rotated_slots(layer, rows, a, b, keys.read(rows, a, b, dtype, upper).float()).transpose(-1, -2)
            for a, b in pairwise(keys.cuts(rows, start, stop))
        ]
        if sums is not None:
            minima = [minima_of(keys, rows, a, b) for a, b in pairwise(keys.cuts(rows, start, stop))]
            parts = [part + sums @ least.transpose(-1, -2) for part, least in zip(parts, minima, strict=True)]
        scores = logits.capped(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        if mask is not None:
            visible = mask[..., start:stop]
            grid = scores.view(batch, layer.heads, group, count, stop - start)
            # [rows or 1, H or 1, group or 1, q, block]: a mask may differ between query heads (SnapKV)
            visible = visible.unflatten(1, (layer.heads, group)) if visible.shape[1] > 1 else visible.unsqueeze(1)
            if visible.dtype == torch.bool:
                scores = grid.masked_fill(~visible, MASKED).view_as(scores)
            else:
                scores = (grid + visible.float().clamp(min=MASKED)).view_as(scores)
        if keep:
            observed.append(scores)
        cuts = pairwise(values.cuts(rows, start, stop))
        merge.add(scores, [(b - a, partial(read_values, values, rows, a, b, dtype, upper)) for a, b in cuts])
    out = merge.output()
    if out is None:  # rows whose prompt is padding so far hold nothing
        return query.new_zeros(batch, query_heads, count, layer.value_dim, dtype=torch.float32), (
            query.new_zeros(batch, query_heads, count, 0, dtype=torch.float32) if keep else None
        )
    return out, merge.probabilities(observed) if keep else None


def rounded_queries(
    layer: KVLayer, query: Tensor, scaling: float, rounding: Arithmetic
) -> tuple[Tensor, Tensor | None]:
    """Return the queries of :func:`grouped`, rounded as an engine does, and :meth:`Arithmetic.sums` of them."""
    before, after = (scaling, 1.0) if rounding.scaled else (1.0, scaling)
    scaled = query.float() * before
    rounded = rounding.rounded(scaled)
    sums = rounding.sums(scaled, rounded)
    return grouped(layer, rounded, after), None if sums is None else grouped(layer, sums, after)


def minima_of(keys: Store, rows: slice, start: int, stop: int) -> Tensor:
    """Return the minima of the key blocks in consecutive slots of one segment, fp32 ``[rows, H, n, D / 32]``."""
    segment, first = keys.holding(rows, start)
    if isinstance(segment, PackedSegment):
        return segment.read_minima(rows, start - first, stop - first)
    return torch.zeros((), device=segment.device)  # exact keys have no blocks


def read_values(values: Store, rows: slice, start: int, stop: int, dtype: torch.dtype, upper: bool) -> Tensor:
    """Return the values in consecutive slots of one segment, rounded to a dtype, in fp32."""
    return values.read(rows, start, stop, dtype, upper).float()


def one_token(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Compute the attention of one new token per row to keys and values in full precision, by SDPA.

    The query heads that share a KV head are passed as several queries of one head, so keys and values are read once.
    Stock transformers calls SDPA so that it reads them once per query head. The sums are the same, but in bf16 on a CPU
    that takes seven times as long.
    """
    batch, heads, _, channels = query.shape
    grouped = query.reshape(batch, keys.shape[1], heads // keys.shape[1], channels)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(batch, 1, heads, values.shape[-1])


def slot_blocks(layer: KVLayer, rows: slice, together: int | None = None) -> list[tuple[int, int]]:
    """Divide the slots into blocks that are small enough to be dequantized at once.

    Args:
        together: number of rows for which blocks are chosen; None: that of `rows`.

    Returns:
        Pairs ``(first slot, one past the last slot)``, in the order in which attention must read them. The largest
        number of tokens in a block is the larger of two numbers: :data:`BLOCK`, and the number of tokens whose keys (or
        values, if these have more channels) have :data:`ELEMENTS` elements over all rows and heads.
    """
    keys, _ = layer.stores()
    count = together or len(range(*rows.indices(layer.batch)))
    most = largest_block(count, layer.heads, max(layer.key_dim, layer.value_dim), BLOCK, ELEMENTS)
    ranges = layer.method.reading_order(layer, rows) or [(0, keys.length(rows))]
    return [(first, min(first + most, stop)) for start, stop in ranges for first in range(start, stop, most)]


def mask_over_slots(layer: KVLayer, rows: slice, query: Tensor, mask: Tensor | None) -> Tensor | None:
    """Convert an attention mask over the tokens of the sequence to one over the slots in which a layer holds tokens.

    Args:
        query: only its shape and device are used.

    Returns:
        ``[rows or 1, 1 or Hq, q, slots]``, or None if every slot is visible.
    """
    keys, _ = layer.stores()
    slots, count, device = keys.length(rows), query.shape[2], query.device
    if mask is None:
        if count == 1:
            return None
        # the newest tokens are the last slots: causal among themselves, everything older is visible
        return torch.ones(count, slots, dtype=torch.bool, device=device).tril(slots - count)[None, None]
    mask = mask[rows] if mask.shape[0] > 1 else mask
    numbers = range(*rows.indices(layer.batch))
    in_order = all(layer.method.positions(layer, row) is None for row in numbers)
    # what lies before `start` is not stored: padding, and in order also what a sliding window has passed
    start = layer.first(numbers[0]) if in_order else layer.start(numbers[0])
    if count == 1 and mask.dtype == torch.bool and bool(mask[..., start:].all()):
        return None  # only padding and tokens before the sliding window are masked, and these are not stored
    if in_order:
        return mask[..., start : start + slots]
    positions = torch.stack([layer.positions(row) for row in numbers]).to(device)
    if positions.ndim == 2:
        index = positions[:, None, None, :]
    else:  # heads keep different tokens: the positions of a KV head apply to the query heads of its group
        index = positions.repeat_interleave(query.shape[1] // layer.heads, 1)[:, :, None, :]
    mask = mask.expand(len(positions), index.shape[1], count, mask.shape[-1])
    return mask.gather(-1, index.expand(len(positions), index.shape[1], count, slots))
