"""A clear error for transformers' assisted generation with models whose states of fixed size cannot go back."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from kvbench.errors import CacheError

_CHECK = "_validate_generation_mode"


def attach(model: PreTrainedModel) -> None:
    """Let ``model.generate`` explain why it refuses assisted generation, if transformers marks the model as stateful.

    Transformers refuses it before it reads the cache, without naming a reason. :func:`detach` undoes this.
    """
    if getattr(model, "_is_stateful", False) and hasattr(model, _CHECK):
        setattr(model, _CHECK, partial(_checked, model))


def detach(model: PreTrainedModel) -> None:
    """Undo :func:`attach`; does nothing to other models."""
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
