"""Command line of ``python -m kvbench.bench``. To add a command, add an entry to :data:`COMMANDS`.

``latency``, ``goodput``, ``cpu`` and ``predict`` need no GPU.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any, NamedTuple

from kvbench.bench.choices import method_of
from kvbench.parallel import launch
from kvbench.util.door import enter, reporting


class Command(NamedTuple):
    """A command: its line in ``--help``, and two functions of modules of this package, as ``module:function``.

    `options` adds the command's options to a parser; `run` takes the parsed arguments and returns the exit status.
    A command with `measures` needs torch, and a GPU unless the parsed arguments have ``device="cpu"`` (from an option
    or ``parser.set_defaults``). Other commands are run without any check.
    """

    about: str
    options: str
    run: str
    measures: bool = True


COMMANDS = {
    "predict": Command(
        "predict TTFT, TPOT, memory and the largest batch with a roofline; does not need a GPU",
        "predict:add_predict_options", "predict:print_predictions", measures=False,
    ),
    "kernel": Command(
        "time decode attention over packed keys and values", "kernel:add_kernel_options", "kernel:time_kernels"
    ),
    "quantize": Command(
        "time quantizing and packing of new keys and values, during prefill and decoding",
        "quantize:add_quantize_options", "quantize:time_packing",
    ),
    "products": Command(
        "time the linear layers of a decode step, and its output head",
        "products:add_products_options", "products:time_products",
    ),
    "tpot": Command(
        "measure the time per token of a whole model, captured and eager",
        "choices:add_point_options", "points:measure_points",
    ),
    "prefill": Command(
        "measure time and peak memory of the prefill, compared with stock transformers",
        "choices:add_point_options", "points:measure_points",
    ),
    "memory": Command(
        "measure peak memory, bytes and throughput for growing batches until memory runs out",
        "choices:add_point_options", "points:measure_points",
    ),
    "speculation": Command(
        "measure QuantSpec's speed-up at forced acceptance rates",
        "speculation_bench:add_speculation_options", "speculation_bench:measure_speculation",
    ),
    "capacity": Command(
        "count the sequences that fit into a memory, by formula and by allocating their caches",
        "capacity:add_capacity_options", "capacity:measure_capacity",
    ),
    "latency": Command(
        "fold points of several processes: medians, spread, time as a line over length; needs no GPU",
        "recorded_times:add_latency_options", "recorded_times:fold_latency", measures=False,
    ),
    "goodput": Command(
        "simulate requests over recorded step times: how many keep limits on TTFT and TPOT; needs no GPU",
        "recorded_times:add_goodput_options", "recorded_times:simulate_goodput", measures=False,
    ),
    "cpu": Command(
        "time packed caches against fp16's on this CPU; needs no GPU",
        "cpu:add_cpu_options", "cpu:measure_cpu", measures=False,
    ),
}  # fmt: skip


def bench_function(function: str) -> Any:
    """Import and return a function of this package, given as ``module:function``."""
    module, _, name = function.partition(":")
    return getattr(import_module(f"kvbench.bench.{module}"), name)


def bench_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Only `command` gets its options, because adding those of others may import torch; None: all commands get theirs.
    """
    top = argparse.ArgumentParser(
        prog="python -m kvbench.bench",
        description="Measure kernels of one layer or whole models on this GPU, or predict the times on any GPU.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, entry in COMMANDS.items():
        parser = commands.add_parser(name, help=entry.about)
        if command in (None, name):
            bench_function(entry.options)(parser)
    return top


def why_not(entry: Command, args: argparse.Namespace) -> str:
    """Return the reason why a command that measures cannot run in this process; empty if it can."""
    if launch.size() > 1:
        problem = f"torchrun started {launch.size()} processes, but kvbench.bench measures a single one"
        return f"{problem}. For several, use python -m experiments.multigpu"
    import torch

    if getattr(args, "device", None) == "cpu" or torch.cuda.is_available():
        return ""
    problem = "kvbench.bench needs a CUDA device, but torch does not see one"
    return problem + ("; to try out a command, use --device cpu" if "device" in args else "")


@reporting()
def main(argv: list[str] | None = None) -> int:
    """Run the subcommand named on the command line and return the process's exit status.

    The status is 0 on success, 1 if a measurement failed, 2 if an argument is wrong or the command needs a GPU and
    torch does not find one, or that of the :class:`KvbenchError` that ended the command.
    """
    given = sys.argv[1:] if argv is None else argv
    top = bench_parser(given[0] if given else "")
    args, unknown = top.parse_known_args(given)
    if unknown:
        top.error(
            f"unknown arguments of {args.command}: {' '.join(unknown)} "
            f"(python -m kvbench.bench {args.command} --help lists its options)"
        )
    if args.out is not None and args.out.suffix == ".json" and getattr(args, "name", None) is not None:
        top.error(f"--out {args.out} already names the file, so --name {args.name} cannot")
    args.argv, entry = given, COMMANDS[args.command]
    for setting in getattr(args, "settings", ()):  # a slip is told at once, and on a machine without a GPU
        method_of(setting)
    problem = why_not(entry, args) if entry.measures else ""
    if problem:
        print(problem, file=sys.stderr)
        return 2
    status: int = bench_function(entry.run)(args)
    return status


if __name__ == "__main__":
    sys.exit(enter(main))
