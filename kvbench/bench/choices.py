"""Parsing and validation of the bench's command-line arguments. Imports no torch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError, cut_text
from kvbench.methods.base import Method
from kvbench.models import by_name
from kvbench.models.spec import local_folder
from kvbench.profiling.roofline import Shape
from kvbench.util.confdir import group_options
from kvbench.util.requirements import exists
from kvbench.util.schema import MOST, MOST_TOKENS


def token_count(text: str) -> int:
    """Parse a number of tokens: ``"32k"`` is 32768, ``"4096"`` is 4096.

    Raises:
        ValueError: `text` is not a positive number of tokens, or exceeds
            :data:`~kvbench.util.schema.MOST_TOKENS`.
    """
    match = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if not match or len(match[1]) > 12 or not int(match[1]):
        raise ValueError(f"{cut_text(text)!r} is not a number of tokens such as 4k, 32k or 131072")
    count = int(match[1]) * (1024 if match[2] else 1)
    if count > MOST_TOKENS:
        raise ValueError(f"{text!r} exceeds the limit of {MOST_TOKENS} tokens")
    return count


def short_count(count: int) -> str:
    """Return a number of tokens as text: 32768 as ``"32k"``, numbers that are not multiples of 1024 in full."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def tokens(text: str) -> int:
    """Parse a number of tokens such as ``32k`` (an argparse ``type``).

    Raises:
        argparse.ArgumentTypeError: :func:`token_count` cannot parse it. argparse shows this error's message to the
            user, but would replace that of a ValueError.
    """
    try:
        return token_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_number(text: str) -> int:
    """Parse an integer of at least 1 (an argparse ``type``)."""
    return _parse_whole_number(text, 1)


def several(text: str) -> int:
    """Parse the number of tokens to generate, an integer of at least 2 (an argparse ``type``).

    The prefill yields the first token, so at least one more is needed to have a decode step to measure.
    """
    return _parse_whole_number(text, 2)


def nonnegative_number(text: str) -> int:
    """Parse an integer of at least 0 (an argparse ``type``)."""
    return _parse_whole_number(text, 0)


def _parse_whole_number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or (len(text) <= 12 and int(text) < least):
        raise argparse.ArgumentTypeError(f"{cut_text(text)!r} is not a whole number, {least} or greater")
    if len(text) > 12 or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{cut_text(text)} is too large (at most {MOST})")
    return int(text)


def valid_device(text: str) -> str:
    """Check that `text` names a device (``cpu``, ``cuda`` or ``cuda:N``) and return it (an argparse ``type``)."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: cuda, cuda:N or cpu")
    return text


def prefill_rows(text: str) -> int | Literal["auto"] | None:
    """Parse how many prompts one forward pass of the prefill takes (an argparse ``type``).

    Returns:
        ``"auto"`` for ``auto``, None for ``all``, otherwise the number, which is at least 1.
    """
    if text in ("auto", "all"):
        return "auto" if text == "auto" else None
    return positive_number(text)


def duration(text: str) -> float:
    """Parse a duration, a finite number of at least 0 (an argparse ``type``)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or greater")
    return value


def positive(text: str) -> float:
    """Parse a finite number above 0 (an argparse ``type``)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """Parse a fraction or probability, a number from 0 to 1 (an argparse ``type``)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def shape_of(name: str) -> Shape:
    """Return the dimensions of a model for the roofline; the name is as for :func:`numbers_of`.

    Raises:
        ConfigError: there is no such model, or its configuration does not state the dimensions, or the roofline does
            not describe it.
    """
    return Shape.of(numbers_of(name))


def numbers_of(name: str) -> dict[str, Any]:
    """Return the dimensions of a model by transformers' names, read from its configuration.

    Args:
        name: a preset, a YAML file in the form of the presets, a repository of the hub (``OWNER/NAME``), a folder with
            a config.json, or a config.json itself.

    Raises:
        ConfigError: there is no such model, or its configuration does not state the dimensions.
    """
    exists(name, "model")
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if name not in group_options("model") and path.is_file():
        group = read_model_config(path)
        if path.name == "config.json":
            return group
    else:  # any max_length will do: a Shape does not use it, but a preset may require one
        group = by_name.group(name, {"weights": "random", "max_length": 16}, "--model")
    if group.get("architecture"):
        return dict(group["architecture"])
    folder = local_folder(group.get("path"))
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            "model.architecture", None, f"is missing in {path}", hint="use --model FOLDER with a complete config.json"
        )
    return read_model_config(folder / "config.json")


def read_model_config(path: Path) -> dict[str, Any]:
    """Load a model's configuration from a YAML or JSON file and return it as a dictionary.

    Raises:
        ConfigError: the file cannot be read or parsed, or does not contain a mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError("model", path, f"cannot be read ({reason})", hint="choose a preset of conf/model") from None
    if not isinstance(data, dict):
        raise ConfigError("model", path, "does not contain the keys of a model", hint="choose a preset of conf/model")
    return data


def method_of(text: str) -> Method:
    """Create the method of a setting such as ``kivi:int4:residual=64`` (:mod:`kvbench.config.setting`).

    Raises:
        ConfigError: the setting names an unknown method, quantizer or option, or a value that the method refuses.
    """
    return parse_setting(text).load()


class SpeculationPoint(NamedTuple):
    """The point at which speculation is measured; `context`: tokens in each sequence's cache at the beginning."""

    model: str
    batch: int
    context: int
