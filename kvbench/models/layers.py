"""The layers of a model by what they keep of earlier tokens: keys and values, a state of fixed size, both or nothing.

Hybrid models have layers without softmax attention (linear attention, Mamba, convolutions). Such a layer keeps a state
whose size does not depend on the number of tokens. Others hold only a feed-forward network and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: model types whose state starts anew in each pass over several tokens, in transformers' own code
RESTARTING = frozenset({"jamba"})


@dataclass(frozen=True)
class LayerKind:
    """Kind of memory of one layer for earlier tokens: keys and values, states of fixed size, both, or none.

    Args:
        attends: True if it keeps keys and values.
        window: its sliding window in tokens; None if it has none.
        states: number of states of fixed size that it keeps, 0 for plain attention.
        one_by_one: True if tokens after the first pass must come one at a time, because the layer's state would be
            wrong after a pass over several.
    """

    attends: bool = True
    window: int | None = None
    states: int = 0
    one_by_one: bool = False


def layer_kinds(config: Any) -> list[LayerKind]:
    """Return the kind of each layer, by the rules of transformers' own cache."""
    from transformers.cache_utils import (
        CacheLayerMixin,
        DynamicCache,
        DynamicSlidingWindowLayer,
        LinearAttentionCacheLayerMixin,
    )

    text = config.get_text_config(decoder=True)
    one_by_one = text.model_type in RESTARTING
    return [
        LayerKind(
            attends=isinstance(layer, CacheLayerMixin),
            window=layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None,
            states=layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0,
            one_by_one=one_by_one,
        )
        for layer in DynamicCache(config=config).layers
    ]


def attending(config: Any) -> list[int]:
    """Return the indices of the layers that keep keys and values."""
    return [place for place, kind in enumerate(layer_kinds(config)) if kind.attends]
