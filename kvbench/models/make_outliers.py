"""Artificial outliers: scaling of weights that makes channels of keys or values larger, but keeps the outputs.

Large models have key channels far above the others, which decide what a format can store; small ones do not.
The two rows of W_K that compute a pair of RoPE channels are multiplied by a factor, and the same rows of W_Q, in each
query head of the group, are divided by it. No product of a query with a key changes. Both channels of a pair need the
same factor, because RoPE mixes them. Rows of W_V and columns of W_O are scaled in the same way. If the factor is a
power of two, the logits are the same to the bit. Biases of queries, keys and values are scaled with their rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.errors import ModelError
from kvbench.models.layers import attending
from kvbench.models.outliers import Outliers
from kvbench.models.projections import attentions, head_dim, kv_heads

#: architectures whose RoPE pairs channel i with channel i + D/2 and that use keys as they are projected
SERVED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "phi3",
    "gemma",
    "gemma2",
    "granite",
    "starcoder2",
    "smollm3",
)


def make_outliers(name: str, model: PreTrainedModel, chosen: Outliers) -> None:
    """Scale the weights of a model in place; `name` is the model's, for messages.

    Raises:
        ModelError: the model normalizes keys after their projection, is of an architecture not in :data:`SERVED`, or
            has quantized weights.
        ConfigError: the model has no layer of a given index, or fewer channels than are to be scaled.
    """
    text = model.config.get_text_config(decoder=True)
    kind = type(model).__name__
    normed = sorted({part for module in attentions(model) for part in ("k_norm", "q_norm") if hasattr(module, part)})
    if normed:
        raise _outlier_refusal(
            name, f"{kind} norms its keys after their projection ({', '.join(normed)}), which undoes them"
        )
    if text.model_type not in SERVED:
        raise _outlier_refusal(
            name, f"{kind} is none of the architectures whose channels are known: {', '.join(SERVED)}"
        )
    size, groups = head_dim(model), kv_heads(model)
    rope = getattr(text, "rope_parameters", None) or {}
    rotary = int(size * (rope.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1))
    channels = chosen.channels(rotary, size)
    places = set(chosen.chosen(len(attending(model.config))))
    with torch.no_grad():
        for place, module in enumerate(attentions(model)):
            if place not in places:
                continue
            parts = _parts(name, module, text.num_attention_heads * size, groups * size)
            larger, smaller = ("k", "q") if chosen.side == "keys" else ("v", "o")
            _scale(parts[larger], channels, size, chosen.factor)
            _scale(parts[smaller], channels, size, 1 / chosen.factor)


def _parts(name: str, module: nn.Module, queries: int, keys: int) -> dict[str, list[Tensor]]:
    """Return views of an attention layer's weights and biases, by ``q``, ``k``, ``v``, ``o``, with channels first.

    For ``o`` the channels are the weight's columns. Scaling a view scales the weights. `queries` and `keys` are the
    numbers of channels of all query heads and of all KV heads.
    """
    fused = getattr(module, "qkv_proj", None)
    linears = {letter: getattr(module, f"{letter}_proj", None) for letter in "qkvo"} if fused is None else {}
    every = [fused, module.o_proj] if fused is not None else [*linears.values()]
    for linear in every:
        if type(linear).__name__ != "Linear" or not linear.weight.is_floating_point():  # type: ignore[union-attr]
            raise _outlier_refusal(name, f"its weights are not plain ones ({type(linear).__name__})")
    if fused is None:
        parts = {letter: _rows(linears[letter]) for letter in "qkv"}
    else:
        borders = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, None)}
        parts = {letter: [rows[start:stop] for rows in _rows(fused)] for letter, (start, stop) in borders.items()}
    return {**parts, "o": [module.o_proj.weight.T]}  # type: ignore[union-attr, list-item]


def _rows(linear: Any) -> list[Tensor]:
    return [linear.weight, *([] if linear.bias is None else [linear.bias])]


def _scale(rows: list[Tensor], channels: list[int], size: int, factor: float) -> None:
    """Multiply channels of each head by a factor, in tensors whose first dimension is the channels of all heads."""
    for tensor in rows:
        tensor.unflatten(0, (-1, size))[:, channels] *= factor


def _outlier_refusal(name: str, reason: str) -> ModelError:
    return ModelError(
        f"model {name}: model.outliers cannot be made: {reason}.\n"
        "  hint: choose a model such as Llama, Mistral or Qwen2 with its own weights, or model.outliers=none"
    )
