"""The layers of a model by what they keep of earlier tokens: keys and values, a state of fixed size, both or nothing.

Hybrid models have layers without softmax attention (linear attention, Mamba, convolutions). Such a layer keeps a state
whose size does not depend on the number of tokens. Others hold only a feed-forward network and keep nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: layer types with keys and values, by their names in old and new config.json files
ATTENDING = frozenset({"full_attention", "sliding_attention", "hybrid", "hybrid_sliding", "attention"})
#: layer types with a state and no keys and values
RECURRENT = frozenset({"linear_attention", "conv", "mamba"})
#: layer types that keep nothing
FEED_FORWARD = frozenset({"moe", "mlp"})
#: model types whose state starts anew in each pass over several tokens, in transformers' own code
RESTARTING = frozenset({"jamba"})


@dataclass(frozen=True)
class LayerKind:
    """What one layer keeps of earlier tokens.

    Args:
        attends: True if it keeps keys and values.
        window: its sliding window in tokens; None if it has none.
        states: number of states of fixed size that it keeps, 0 for plain attention.
        one_by_one: True if the state is wrong after a pass over several tokens, unless that pass was the first.
    """

    attends: bool = True
    window: int | None = None
    states: int = 0
    one_by_one: bool = False


def layer_kinds(config: Any) -> list[LayerKind]:
    """Return the kind of each layer, by the rules of transformers' own cache.

    Args:
        config: the model's configuration.
    """
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
    """Return the indices of the layers that keep keys and values.

    Args:
        config: the model's configuration.
    """
    return [place for place, kind in enumerate(layer_kinds(config)) if kind.attends]


def layer_types(numbers: Mapping[str, Any]) -> list[str] | None:
    """Return the type of each layer from the content of a ``config.json``; None if all layers are of one type.

    Args:
        numbers: the file's content, or other numbers under transformers' names.
    """
    listed = numbers.get("layer_types") or numbers.get("layers_block_type")
    if listed:
        return [str(kind) for kind in listed]
    pattern = numbers.get("hybrid_override_pattern")
    if pattern:  # Nemotron-H
        names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        return [names.get(letter, letter) for letter in str(pattern)]
    count, indices = (
        numbers.get("num_hidden_layers"),
        numbers.get("attn_layer_indices") or numbers.get("full_attn_idxs"),
    )
    if not isinstance(count, int):
        return None
    period, interval = numbers.get("attn_layer_period"), numbers.get("full_attention_interval")
    if numbers.get("model_type") == "bamba" or indices:
        return ["attention" if layer in (indices or ()) else "mamba" for layer in range(count)]
    if period:  # Jamba
        offset = numbers.get("attn_layer_offset") or 0
        return ["attention" if layer % period == offset else "mamba" for layer in range(count)]
    if interval:  # Qwen3-Next, Qwen3.5
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    return None


def attention_layers(numbers: Mapping[str, Any]) -> int | None:
    """Return how many layers keep keys and values, from the content of a ``config.json``; None if it does not say.

    Args:
        numbers: the file's content, or other numbers under transformers' names.
    """
    kinds = layer_types(numbers)
    if kinds is not None:
        return sum(kind in ATTENDING for kind in kinds)
    count = numbers.get("num_hidden_layers")
    return None if count is None else int(count)
