"""The types of a model's layers as its ``config.json`` lists them, or implies them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: layer types with keys and values, by their names in old and new config.json files
ATTENDING = frozenset({"full_attention", "sliding_attention", "hybrid", "hybrid_sliding", "attention"})
#: layer types with a state and no keys and values
RECURRENT = frozenset({"linear_attention", "conv", "mamba"})
#: layer types that keep nothing
FEED_FORWARD = frozenset({"moe", "mlp"})


def layer_types(numbers: Mapping[str, Any]) -> list[str] | None:
    """Return the type of each layer from the content of a ``config.json``; None if all layers are of one type."""
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
    """Return how many layers keep keys and values, from the content of a ``config.json``; None if it does not say."""
    kinds = layer_types(numbers)
    if kinds is not None:
        return sum(kind in ATTENDING for kind in kinds)
    count = numbers.get("num_hidden_layers")
    return None if count is None else int(count)
