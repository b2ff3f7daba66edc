"""The types of a model's layers as its ``config.json`` lists or implies them, and the bytes of their states. No torch.

:func:`unserved` decides from the same file or from transformers' config whether kvbench supports the model.

The shapes of states are those of transformers' own layers: the last inputs of a convolution in the model's dtype, and a
recurrent state in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.errors import ConfigError

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


#: bytes per element of a recurrent state
FP32 = 4
#: layer types with attention and a state in one layer (Zamba2); Falcon-H1 has both in each layer and lists no types
BOTH = frozenset({"hybrid"})
#: names of the key with the length of the convolution; a configuration with none of them has no states
CONVOLUTIONS = ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_L_cache")


def state_bytes(numbers: Mapping[str, Any], width: int) -> int:
    """Return the bytes of all states of one sequence; 0 for a model whose layers all keep keys and values.

    `numbers` are those of a ``config.json``, or others under transformers' names; `width` is the bytes per element of
    the model's dtype.

    Raises:
        ConfigError: the model has layers with a state, but its configuration lacks their sizes.
    """
    kinds = layer_types(numbers)
    both = str(numbers.get("model_type")) == "falcon_h1"
    layers = int(numbers.get("num_hidden_layers") or 0) if both else sum(k in RECURRENT | BOTH for k in kinds or ())
    if not layers or (not both and not set(kinds or ()) & RECURRENT):
        return 0
    channels, recurrent = _sizes(numbers)
    return layers * (channels * _first(numbers, *CONVOLUTIONS) * width + recurrent * FP32)


def _sizes(numbers: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of channels of a layer's convolution, and of elements of its recurrent state."""
    hidden = _first(numbers, "hidden_size")
    if "conv_L_cache" in numbers:  # LFM2
        return hidden, 0
    if "linear_conv_kernel_dim" in numbers:  # Qwen3-Next, Qwen3.5, OLMo hybrid: gated delta rule
        heads, width = _first(numbers, "linear_num_value_heads"), _first(numbers, "linear_value_head_dim")
        keys = _first(numbers, "linear_key_head_dim")
        return 2 * _first(numbers, "linear_num_key_heads") * keys + heads * width, heads * keys * width
    state = _first(numbers, "ssm_state_size", "mamba_d_state")
    if str(numbers.get("model_type")) == "jamba":  # Mamba 1
        inner = _first(numbers, "mamba_expand") * hidden
        return inner, inner * state
    if isinstance(numbers.get("mamba_d_head"), str):  # "auto"
        inner = _first(numbers, "mamba_expand") * hidden
    else:
        heads = _first(numbers, "mamba_num_heads", "n_mamba_heads", "mamba_n_heads")
        inner = heads * _first(numbers, "mamba_head_dim", "mamba_headdim", "mamba_d_head")
    groups = _first(numbers, "n_groups", "mamba_ngroups", "mamba_n_groups")
    return inner + 2 * groups * state, inner * state


def _first(numbers: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(numbers.get(name), int):
            return int(numbers[name])
    raise ConfigError(
        f"model.{names[0]}", None, f"is missing in the configuration of this {numbers.get('model_type')} model"
    )


#: supported layer types
KINDS = ATTENDING | RECURRENT | FEED_FORWARD
#: the hint in messages
INSTEAD = "choose a model such as Llama, Mistral, Qwen2, Qwen3, Phi-3 or GPT-NeoX"
_RECURRENT = "has no softmax attention, so no keys and values to cache"
#: unsupported architectures that are recognised by their model_type, with the reason
ODD = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT),
    "recurrent_gemma": "keeps keys, values and states in its own modules, not in a cache that is passed to it",
    "minimax": "accepts only a cache class of its own (MiniMaxCache)",
    "diffllama": "splits the cached values itself (differential attention), which does not work with packed values",
    "doge": "computes its mask from the cached values, which does not work with packed values",
    "jetmoe": "repeats the cached keys for its experts itself, which does not work with packed keys",
    "hrm_text": "runs its layers several times per token, each time with different keys and values",
}
#: keys of a configuration that only unsupported models have, with the reason
OTHER = {
    "kv_lora_rank": "has multi-head latent attention (MLA), whose compressed keys and values kvbench cannot cache",
    "num_kv_shared_layers": (
        "has layers that share the keys and values of another layer, which kvbench does not support"
    ),
}


def unserved(config: Any, architecture: str = "") -> str:
    """Return why kvbench does not support a model, or an empty string if its configuration shows no reason.

    `config` is a transformers config, or the content of a ``config.json``. The message names the model's class,
    `architecture`; if that is empty, the class in the configuration.
    """
    if not isinstance(config, Mapping) and hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    elif isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
        config = {**config, **config["text_config"]}

    def get(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    name = architecture or next(iter(get("architectures") or ()), None) or str(get("model_type") or "the model")
    if str(get("model_type")) in ODD:
        return f"{name} {ODD[str(get('model_type'))]}; {INSTEAD}"
    for key, reason in OTHER.items():
        if get(key):
            return f"{name} {reason}; {INSTEAD}"
    kinds = {str(kind) for kind in get("layer_types") or ()} - KINDS
    if kinds:
        return (
            f"{name} has layers of type {', '.join(sorted(kinds))}, but kvbench supports only layers with full or "
            "sliding-window attention, and layers with linear attention, Mamba or convolutions, which keep "
            f"transformers' own state; {INSTEAD}"
        )
    return ""
