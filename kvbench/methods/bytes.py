"""Bytes of a method's cache from its hyper-parameters and token counts alone: no model, no torch.

Each method that has a formula states it as :meth:`~kvbench.methods.base.Method.layer_bytes`, beside its rule. A cache
really holds what its bill says (:meth:`kvbench.cache.KVCache.bill`), and tests hold both equal to the byte. Three
things depend on the text: how many elements of a key pass KVQuant's calibrated thresholds (the calibrated share is
assumed), and on layers with a sliding window which of Cocktail's chunks are seen (the window is assumed to have the
prompt's mix of widths) and in how many heads a token that was kept by its score is hidden (all kept tokens are assumed
to be seen, up to as many as the window shows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvbench.methods.base import Method
from kvbench.methods.byte_parts import KVBytes, Setting, View


def kv_bytes(
    method: Method,
    tokens: int,
    *,
    layers: int,
    query_heads: int,
    heads: int,
    channels: int,
    prompt: int | None = None,
    width: int = 2,
    view: View = "all",
    chunks: tuple[int, int] | None = None,
    windows: Sequence[int | None] | None = None,
) -> KVBytes:
    """Return the bytes of one sequence's keys and values, all layers, after `tokens` tokens.

    Args:
        method: :func:`kvbench.load_method`.
        tokens: seen so far, the prompt included.
        layers, query_heads, heads, channels: of the model.
        prompt: tokens of the prompt; None: all of `tokens`. Some methods act on the prompt alone.
        width: bytes of an element in full precision.
        view: ``all`` is the bill; ``draft`` what QuantSpec's draft reads (the upper nibbles, or its own cache);
            ``target`` what its verification reads.
        chunks: Cocktail's INT2 and INT4 chunks; None: by its `split`, over the whole prompt.
        windows: for each layer its sliding window, or None; None: no layer has one.

    Raises:
        ConfigError: the method has no formula, or a Cocktail is given neither chunks nor shares.
    """
    at = Setting(tokens, tokens if prompt is None else prompt, query_heads, heads, channels, width, 0, view, chunks)
    # layers are alike but for their windows, and for the first few where a method keeps them exact
    first = min(method.exact_layers, layers - 1)
    kinds = Counter((min(layer, first), windows[layer] if windows else None) for layer in range(layers))
    total = KVBytes()
    for (layer, window), count in kinds.items():
        total += method.layer_bytes(replace(at, layer=layer, window=window)) * count
    return total
