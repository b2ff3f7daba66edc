"""The command line of ``python -m kvbench.bench speculation``. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvbench.bench.choices import (
    SpeculationPoint,
    nonnegative_number,
    positive_number,
    share,
    token_count,
    valid_device,
)

#: cases that can be measured, in the order of their worth
CASES = ("plain", "quantspec", "kv", "weights", "streamingllm", "snapkv")


def parse_speculation_point(text: str) -> SpeculationPoint:
    """Parse a point such as ``llama2-7b:1:32k`` (an argparse ``type``)."""
    model, *rest = text.rsplit(":", 2)
    if len(rest) != 2 or not model or not rest[0].isdecimal() or not int(rest[0]):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:BATCH:TOKENS, such as llama2-7b:1:32k")
    try:
        return SpeculationPoint(model, int(rest[0]), token_count(rest[1]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def drafts(text: str) -> int:
    """Parse a number of drafts per round, 1 to 8 (an argparse ``type``)."""
    gamma = positive_number(text)
    if gamma > 8:
        raise argparse.ArgumentTypeError(f"{text!r}: at most 8 drafts per round can be measured")
    return gamma


def add_speculation(commands: Any) -> None:
    """Add the subcommand ``speculation`` to the bench's command line."""
    parser = commands.add_parser("speculation", help="measure QuantSpec's speed-up at forced acceptance rates")
    add = parser.add_argument
    default = [
        SpeculationPoint("llama2-7b", 1, 32768),
        SpeculationPoint("llama2-7b", 1, 131072),
        SpeculationPoint("llama3.1-8b", 1, 131072),
    ]
    add(
        "--points",
        nargs="+",
        type=parse_speculation_point,
        default=default,
        metavar="MODEL:B:N",
        help="model, batch, tokens in the cache",
    )
    about = "points at which the cases after quantspec are measured (default: all)"
    add("--side-points", nargs="*", type=parse_speculation_point, metavar="MODEL:B:N", help=about)
    add(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help="plain: 16-bit decoding; quantspec: drafts of 4-bit weights and upper nibbles; kv, weights: only one of "
        "them; streamingllm, snapkv: drafts of a quarter of the context (default: all)",
    )
    add("--gammas", nargs="+", type=drafts, default=list(range(1, 9)), metavar="G", help="drafts per round (1 to 8)")
    add("--side-gammas", nargs="+", type=drafts, default=[2, 4, 6], metavar="G", help="the same for all other cases")
    add("--acceptances", nargs="+", type=share, default=[0.8, 0.85, 0.9, 0.95], metavar="A")
    add("--at", type=share, default=0.9, help="acceptance at which rounds are measured (default: 0.9)")
    add("--measure-all", action="store_true", help="measure the best gamma of every acceptance too")
    add("--blocks", type=positive_number, default=5, help="blocks of tokens whose median counts (default: 5)")
    add("--tokens", type=positive_number, default=64, help="tokens of a block (default: 64)")
    add("--no-compile", action="store_false", dest="compile", help="do not compile what surrounds attention")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--device", type=valid_device, default="cuda", help="cuda, or cpu to try out a command (its times mean little)")
    add("--seed", type=nonnegative_number, default=0)
    add("--out", type=Path, help="folder for the JSON file (default: results/<device>)")
    add("--name", help="name of the JSON file (default: speculation)")
    parser.set_defaults(contexts=[])


def run_speculation(args: argparse.Namespace) -> int:
    """Run the command and return the process's exit status; 2 if there is no GPU and ``--device`` is not ``cpu``."""
    import torch

    if args.at not in args.acceptances:
        args.acceptances = sorted({*args.acceptances, args.at})
    if args.device != "cpu" and not torch.cuda.is_available():
        print(
            "kvbench.bench needs a CUDA device, but torch does not see one; to try out a command, use --device cpu",
            file=sys.stderr,
        )
        return 2
    from kvbench.bench import speculation

    return speculation.run_cases(args)
