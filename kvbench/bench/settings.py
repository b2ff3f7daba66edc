"""A method on the command line of a bench, and the model that it is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from kvbench.config.run_config import RuntimeConfig
from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.methods.load import load_method, true_name
from kvbench.models import by_name
from kvbench.models.spec import ModelConfig
from kvbench.util.confdir import options
from kvbench.util.schema import build


@dataclass(frozen=True)
class Setting:
    """One method with its quantizer and hyper-parameters, and how it was typed."""

    text: str
    method: Method


def setting(text: str) -> Setting:
    """The method that `text` (:data:`kvbench.bench.command.SYNTAX`) names; values are YAML, ``10/30/60`` is a list.

    Raises:
        ConfigError: a name, key or value that is not there.
    """
    name, *parts = split(text, ":")
    quantizer: str | None = None
    fields: dict[str, Any] = {}
    formats: dict[str, Any] = {}
    for part in [piece for whole in parts for piece in split(whole, ",")]:
        key, given, value = part.partition("=")
        if not given and quantizer is not None:
            raise ConfigError("methods", text, f"has two quantizers, {quantizer} and {part}", hint=f"{name}:{part}")
        if not given:
            quantizer = part
        elif key in {**formats, **fields}:
            raise ConfigError("methods", text, f"says {key} twice", hint=f"once: {name}:{part}")
        elif key.startswith("quantizer."):
            formats[key] = listed(key, value)
        else:
            fields[key] = listed(f"method.{key}", value)
    chosen: dict[str, Any] | str | None = quantizer
    if formats:
        chosen = preset(quantizer or default_quantizer(name))
        for key, value in formats.items():
            change(chosen, key, value)
        chosen["name"] = true_name(chosen)
    return Setting(text, load_method(name, quantizer=chosen, **fields))


def listed(key: str, value: str) -> Any:
    """A value as YAML has it, or a list of numbers (``10/30/60``); other text with slashes is a path.

    Raises:
        ConfigError: it is no YAML.
    """
    try:
        whole = yaml.safe_load(value)
        if not isinstance(whole, str) or "/" not in whole:
            return whole
    except yaml.YAMLError:
        raise ConfigError(key, value, "is no value: a bracket or quote is open", hint="split=10/30/60") from None
    try:
        values = [yaml.safe_load(item) for item in value.split("/")]
    except yaml.YAMLError:  # a folder's name alone need not be YAML
        return whole
    return values if all(type(item) in (int, float) for item in values) else whole


def change(formats: dict[str, Any], key: str, value: Any) -> None:
    """Set ``quantizer.SIDE.FIELD`` in a quantizer's plain data.

    Raises:
        ConfigError: it has no such key.
    """
    *path, last = key.split(".")[1:]
    place: Any = formats
    for step in path:
        place = place.get(step) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        fields = [f"quantizer.{side}.{field}" for side in ("key", "value") for field in formats.get(side, ())]
        raise ConfigError(key, value, f"quantizer {formats.get('name')} has no such key", allowed=fields)
    place[last] = value


def split(text: str, mark: str) -> list[str]:
    """`text` cut at `mark`, but not inside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == mark and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def preset(name: str) -> dict[str, Any]:
    """A quantizer of ``conf/quantizer`` as plain data.

    Raises:
        ConfigError: there is none of that name.
    """
    known = options("quantizer")
    if name not in known:
        raise ConfigError("quantizer", name, "no such quantizer", allowed=known)
    return dict(yaml.safe_load(known[name].read_text(encoding="utf-8")))


def default_quantizer(method: str) -> str:
    """The preset that a method has where none is named."""
    made = load_method(method)
    return made.quantizer.name if made.quantizer else "none"


def model_config(name: str, *, weights: str = "random", dtype: str = "bfloat16") -> ModelConfig:
    """Return a preset, a repository of the hub or a folder, with random weights (or its own).

    Raises:
        ConfigError: there is no such model.
    """
    group = by_name.group(name, {"weights": weights, "dtype": dtype}, "--model")
    model: ModelConfig = build(ModelConfig, group, "model")
    model.check()
    return model


def load(model: ModelConfig, device: str, seed: int = 0) -> Any:
    """The model on `device` (:func:`kvbench.models.load.load`)."""
    from kvbench.models.load import load as load_model

    return load_model(model, RuntimeConfig(device=device, seed=seed))


def share(loaded: Any, method: Method) -> None:
    """Check `method` against the model's heads.

    Raises:
        ConfigError: its groups do not divide them.
    """
    method.check(head_dim=loaded.architecture.head_dim)
