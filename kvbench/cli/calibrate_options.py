"""Options of ``python -m kvbench.calibrate``, and their checks before any text is read."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.util.requirements import check_writable, exists, has_gpu
from kvbench.util.schema import MOST_ROWS, MOST_TOKENS


def calibrate_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command line, whose ``--help`` begins with the description."""
    options = argparse.ArgumentParser(prog="python -m kvbench.calibrate", description=description)
    options.add_argument(
        "method",
        nargs="?",
        default="method=kvquant",
        choices=("method=kvquant", "method=oscar"),
        help="the method that is calibrated (default: %(default)s)",
    )
    options.add_argument("--model", required=True, help="a preset (llama2-7b), a repository of the hub, or a folder")
    options.add_argument("--path", help="folder with the weights (default: those that --model names)")
    options.add_argument("--random", action="store_true", help="use the architecture of --model with random weights")
    options.add_argument(
        "--text",
        required=True,
        nargs="+",
        help=(
            "files or folders with text, mini (generated text), or python (Python's standard "
            "modules); each of them provides the same number of sequences"
        ),
    )
    options.add_argument("--bits", help="kvquant: bits of the codebooks, separated by commas (default: 2,3,4)")
    options.add_argument(
        "--outliers",
        type=float,
        help="kvquant: share of outliers that stay in full precision (default: 0.01)",
    )
    options.add_argument("--sequences", type=int, default=16, help="number of sequences to read (default: %(default)s)")
    options.add_argument("--length", type=int, default=2048, help="tokens per sequence (default: %(default)s)")
    fisher = options.add_mutually_exclusive_group()
    fisher.add_argument(
        "--fisher",
        action="store_true",
        default=None,
        help="kvquant: weight quantization errors by squared gradients (the default)",
    )
    fisher.add_argument(
        "--no-fisher", action="store_false", dest="fisher", default=None, help="kvquant: weight all errors the same"
    )
    options.add_argument(
        "--per-head",
        action="store_true",
        default=None,
        help="oscar: a rotation of its own for each KV head (default: the heads of a layer share one)",
    )
    options.add_argument(
        "--first-tokens",
        type=int,
        default=0,
        help="number of first tokens of each sequence to leave out (default: %(default)s)",
    )
    options.add_argument(
        "--device", default="auto", help="device: auto, cpu, mps, cuda or cuda:N (default: %(default)s)"
    )
    options.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="data type that caches store (default: the model's own)",
    )
    options.add_argument(
        "--out",
        help="file to write (default: results/calibration/MODEL-1pct.safetensors, or MODEL-oscar.safetensors)",
    )
    return options


#: fewest tokens of a sequence from which anything is fitted
SHORTEST = 16


def code_sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of bits that ``--bits`` lists, in ascending order, or raise ConfigError."""
    try:
        widths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError("--bits", text, "is not a list of whole numbers", allowed="2,3,4") from error
    if not set(widths) <= {2, 3, 4}:
        raise ConfigError("--bits", text, "a codebook must have 2, 3 or 4 bits", allowed="2,3,4")
    return widths


def check_options(method: str, arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an option was given that the method's calibration does not have."""
    for other, names in (("oscar", ("per_head",)), ("kvquant", ("bits", "outliers", "fisher"))):
        for name in names:
            value = getattr(arguments, name)
            if value is not None and method != other:
                flag = isinstance(value, bool)
                raise ConfigError(
                    f"--{'no-' if value is False else ''}{name.replace('_', '-')}",
                    None if flag else value,
                    f"has no effect on a calibration for method={method}",
                    hint=f"leave it out, or calibrate for method={other}",
                )


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check numbers, device and paths before any text is read; raise ConfigError if one is invalid."""
    for name, least, most in (
        ("sequences", len(arguments.text), MOST_ROWS),
        ("length", SHORTEST, MOST_TOKENS),
        ("first_tokens", 0, arguments.length - 1),
    ):
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "is out of range", allowed=f"{least} to {most}")
    if arguments.outliers is not None and not 0 <= arguments.outliers <= 0.5:
        raise ConfigError(
            "--outliers", arguments.outliers, "is not a valid share of outliers", allowed="0 to 0.5, such as 0.01"
        )
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", arguments.device):
        raise ConfigError("--device", arguments.device, "is not a device", allowed="auto, cpu, cuda, cuda:N or mps")
    if arguments.device.startswith("cuda") and not has_gpu():
        raise ConfigError("--device", arguments.device, "no GPU is visible on this machine", hint="--device cpu")
    if arguments.out is not None:
        if not arguments.out or Path(arguments.out).name in ("", ".."):
            raise ConfigError("--out", arguments.out, "must name a file", hint="--out mine.safetensors")
        check_writable(arguments.out, "--out", file=True)
    for name in arguments.text:
        if not name:
            raise ConfigError(
                "--text",
                "''",
                "must name a file or folder with text",
                hint="--text mini python to calibrate without your own text",
            )
    for name in (*arguments.text, arguments.model, arguments.path or "."):
        exists(name, "--text, --model or --path")
