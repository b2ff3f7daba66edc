"""The command line of the benches of whole models: ``tpot``, ``prefill`` and ``memory``. Imports no torch.

All three measure the same points with the same options; they differ in their defaults (the presets
``conf/dataset/efficiency/NAME.yaml``) and in the columns of their tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from kvbench.bench.choices import method_of, nonnegative_number, positive, prefill_rows, several, valid_device
from kvbench.config.setting import SYNTAX
from kvbench.errors import KvbenchError
from kvbench.models.spec import Weights
from kvbench.parallel import launch
from kvbench.tasks.efficiency import STOCK
from kvbench.util.confdir import group_options, read_choice

#: command -> description
COMMANDS = {
    "tpot": "measure the time per token of a whole model, captured and eager",
    "prefill": "measure time and peak memory of the prefill, compared with stock transformers",
    "memory": "measure peak memory, bytes and throughput for growing batches until memory runs out",
}


def command_preset(command: str) -> dict[str, Any]:
    """Return the default options of ``tpot``, ``prefill`` or ``memory``: ``conf/dataset/efficiency/COMMAND.yaml``."""
    data = read_choice(group_options("dataset")[f"efficiency/{command}"])
    return {key: value for key, value in data.items() if key not in ("_target_", "name")}


def add_whole_models(commands: Any, tokens: Callable[[str], int], number: Callable[[str], int]) -> None:
    """Add the subcommands ``tpot``, ``prefill`` and ``memory`` with their options to the bench's command line.

    `tokens` and `number` are argparse types for numbers of tokens, such as ``32k``, and for other counts.
    """
    for name, description in COMMANDS.items():
        parser = commands.add_parser(name, help=description)
        _add_points(parser, command_preset(name), tokens, number)
        _add_steps(parser, name, number)
        _add_model(parser, number)


def add_capacity(commands: Any, tokens: Callable[[str], int], number: Callable[[str], int]) -> None:
    """Add the subcommand ``capacity`` to the bench's command line; arguments as for :func:`add_whole_models`."""
    parser = commands.add_parser(
        "capacity", help="count the sequences that fit into a memory, by formula and by allocating their caches"
    )
    parser.add_argument(
        "--contexts", nargs="+", type=tokens, default=[4096], metavar="N", help="prompt lengths in tokens"
    )
    parser.add_argument(
        "--new-tokens", type=several, default=128, help="tokens for which each cache has room after the prompt"
    )
    parser.add_argument(
        "--max-sequences", type=number, default=1024, metavar="N", help="largest number to allocate (default: 1024)"
    )
    _add_model(parser, number)


def _add_points(
    parser: argparse.ArgumentParser, default: dict[str, Any], tokens: Callable[[str], int], number: Callable[[str], int]
) -> None:
    """Add the options that are fields of ``dataset=efficiency``."""
    batches = None if default["batches"] == "grow" else default["batches"]
    add = parser.add_argument
    add("--contexts", nargs="+", type=tokens, default=default["prompts"], metavar="N", help="prompt lengths in tokens")
    add(
        "--batches",
        nargs="+",
        type=number,
        default=batches,
        metavar="B",
        help=f"batch sizes (default: {default['batches']})",
    )
    add("--grow", action="store_true", help="measure batches of 1, 2, 4, ... until memory runs out")
    add("--max-batch", type=number, default=default["max_batch"], help="largest batch that --grow tries")
    add(
        "--bisect",
        type=nonnegative_number,
        default=default["bisect"],
        help="number of batches to try between the largest that fits and the smallest that does not",
    )
    new = parser.add_mutually_exclusive_group()
    new.add_argument(
        "--new-tokens",
        type=several,
        default=default["new_tokens"],
        help=f"tokens to generate per sequence (default: {default['new_tokens']})",
    )
    new.add_argument("--steps", type=number, help="number of decode steps, which is one less than --new-tokens")
    add(
        "--repeats",
        type=number,
        default=default["repeats"],
        help=f"number of timed prefills (default: {default['repeats']})",
    )
    add(
        "--untimed",
        type=nonnegative_number,
        default=default["untimed"],
        help="number of untimed prefills before the timed ones",
    )
    add(
        "--fill",
        choices=["prefill", "random"],
        default=default["fill"],
        help="how to fill the cache; random: without a prefill, with random keys and values",
    )
    add(
        "--check",
        type=nonnegative_number,
        default=default["compare"],
        dest="compare",
        help="number of tokens to compare between captured and eager steps (0: none)",
    )
    add(
        "--baselines",
        nargs="*",
        choices=STOCK,
        default=default["stock"],
        help="caches of stock transformers to measure for comparison",
    )
    add("--no-stock", action="store_const", const=[], dest="baselines", help="do not measure stock transformers")


