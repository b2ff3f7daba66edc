"""Checks that kvbench supports a model's attention, based on the loaded model itself: its configuration and modules."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from kvbench.attention.logits import SINKS, SOFTCAP, hands_over
from kvbench.errors import CacheError, ModelError
from kvbench.models.layer_types import INSTEAD, unserved
from kvbench.models.layers import LayerKind, layer_kinds

#: arguments that some models pass to attention and that kvbench's stores cannot serve
UNSERVED = ("position_bias",)


def check_served(model: PreTrainedModel) -> None:
    """Raise ModelError if kvbench does not support a model's attention; the message gives the reason."""
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if "num_attention_heads" not in config.to_dict() and not hasattr(config, "num_attention_heads"):
        raise ModelError(f"{name} has no attention heads, so it has no keys and values to cache; {INSTEAD}")
    reason = unserved(config, name)
    if not reason and getattr(model.config, "is_encoder_decoder", False):
        reason = f"{name} is an encoder-decoder model, whose cross-attention kvbench does not support; {INSTEAD}"
    if not reason and not uses_interface(model):
        reason = f"{name} does not use transformers' attention interface; {INSTEAD}"
    if not reason and not any(kind.attends for kind in layer_kinds(model.config)):
        reason = f"{name} has no layers with softmax attention, so no keys and values to cache; {INSTEAD}"
    if not reason and any(sees_later_tokens(module) for module in model.modules()):
        reason = f"{name} also attends to later tokens, so a cache of earlier tokens is not enough; {INSTEAD}"
    if not reason and not one_size(config):
        reason = f"{name} has layers with different head sizes or numbers of heads; {INSTEAD}"
    classes = {type(module) for module in model.modules()} if not reason else ()
    asked = {argument for kind in classes for argument in UNSERVED if hands_over(kind, argument)}
    if asked:
        reason = f"{name} hands '{min(asked)}' to its attention, which kvbench does not support; {INSTEAD}"
    if reason:
        raise ModelError(reason)


def check_speculation(speculation: Any, kinds: Sequence[LayerKind], name: str) -> None:
    """Raise ModelError if a method speculates on a hybrid model, whose layers cannot remove rejected tokens."""
    if speculation is not None and any(kind.states for kind in kinds):
        raise ModelError(
            f"{name} has layers with a state of fixed size (linear attention, Mamba or convolution), which cannot go "
            "back over rejected drafts, so it cannot decode speculatively.\n"
            "  hint: choose a method without speculation, such as method=kivi"
        )


def changes_logits(model: PreTrainedModel) -> bool:
    """Return True if a model has a softcap or sinks, in which case exact tokens need a kernel too."""
    classes = {type(module) for module in model.modules()}
    return any(hands_over(kind, name) for kind in classes for name in (SOFTCAP, SINKS))


def uses_interface(model: PreTrainedModel) -> bool:
    """Return True if a model computes attention through transformers' attention interface.

    Many hybrid models use it but do not set ``_supports_attention_backend``, so the byte code of their attention
    modules is searched for the interface's name.
    """
    if getattr(model, "_supports_attention_backend", False):
        return True
    classes = {type(module) for module in model.modules() if getattr(module, "is_causal", None) is not None}
    codes = [getattr(inspect.unwrap(kind.forward), "__code__", None) for kind in classes]
    return bool(codes) and all(code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


def sees_later_tokens(module: torch.nn.Module) -> bool:
    """Return True if a module is an attention module in which tokens also attend to later tokens.

    This is so in BERT-like models, unless they are configured as decoders.
    """
    return getattr(module, "is_causal", None) is False and getattr(module, "layer_idx", None) is not None


def one_size(config: Any) -> bool:
    """Return True if all layers of a model have the same number of heads and the same head size.

    Args:
        config: the text model's configuration. Transformers raises an error on reading an attribute that differs
            between layers; this function then returns False.
    """
    try:
        return isinstance(getattr(config, "head_dim", None) or 1, int) and isinstance(config.num_attention_heads, int)
    except Exception:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return False


_CHECK = "_validate_generation_mode"


def attach_refusal(model: PreTrainedModel) -> None:
    """Let ``model.generate`` explain why it refuses assisted generation, if transformers marks the model as stateful.

    Transformers refuses it before it reads the cache, without naming a reason. :func:`detach_refusal` undoes this.
    """
    if getattr(model, "_is_stateful", False) and hasattr(model, _CHECK):
        setattr(model, _CHECK, partial(_checked, model))


def detach_refusal(model: PreTrainedModel) -> None:
    """Undo :func:`attach_refusal`; does nothing to other models."""
    vars(model).pop(_CHECK, None)


def _checked(model: Any, mode: Any, *args: Any, **kwargs: Any) -> None:
    if mode == GenerationMode.ASSISTED_GENERATION:
        raise CacheError(
            f"{type(model).__name__} cannot generate with assistant_model or prompt_lookup_num_tokens: rejected drafts "
            "would have to be removed from the cache, but its layers with a state of fixed size (linear attention, "
            "Mamba or convolution) cannot go back to an earlier token.\n"
            "  hint: call model.generate without these two arguments"
        )
    getattr(type(model), _CHECK)(model, mode, *args, **kwargs)
