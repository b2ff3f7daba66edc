"""A check whether kvbench supports a model, from its transformers configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: supported layer types
KINDS = frozenset({"full_attention", "sliding_attention"})
#: the hint in messages
INSTEAD = "choose a model such as Llama, Mistral, Qwen2, Qwen3, Phi-3 or GPT-NeoX"
_RECURRENT = "has no softmax attention in some of its layers, so no keys and values to hold"
#: unsupported architectures that are recognised by their model_type, with the reason
ODD = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "xlstm"), _RECURRENT),
    "diffllama": "splits the cached values itself (differential attention), which packed stores do not allow",
    "doge": "makes its mask of the cached values, which packed stores do not allow",
    "jetmoe": "repeats the cached keys for its experts itself, which packed stores do not allow",
    "hrm_text": "runs its layers several times over one text, each time with keys and values of its own",
}
#: keys of a configuration that only unsupported models have, with the reason
OTHER = {
    "kv_lora_rank": "has latent attention (MLA), whose keys and values kvbench's stores do not hold",
    "num_kv_shared_layers": "has layers that read another layer's keys and values, which kvbench's stores do not share",
}


def unserved(config: Any, architecture: str = "") -> str:
    """Return the reason why kvbench does not support a model; empty if the configuration shows none.

    Args:
        config: a transformers config, or the content of a ``config.json``.
        architecture: name of the model's class for the message; if empty, the name in the configuration.
    """
    if not isinstance(config, Mapping) and hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    elif isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
        config = {**config, **config["text_config"]}

    def get(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    name = architecture or next(iter(get("architectures") or ()), None) or str(get("model_type") or "the model")
    if str(get("model_type")) in ODD:
        return f"{name} {ODD[str(get('model_type'))]}: {INSTEAD}"
    for key, reason in OTHER.items():
        if get(key):
            return f"{name} {reason}: {INSTEAD}"
    kinds = {str(kind) for kind in get("layer_types") or ()} - KINDS
    if kinds:
        return (
            f"{name} has layers of type {', '.join(sorted(kinds))}: kvbench serves models whose layers are all full or "
            f"sliding-window attention; {INSTEAD}"
        )
    return ""
