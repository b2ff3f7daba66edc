"""Collection of what a model's attention reads on a text: queries and keys after RoPE, and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvbench.attention import prefill
from kvbench.attention.served import check_served
from kvbench.errors import ModelError
from kvbench.models.layers import attending
from kvbench.util.attachment import storage_of

NAME = "kvbench-calibration"

#: what is called for each layer and sequence: the layer, and queries, keys and values ``[n, heads, D]``
Visit = Callable[[int, Tensor, Tensor, Tensor], None]


def attended(model: PreTrainedModel, sequences: Tensor, visit: Visit, tell: Callable[[], None] = lambda: None) -> None:
    """Run a model that uses transformers' attention interface on sequences; pass on what each layer's attention reads.

    Args:
        sequences: token ids ``[S, L]``.
        visit: function called for each sequence and attention layer. Its arguments are the layer's number among these,
            and queries and keys after RoPE and values, ``[L, heads, D]`` each.

    Raises:
        ModelError: kvbench does not support the model's attention, or a query, key or value is NaN or Inf.
    """
    check_served(model)
    places, storage = attending(model.config), storage_of(model)

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer = places.index(module.layer_idx)  # type: ignore[arg-type]
        key, value = (x.to(storage).to(query.dtype) for x in (key, value))  # as a cache would get them
        for name, x in (("queries", query), ("keys", key), ("values", value)):
            if not bool(torch.isfinite(x).all()):
                raise ModelError(
                    f"{type(model).__name__}: NaN or Inf in the {name} of layer {layer} while calibrating.\n"
                    "  hint: use --dtype float32 or --dtype bfloat16"
                )
        visit(layer, *(x[0].transpose(0, 1) for x in (query, key, value)))
        return prefill.attend_prompt(module, query, key, value, attention_mask, scaling, kwargs)[0], None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            for ids in sequences.to(model.device):
                model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
                tell()
    finally:
        model.set_attn_implementation(before)
