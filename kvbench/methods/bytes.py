"""Bytes of a method's cache, predicted from its hyper-parameters and token counts: no model, no torch.

Each method defines its formula as :meth:`~kvbench.methods.base.Method.layer_bytes`. The bytes that a cache really holds
are counted by :meth:`kvbench.cache.KVCache.bill`; tests check that both agree to the byte. Four numbers depend on the
text, which the formulas do not see. They assume:

- KVQuant: as many elements of the keys exceed the thresholds as during calibration.
- Cocktail on layers with a sliding window: the chunks in the window have the same mix of bit widths as the prompt.
- Cocktail with ``reorder=False``: the chunks of each width are at random places, unless the width of each is given.
- Methods that keep tokens by score, on layers with a sliding window: the window hides none of the kept tokens, unless
  more are kept than it can show.
"""

from __future__ import annotations

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
    widths: Sequence[int] | None = None,
) -> KVBytes:
    """Return the predicted bytes of the keys and values of one sequence, over all layers.

    Args:
        tokens: number of tokens so far, the prompt included.
        channels: channels per head.
        prompt: number of prompt tokens, which some methods treat differently from generated tokens; None: all.
        width: bytes per element in full precision.
        view: what to count, see :data:`~kvbench.methods.byte_parts.View`.
        chunks: for Cocktail, see :class:`~kvbench.methods.byte_parts.Setting`; so is `widths`.
        windows: for each layer, its sliding window in tokens, or None if it has none. None in place of the list: no
            layer has one.

    Raises:
        ConfigError: the method has no formula, or it is Cocktail and the bit widths follow from neither `widths`,
            `chunks` nor its `split`.
    """
    at = Setting(tokens, tokens if prompt is None else prompt, query_heads, heads, channels, width, 0, view, chunks)
    at = replace(at, widths=None if widths is None else tuple(widths), layers=layers)
    # layers differ only in their formats and windows, and in whether the method keeps them exact
    named: dict[int, Method] = {}
    kinds: dict[tuple[int, int, int | None], int] = {}
    for layer, own in enumerate(method.by_layer(layers)):
        kind = id(own), own.stored_as(layer, layers), windows[layer] if windows else None
        named[id(own)], kinds[kind] = own, kinds.get(kind, 0) + 1
    total = KVBytes()
    for (own_id, layer, window), count in kinds.items():
        total += named[own_id].layer_bytes(replace(at, layer=layer, window=window)) * count
    return total
