"""Number of spans of a text that run at once: as many as the GPU's free memory holds, while more are still faster."""

from __future__ import annotations

import torch

from kvbench.decoding.perplexity import SCORED, exact_chunk, foreseen, pass_tokens
from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.methods.bytes import kv_bytes
from kvbench.models.load import LoadedModel, Shape
from kvbench.tasks.work import ScoreText

#: tokens of a pass over all rows: with more, a GPU is hardly faster
TOGETHER = 8192
#: rows of a batch whose tokens go one by one: a step reads the weights once for all rows
STEPPED = 64
#: part of the free memory that is used; the rest is for what the prediction leaves out
SHARE = 0.8


def rows_at_once(method: Method, loaded: LoadedModel, span: ScoreText, limit_gb: float | None = None) -> int:
    """Return the number of spans of a batch for ``runtime.span_rows=auto`` on a GPU.

    The method is without speculation, as in the whole module. `limit_gb` is that of :func:`free_bytes`.
    """
    width, device = len(span.ids), loaded.device
    size = pass_tokens(span.chunk, device) if span.mode == "decode" else width
    stepped = span.mode == "decode" and goes_by_steps(method, loaded, size)
    most = STEPPED if stepped else max(1, -(-TOGETHER // min(size, width)))
    shape, element = loaded.architecture, loaded.dtype.itemsize
    fixed = min(SCORED, most * width) * shape.vocab_size * 3 * 4  # scores in fp32, and what cross_entropy makes of them
    config = loaded.model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * shape.hidden_size
    per_row = cache_bytes(method, shape, span, loaded.storage.itemsize)
    per_row += pass_bytes(shape, inner, width, 1 if stepped else size, element)
    room = SHARE * free_bytes(device, limit_gb) - fixed
    return max(1, min(most, int(room // per_row)))


def even(count: int, most: int) -> int:
    """Return a batch size of at most `most` with which `count` samples make as few batches, of nearly equal size."""
    batches = -(-count // most)
    return -(-count // batches) if batches else most


def goes_by_steps(method: Method, loaded: LoadedModel, size: int) -> bool:
    """Return True if attention must go token by token, so that captured steps serve the method best.

    `size` is the number of tokens per row and forward pass.
    """
    if size == 1:
        return True
    return exact_chunk(method, size) == 1 and not foreseen(method.new_cache(loaded.model))


def cache_bytes(method: Method, shape: Shape, span: ScoreText, element: int) -> int:
    """Return the predicted bytes of one span's cache; those of full precision if the method has no formula.

    Sliding windows, with which it would be smaller, are left out. `element` is bytes per element in full precision.
    """
    width = len(span.ids)
    if span.mode == "fp16":
        return 0
    try:
        predicted = kv_bytes(
            method,
            width,
            prompt=width if span.mode == "simulated" else max(1, span.prefill),
            layers=shape.layers,
            query_heads=shape.heads,
            heads=shape.kv_heads,
            channels=shape.head_dim,
            width=element,
        )
    except ConfigError:
        return 2 * shape.layers * width * shape.kv_heads * shape.head_dim * element
    return predicted.total


def pass_bytes(shape: Shape, intermediate: int, width: int, size: int, element: int) -> int:
    """Return the predicted bytes that one row of a pass takes besides its cache, in the layer that takes most.

    They are: all keys and values of a layer in full precision (two copies, as some are chosen from them), the codes and
    fp32 values from which half of them are dequantized, activations, and the logits.

    Args:
        intermediate: channels inside a feed-forward layer.
        width: tokens of the span.
        size: tokens of the pass.
        element: bytes per element in full precision.
    """
    stored = shape.kv_heads * shape.head_dim
    # a token that is packed during the pass takes part in up to three forms
    forms = 0 if size == 1 else 2 * 2 * (width + 3 * size) * stored * element + width * stored * (2 + 2 * 4)
    mask = 0 if size == 1 else size * (width + 3 * size) * (element + 1)
    activations = size * (3 * intermediate + 8 * shape.hidden_size) * element
    return forms + mask + activations + size * shape.vocab_size * element


def free_bytes(device: torch.device, limit_gb: float | None) -> float:
    """Return the bytes that this process can still allocate on a GPU.

    `limit_gb` is the memory in GiB that it may use there; None for no limit.
    """
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    return free if limit_gb is None else min(free, limit_gb * 2**30 - allocated)
