"""Models of the bench, and the lengths that they allow."""

from __future__ import annotations

import argparse

from kvbench.errors import ConfigError
from kvbench.models import by_name
from kvbench.models.load import LoadedModel
from kvbench.models.spec import ModelConfig
from kvbench.util.schema import build


def model_config(name: str, *, weights: str = "random", dtype: str = "bfloat16") -> ModelConfig:
    """Return the configuration with which a model is loaded, given its name on the command line.

    The name is a preset, a repository of the hub (``OWNER/NAME``) or a folder; `weights` a value of ``model.weights``.

    Raises:
        ConfigError: the model does not exist, or its configuration is wrong.
    """
    group = by_name.group(name, {"weights": weights, "dtype": dtype}, "--model")
    model: ModelConfig = build(ModelConfig, group, "model")
    model.check()
    return model


def check_lengths(loaded: LoadedModel, longest: int, args: argparse.Namespace) -> None:
    """Raise ConfigError if a requested sequence exceeds the pretrained model's maximum sequence length."""
    if not loaded.random_weights and longest + args.new_tokens > loaded.max_length:
        raise ConfigError(
            "--contexts",
            longest,
            f"and {args.new_tokens} new tokens together exceed the limit of {args.model} ({loaded.max_length})",
            hint="use shorter --contexts, or --weights random, which has no limit on positions",
        )
