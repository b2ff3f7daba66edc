"""The command line of the benches of whole models: ``tpot``, ``prefill`` and ``memory``. Imports no torch.

All three measure the same points with the same options; they differ in their defaults (the presets
``conf/dataset/efficiency/NAME.yaml``) and in the columns of their tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from kvbench.bench.choices import count, device, positive, rows, several
from kvbench.config.setting import SYNTAX
from kvbench.parallel import launch
from kvbench.tasks.efficiency import STOCK
from kvbench.util.confdir import options

#: command -> description
COMMANDS = {
    "tpot": "seconds a token of a whole model, captured and eager",
    "prefill": "time and peak of the prompt, compared with stock transformers'",
    "memory": "peaks, bytes and throughput against the batch until memory ends",
}


def preset(command: str) -> dict[str, Any]:
    """Return the settings in ``conf/dataset/efficiency/COMMAND.yaml``, without its class and name."""
    data = yaml.safe_load(options("dataset")[f"efficiency/{command}"].read_text(encoding="utf-8"))
    return {key: value for key, value in data.items() if key not in ("_target_", "name")}


def add(commands: Any, tokens: Callable[[str], int], number: Callable[[str], int]) -> None:
    """Add a parser for each of :data:`COMMANDS`.

    Args:
        commands: the bench's subparsers, as ``add_subparsers`` returns them.
        tokens: argparse type for numbers of tokens, such as ``32k``.
        number: argparse type for other counts.
    """
    for name, description in COMMANDS.items():
        parser = commands.add_parser(name, help=description)
        _add_points(parser, preset(name), tokens, number)
        _add_steps(parser, name)
        _add_model(parser, number)


def _add_points(
    parser: argparse.ArgumentParser, default: dict[str, Any], tokens: Callable[[str], int], number: Callable[[str], int]
) -> None:
    """Add the options that are fields of ``dataset=efficiency``."""
    batches = None if default["batches"] == "grow" else default["batches"]
    add = parser.add_argument
    add("--contexts", nargs="+", type=tokens, default=default["prompts"], metavar="N", help="tokens of a prompt")
    add("--batches", nargs="+", type=number, default=batches, metavar="B", help=f"default: {default['batches']}")
    add("--grow", action="store_true", help="batches 1, 2, 4, ... until memory ends")
    add("--max-batch", type=number, default=default["max_batch"], help="the largest batch of those that grow")
    add(
        "--bisect",
        type=count,
        default=default["bisect"],
        help="batches tried between the last that fitted and the first that did not",
    )
    new = parser.add_mutually_exclusive_group()
    new.add_argument(
        "--new-tokens",
        type=several,
        default=default["new_tokens"],
        help=f"for each sequence (default: {default['new_tokens']})",
    )
    new.add_argument("--steps", type=number, help="decode steps: new tokens but the first")
    add("--repeats", type=number, default=default["repeats"], help=f"prefills timed (default: {default['repeats']})")
    add("--untimed", type=count, default=default["untimed"], help="prefills of each point before those")
    add(
        "--fill",
        choices=["prefill", "random"],
        default=default["fill"],
        help="random: no prefill, random keys and values",
    )
    add(
        "--check",
        type=count,
        default=default["compare"],
        dest="compare",
        help="tokens compared, captured and eager; 0: none",
    )
    add("--baselines", nargs="*", choices=STOCK, default=default["stock"], help="caches of stock transformers")
    add("--no-stock", action="store_const", const=[], dest="baselines", help="leave stock transformers out")


def _add_steps(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options that concern decode steps."""
    add = parser.add_argument
    graphs = "never" if command == "prefill" else "always"
    add("--graphs", choices=["always", "never"], default=graphs, help=f"captured steps (default: {graphs})")
    add("--eager", action="store_true", help="eager steps too, in addition to captured ones")
    add("--eager-only", action="store_const", const="never", dest="graphs", help="eager steps only")
    add("--compile", action="store_true", help="torch.compile of the layers around attention")
    add("--profile", action="store_true", help="the time of a captured step by kind of kernel")
    if command == "tpot":
        add("--no-ceiling", action="store_false", dest="ceiling", help="do not measure how fast the GPU reads")
    else:
        add("--ceiling", action="store_true", help="measure how fast the GPU reads")


def _add_model(parser: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """Add the options that concern settings, model and output."""
    add = parser.add_argument
    add("--settings", nargs="+", default=["fp16"], metavar="SETTING", help=SYNTAX)
    add("--model", default="llama2-7b", help="a preset, OWNER/NAME of the hub, or a folder (default: llama2-7b)")
    add("--weights", choices=["random", "pretrained"], default="random")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--device", type=device, default="cuda", help="cuda, cuda:N; cpu: to try a command, its figures say little")
    add("--seed", type=count, default=0)
    add("--prefill-chunk", type=number, metavar="N", help="prompt tokens a forward pass")
    add(
        "--prefill-rows",
        type=rows,
        default="auto",
        metavar="N",
        help="prompts a forward pass: auto (as many as make 16k tokens), all or a number",
    )
    add("--memory-limit-gb", type=positive, metavar="GiB", help="most memory that the process may take")
    add("--kernels", choices=["auto", "cuda", "triton", "reference"], default="auto")
    add("--out", type=Path, help="folder of the JSON file (default: results/<device>)")
    add("--name", help="name of the JSON file (default: the command and the model)")


def run(args: argparse.Namespace) -> int:
    """Run one of :data:`COMMANDS` and return the exit status.

    2 under torchrun with several processes, and without a GPU unless ``--device cpu``.
    """
    import torch

    if launch.size() > 1:
        problem = f"torchrun started {launch.size()} processes, and kvbench.bench measures one"
        print(f"{problem}; several: python -m experiments.multigpu", file=sys.stderr)
        return 2
    if args.device != "cpu" and not torch.cuda.is_available():
        print("kvbench.bench needs a CUDA device; torch sees none (--device cpu tries a command)", file=sys.stderr)
        return 2
    args.new_tokens = args.new_tokens if args.steps is None else args.steps + 1
    from kvbench.bench import points

    return points.run(args)
