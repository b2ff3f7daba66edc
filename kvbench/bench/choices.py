"""Arguments of the bench's command lines: their types, options that commands share, and models by name.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml

from kvbench.config.setting import SYNTAX, parse_setting
from kvbench.errors import ConfigError, cut_text
from kvbench.methods.base import Method
from kvbench.models import by_name
from kvbench.models.spec import ModelConfig, Weights, local_folder
from kvbench.profiling.roofline import Shape
from kvbench.tasks.efficiency import STOCK, Efficiency
from kvbench.util.confdir import field_descriptions, group_options, read_choice
from kvbench.util.requirements import exists
from kvbench.util.schema import MOST, MOST_TOKENS, build

T = TypeVar("T")


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
    """Return a number of tokens as text: 32768 as ``"32k"``, but 1000, no multiple of 1024, as ``"1000"``."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return an argparse ``type`` that calls `parse`, and turns its ValueError into an ArgumentTypeError.

    argparse shows the message of an ArgumentTypeError to the user, but would replace that of a ValueError.
    """

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


#: argparse type of a number of tokens such as ``32k``
tokens = argument(token_count)


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
    return _real(text, "a number, 0 or greater", lambda value: 0 <= value < float("inf"))


def positive(text: str) -> float:
    """Parse a finite number above 0 (an argparse ``type``)."""
    return _real(text, "a number above 0", lambda value: 0 < value < float("inf"))


def share(text: str) -> float:
    """Parse a fraction or probability, a number from 0 to 1 (an argparse ``type``)."""
    return _real(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _real(text: str, kind: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value


def add_output_options(parser: argparse.ArgumentParser, name: str = "the command") -> None:
    """Add ``--out`` and ``--name``, the path of the JSON file; the help text gives `name` as the default name."""
    parser.add_argument("--out", type=Path, help="folder for the JSON file (default: results/<device>), or the file")
    parser.add_argument("--name", help=f"name of the JSON file (default: {name})")


def add_timing_options(parser: argparse.ArgumentParser, dtype: str, about: str) -> None:
    """Add the options of commands that time an operation of a layer.

    `dtype` is the default of ``--dtype``, and `about` is the help text of that option.
    """
    add = parser.add_argument
    add("--dtype", choices=["float16", "bfloat16"], default=dtype, help=about)
    add("--quick", action="store_true", help="measure only a few points, in at most three minutes")
    add("--skip", type=int, default=0, help=argparse.SUPPRESS)
    add("--seconds", type=float, default=0.25, help="seconds of measuring per figure (default: %(default)s)")
    add_output_options(parser)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``, ``--device`` and ``--seed``, with which a whole model is run."""
    add = parser.add_argument
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    about = "cuda, cuda:N, or cpu to try out a command (its times mean little)"
    add("--device", type=valid_device, default="cuda", help=about)
    add("--seed", type=nonnegative_number, default=0)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the model, the settings to measure with it, and how it runs."""
    add = parser.add_argument
    add("--settings", nargs="+", default=["fp16"], metavar="SETTING", help=SYNTAX)
    add("--model", default="llama2-7b", help="a preset, OWNER/NAME of the hub, or a folder (default: llama2-7b)")
    about = "random weights, or those of the checkpoint (pretrained); int4: rounded to 4 bits, without the output head;"
    add("--weights", choices=get_args(Weights), default="random", help=f"{about} int4_all: with it")
    add_device_options(parser)
    add("--prefill-chunk", type=positive_number, metavar="N", help="prompt tokens per forward pass")
    add("--prefill-rows", type=prefill_rows, default="auto", metavar="N", help=PREFILL_ROWS)
    add("--memory-limit-gb", type=positive, metavar="GiB", help="limit of the memory that the process may use")
    add("--kernels", choices=["auto", "cuda", "triton", "cpu", "reference"], default="auto")
    add_output_options(parser, "the command and the model")


def point_preset(command: str) -> dict[str, Any]:
    """Return the default options of ``tpot``, ``prefill`` or ``memory``: ``conf/dataset/efficiency/COMMAND.yaml``."""
    data = read_choice(group_options("dataset")[f"efficiency/{command}"])
    return {key: value for key, value in data.items() if key not in ("_target_", "name")}


def add_point_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``tpot``, ``prefill`` and ``memory``: the fields of ``dataset=efficiency``, and more.

    The three commands measure the same points; they differ in their defaults and in the columns of their tables.
    """
    command, meanings = parser.prog.rpartition(" ")[2], field_descriptions(Efficiency)
    default = point_preset(command)

    def add_field(field: str, option: str, group: Any = parser, **more: Any) -> None:
        about = re.sub(r"(:\w+:)?`+", "", f"{meanings[field].rstrip('.')} (default: {default[field]})")
        group.add_argument(option, **{"default": default[field], "help": about, **more})

    add, batches = parser.add_argument, None if default["batches"] == "grow" else default["batches"]
    add_field("prompts", "--contexts", nargs="+", type=tokens, metavar="N")
    add_field("batches", "--batches", nargs="+", type=positive_number, metavar="B", default=batches)
    add("--grow", action="store_true", help="measure batches of 1, 2, 4, ... until memory runs out")
    add_field("max_batch", "--max-batch", type=positive_number)
    add_field("bisect", "--bisect", type=nonnegative_number)
    new = parser.add_mutually_exclusive_group()
    add_field("new_tokens", "--new-tokens", new, type=several)
    new.add_argument(
        "--steps", type=positive_number, help="number of decode steps, which is one less than --new-tokens"
    )
    add_field("repeats", "--repeats", type=positive_number)
    add_field("untimed", "--untimed", type=nonnegative_number)
    add_field("fill", "--fill", choices=["prefill", "random"])
    add_field("compare", "--check", dest="compare", type=nonnegative_number)
    add_field("stock", "--baselines", dest="baselines", nargs="*", choices=STOCK)
    add("--no-stock", action="store_const", const=[], dest="baselines", help="do not measure stock transformers")
    graphs = "never" if command == "prefill" else "always"
    add("--graphs", choices=["always", "never"], default=graphs, help=f"use captured steps (default: {graphs})")
    add("--eager", action="store_true", help="also measure eager steps")
    add("--eager-only", action="store_const", const="never", dest="graphs", help="measure only eager steps")
    add("--compile", action="store_true", help="apply torch.compile to everything around attention")
    add("--profile", action="store_true", help="report the time of a captured step by kind of kernel")
    about = "measure the points of all settings in a random order, instead of setting by setting"
    add("--shuffle", type=nonnegative_number, metavar="SEED", help=about)
    about = "wait before the model is loaded, and record the power that the GPU draws meanwhile"
    add("--idle", type=positive, metavar="SECONDS", help=about)
    about = (
        "measure all points in K new processes, one after the other, each in a random order of its own; then write the"
        " median of the processes' medians, their spread, and the time per token as a function of length"
    )
    add("--processes", type=positive_number, default=1, metavar="K", help=about)
    about = "measure the GPU's read bandwidth"
    add("--ceiling", action=argparse.BooleanOptionalAction, default=command == "tpot", help=about)
    add_model_options(parser)


