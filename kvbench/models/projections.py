"""The submodules of attention layers that compute keys (before RoPE) and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.errors import ModelError
from kvbench.models.layers import attending

#: submodules that output keys before RoPE, in order of precedence: Qwen3 applies k_norm after k_proj
KEYS = ("k_norm", "k_proj")
#: a single projection for queries, keys and values (Phi-3)
FUSED = "qkv_proj"


@dataclass(frozen=True)
class ProjectionSource:
    """The submodule of an attention layer that computes keys or values, and the part of its output that holds them.

    The part is the whole output, except for fused projections, which output queries, keys and values at once.

    Args:
        name: name of the submodule in the attention module, for example ``k_proj``.
        start: index of the first output channel that belongs to the keys or values.
        stop: index after the last of these channels; None for the end of the output.
    """

    module: nn.Module
    name: str
    start: int = 0
    stop: int | None = None

    def cut(self, out: Tensor, channels: int) -> Tensor:
        """Extract the keys or values ``[B, H, q, D]`` from an output of the submodule.

        The output is ``[B, q, C]`` or ``[B, q, H, D]`` (B rows, q tokens, C output channels, H KV heads, D channels per
        head).
        """
        if out.ndim == 4:
            return out.transpose(1, 2)
        return out[..., self.start : self.stop].unflatten(-1, (-1, channels)).transpose(1, 2)


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention modules of a model, one per layer with keys and values, in order.

    Raises:
        ModelError: a layer has no attention module with a submodule that computes keys (``k_proj`` or ``qkv_proj``).
    """
    places = attending(model.config)
    modules = {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if getattr(module, "layer_idx", None) in places and any(hasattr(module, name) for name in ("k_proj", FUSED))
    }
    if sorted(modules) != places:
        raise ModelError(
            f"{type(model).__name__} does not have k_proj or {FUSED} in each of its {len(places)} attention layers, "
            "so its keys before RoPE cannot be read.\n"
            "  hint: choose a model such as Llama, Mistral, Qwen2, Qwen3 or Phi-3, or a method that "
            "stores keys after RoPE "
            "(method=kivi, method=atom method.rope=post)"
        )
    return [modules[place] for place in places]


def key_source(model: PreTrainedModel, attention: nn.Module) -> ProjectionSource:
    """Return the submodule of an attention module whose output holds the pre-RoPE keys."""
    for name in KEYS:
        if hasattr(attention, name):
            return ProjectionSource(getattr(attention, name), name)
    start, stop, _ = _borders(model)
    return ProjectionSource(getattr(attention, FUSED), FUSED, start, stop)


def value_source(model: PreTrainedModel, attention: nn.Module) -> ProjectionSource:
    """Return the submodule of an attention module whose output holds the values."""
    if hasattr(attention, "v_proj"):
        return ProjectionSource(attention.v_proj, "v_proj")  # type: ignore[arg-type]
    _, start, stop = _borders(model)
    return ProjectionSource(getattr(attention, FUSED), FUSED, start, stop)


def head_dim(model: PreTrainedModel) -> int:
    """Return a model's number of channels per head."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(model: PreTrainedModel) -> int:
    """Return a model's number of KV heads per layer."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _borders(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return the channel indices in a fused projection's output where keys begin, values begin and values end."""
    size, heads = head_dim(model), model.config.get_text_config(decoder=True).num_attention_heads
    keys = heads * size
    return keys, keys + kv_heads(model) * size, keys + 2 * kv_heads(model) * size
