"""Layers with a sliding window, which drop the tokens that no later token can see.

A query of such a layer sees its own token and the ``window - 1`` before it. So after n tokens the oldest ``n - (window
- 1)`` are hidden from all later ones, and stock transformers drops them at once (``DynamicSlidingWindowLayer``). A
kvbench layer drops them only at the start of the next step. Until then the newest tokens may be taken back, which moves
the window back too. The method decides how many of the hidden tokens are dropped
(:meth:`kvbench.methods.base.Method.forget`), since packed tokens can only leave in whole groups.
"""

from __future__ import annotations

#: minimum spare room, in tokens, of a sliding layer's buffers: live tokens are moved to the front of a buffer only when
#: its end is reached, and some hidden tokens are dropped late
SLACK = 96


def room(window: int) -> int:
    """Return how many tokens per row to allocate for in a layer with a sliding window of `window` tokens.

    That is ``window - 1``, the tokens that a new one sees besides itself, and spare room.
    """
    return window - 1 + max(SLACK, window // 8)
