"""Layers with a sliding window: what their later tokens cannot see is dropped.

A query of such a layer sees itself and the ``window - 1`` tokens before it, so after n tokens the oldest
``n - (window - 1)`` are hidden from all that will come, and stock transformers drops them
(``DynamicSlidingWindowLayer`` of its caches). A kvbench layer drops them when it settles, not when new ones come in:
tokens of the step before may still be taken back then, and with them the window moves back. Which of the hidden tokens
really go is the method's to say (:meth:`kvbench.methods.base.Method.forget`): groups are packed, and leave, as a whole.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

#: least room of a sliding layer's buffers in addition to its window: live tokens are moved to the front of a buffer
#: only once in so many steps, and some are dropped late
SLACK = 96


def windows(config: Any) -> list[int | None]:
    """Return for each layer its sliding window, as transformers' own cache has it; None: it sees everything."""
    layers = DynamicCache(config=config).layers
    return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]


def room(window: int) -> int:
    """Return the tokens that the buffers of a sliding layer have room for: the window, and some slack."""
    return window - 1 + max(SLACK, window // 8)