def point_file(args: argparse.Namespace) -> str:
    """Return the default name (``--name``) of the JSON file of a command that measures a whole model."""
    return f"{args.command}_{Path(args.model).name}"


def fixed_batches(args: argparse.Namespace, option: str, why: str = "") -> None:
    """Raise ConfigError, naming `option`, unless the command line fixes the batch sizes; `why` ends the message."""
    if args.grow or not args.batches:
        value = getattr(args, option.strip("-"))
        raise ConfigError(option, value, f"needs fixed batch sizes{why}", hint="give them with --batches 1 8")


#: meaning of the option --prefill-rows
PREFILL_ROWS = "prompts per forward pass: auto (up to 16k tokens in total), all, or a number"


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


def shape_of(name: str) -> Shape:
    """Return the dimensions of a model for the roofline; the name is as for :func:`numbers_of`.

    Raises:
        ConfigError: there is no such model, its configuration lacks the dimensions, or the roofline's formulas do not
            hold for it.
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
        group = read_model_file(path)
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
    return read_model_file(folder / "config.json")


def read_model_file(path: Path) -> dict[str, Any]:
    """Load a model's configuration from a YAML or JSON file and return it as a dictionary.

    Raises:
        ConfigError: the file cannot be read or parsed, or does not contain a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)  # YAML has no tabs
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
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
