"""Attention over a layer's stores by the CPU kernel that unpacks one tile of tokens at a time.

This kernel serves what the CPU's decode kernel does not: many new tokens that attend to packed ones (as in quantized
prefill), and KVQuant's codes, whose keys are stored before RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.attention import fused
from kvbench.attention.cpu import build, chunk_kernel
from kvbench.attention.logits import Logits
from kvbench.attention.phases import NotServed, work
from kvbench.cache.layer import KVLayer


def prefers_tiles(layer: KVLayer, query: Tensor) -> bool:
    """Return True if a step on a CPU should try :func:`attend_tiles`, because the CPU's decode kernel refuses it."""
    if query.device.type != "cpu" or layer.progress.options.kernels not in ("auto", "cpu"):
        return False
    return layer.rope is not None or (layer.method.eager and query.shape[2] > 1)


def attend_tiles(layer: KVLayer, query: Tensor, mask: Tensor | None, scaling: float, logits: Logits) -> Tensor | None:
    """Compute the attention of the newest tokens over all stored tokens, or return None if the kernel cannot.

    The name of the kernel, or the reason why it could not be used, is added to ``layer.paths``.

    Args:
        query: queries of the newest tokens in the basis in which the layer stores keys, ``[B, Hq, q, D]``.
        mask: mask of the new queries, as :func:`kvbench.attention.prefill.attend_prompt` takes it.

    Returns:
        ``[B, q, Hq, Dv]``, or None.
    """
    if layer.progress.options.kernels not in ("auto", "cpu") or query.device.type != "cpu":
        return None
    if not any(segment.packed for segment in layer.segments()):
        return None  # torch's own SDPA serves what is exact
    try:
        check_causal_chunk(layer, mask, query.shape[2])
        described = work(layer, upper=layer.progress.upper)
        described.logits = logits
        reason = chunk_kernel.refuses_chunk(query, described)
        if reason is not None:
            raise NotServed(reason)
    except NotServed as reason:
        layer.paths.add(f"reference (cpu: {reason})")
        return None
    layer.paths.update(fused.label(build.kernel_name(), described))
    count, outs = query.shape[2], []
    for rows in row_groups(layer):
        first = rows.start
        order, stored = layer.method.positions(layer, first), layer.length(rows)
        columns = torch.arange(layer.seen - stored, layer.seen) if order is None else order
        counts = described.counts[first]
        ages = columns[stored - sum(tokens for *_, tokens in counts) :] - (layer.seen - count)
        runs = chunk_kernel.causal_runs(counts, stored, ages, layer.window)
        outs.append(chunk_kernel.attend_phases(query[rows], rows, described, runs, scaling))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def check_causal_chunk(layer: KVLayer, mask: Tensor | None, count: int) -> None:
    """Raise NotServed unless attention is causal, perhaps with a sliding window, and no probabilities are needed."""
    if layer.method.observe_steps:
        raise NotServed(f"{type(layer.method).__name__.lower()} needs attention weights")
    fused.check_rounding(layer, count)
    if layer.method.reading_order(layer, slice(0, 1)) is not None:
        raise NotServed("segments must be read in the order of the text")
    if layer.window is not None and count > 1 and layer.seen > layer.window:
        raise NotServed(f"a sliding window hides different tokens from each of the {count} new tokens")
    orders = [layer.method.positions(layer, row) for row in range(layer.batch)]
    if any(order is not None and order.ndim > 1 for order in orders):
        raise NotServed("the heads of a row hold different tokens")
    if mask is not None and mask.ndim != 2 and not fused.plain_mask(layer, mask, count, layer.window):
        raise NotServed("the mask hides more than padding and later tokens")


def row_groups(layer: KVLayer) -> list[slice]:
    """Divide the batch into runs of rows that one call of the kernel can serve.

    The rows of a run have equally long segments. If the slots of any row are not in the order of the text, each row is
    a run of its own.
    """
    if all(layer.method.positions(layer, row) is None for row in range(layer.batch)):
        return layer.row_groups()
    return [slice(row, row + 1) for row in range(layer.batch)]