def _add_steps(parser: argparse.ArgumentParser, command: str, number: Callable[[str], int]) -> None:
    """Add the options that concern decode steps."""
    add = parser.add_argument
    graphs = "never" if command == "prefill" else "always"
    add("--graphs", choices=["always", "never"], default=graphs, help=f"use captured steps (default: {graphs})")
    add("--eager", action="store_true", help="also measure eager steps")
    add("--eager-only", action="store_const", const="never", dest="graphs", help="measure only eager steps")
    add("--compile", action="store_true", help="apply torch.compile to everything around attention")
    add("--profile", action="store_true", help="report the time of a captured step by kind of kernel")
    add(
        "--shuffle",
        type=nonnegative_number,
        metavar="SEED",
        help="measure the points of all settings in a random order, instead of setting by setting",
    )
    add(
        "--idle",
        type=positive,
        metavar="SECONDS",
        help="wait before the model is loaded, and record the power that the GPU draws meanwhile",
    )
    add(
        "--processes",
        type=number,
        default=1,
        metavar="K",
        help="measure all points in K new processes, one after the other, each in a random order of its own; then write"
        " the median of the processes' medians, their spread, and the time per token as a function of length",
    )
    if command == "tpot":
        add("--no-ceiling", action="store_false", dest="ceiling", help="do not measure the GPU's read bandwidth")
    else:
        add("--ceiling", action="store_true", help="measure the GPU's read bandwidth")


def _add_model(parser: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """Add the options that concern settings, model and output."""
    add = parser.add_argument
    add("--settings", nargs="+", default=["fp16"], metavar="SETTING", help=SYNTAX)
    add("--model", default="llama2-7b", help="a preset, OWNER/NAME of the hub, or a folder (default: llama2-7b)")
    add(
        "--weights",
        choices=get_args(Weights),
        default="random",
        help="random weights, or those of the checkpoint (pretrained); int4: rounded to 4 bits, without the output "
        "head; int4_all: with it",
    )
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add(
        "--device",
        type=valid_device,
        default="cuda",
        help="cuda, cuda:N, or cpu to try out a command (its times mean little)",
    )
    add("--seed", type=nonnegative_number, default=0)
    add("--prefill-chunk", type=number, metavar="N", help="prompt tokens per forward pass")
    add(
        "--prefill-rows",
        type=prefill_rows,
        default="auto",
        metavar="N",
        help="prompts per forward pass: auto (up to 16k tokens in total), all, or a number",
    )
    add("--memory-limit-gb", type=positive, metavar="GiB", help="limit of the memory that the process may use")
    add("--kernels", choices=["auto", "cuda", "triton", "reference"], default="auto")
    add("--out", type=Path, help="folder for the JSON file (default: results/<device>)")
    add("--name", help="name of the JSON file (default: the command and the model)")


def run_whole_models(args: argparse.Namespace) -> int:
    """Run ``tpot``, ``prefill`` or ``memory`` and return the process's exit status.

    The status is 2 if torchrun started several processes, or if there is no GPU and ``--device`` is not ``cpu``.
    Otherwise it is that of :func:`kvbench.bench.points.measure_points`.
    """
    try:
        for setting in args.settings:  # a slip is told at once, and on a machine without a GPU
            method_of(setting)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    import torch

    if launch.size() > 1:
        problem = f"torchrun started {launch.size()} processes, but kvbench.bench measures a single one"
        print(f"{problem}. For several, use python -m experiments.multigpu", file=sys.stderr)
        return 2
    if args.device != "cpu" and not torch.cuda.is_available():
        print(
            "kvbench.bench needs a CUDA device, but torch does not see one; to try out a command, use --device cpu",
            file=sys.stderr,
        )
        return 2
    if getattr(args, "processes", 1) > 1:
        from kvbench.bench import replicates

        try:
            return replicates.run_replicates(args)
        except KvbenchError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    if args.command == "capacity":
        from kvbench.bench import capacity

        return capacity.run_capacity(args)
    args.new_tokens = args.new_tokens if args.steps is None else args.steps + 1
    from kvbench.bench import points

    return points.measure_points(args)
