"""A check that kvbench supports a model, based on the model's transformers configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.models.layer_types import ATTENDING, FEED_FORWARD, RECURRENT

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

    `config` is a transformers config, or the content of a ``config.json``. The message names the model's class: that in
    the configuration, if `architecture` is empty.
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
