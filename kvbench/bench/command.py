"""The command line of the benches of whole models; imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.bench.choices import count, device, positive, rows, several
from kvbench.parallel import launch

#: how a setting is written
SYNTAX = (
    "METHOD[:QUANTIZER][:KEY=VALUE,...]: fp16, kivi:int4_g128, kivi:int2:residual=64,quantizer.value.group_size=64, "
    "logquant:int2_g128:window=64,reserved=192, cocktail:split=[10,30,60],encoder=bm25"
)
#: what stands beside in tpot (kvbench.bench.stock)
BASELINES = ("dynamic", "static", "static-compiled", "quanto4", "quanto2", "hqq4")
COMMANDS = ("tpot", "prefill", "memory")


def add(commands: Any, tokens: Callable[[str], int], number: Callable[[str], int]) -> None:
    """The parsers of :data:`COMMANDS`.

    Args:
        commands: of the bench's parser.
        tokens, number: types of its arguments.
    """
    tpot = commands.add_parser("tpot", help="seconds a token of a whole model, captured and eager")
    tpot.add_argument("--contexts", nargs="+", type=tokens, default=["4k", "32k"], metavar="N")
    tpot.add_argument("--batches", nargs="+", type=number, default=[1], metavar="B")
    tpot.add_argument("--steps", type=number, default=128, help="decode steps (default: 128)")
    tpot.add_argument(
        "--fill", choices=["prefill", "random"], default="prefill", help="random: no prefill, random keys and values"
    )
    tpot.add_argument("--eager", action="store_true", help="eager steps too, beside captured ones")
    tpot.add_argument("--eager-only", action="store_true", help="eager steps alone")
    tpot.add_argument("--compile", action="store_true", help="torch.compile of what lies around attention")
    tpot.add_argument(
        "--check", type=count, default=16, help="tokens compared, captured and eager; 0: none (default: 16)"
    )
    tpot.add_argument("--baselines", nargs="*", choices=BASELINES, default=[], help="stock transformers beside")
    tpot.add_argument("--profile", action="store_true", help="where a captured step's time goes, by kind of kernel")
    tpot.add_argument("--no-ceiling", action="store_true", help="do not measure how fast the GPU reads")

    prefill = commands.add_parser("prefill", help="time and peak of the prompt beside stock transformers'")
    prefill.add_argument("--contexts", nargs="+", type=tokens, default=["4k", "32k"], metavar="N")
    prefill.add_argument("--batches", nargs="+", type=number, default=[1], metavar="B")
    prefill.add_argument("--repeats", type=number, default=3, help="timed, after one that is not (default: 3)")
    prefill.add_argument("--new-tokens", type=number, default=128, help="that the cache has room for (default: 128)")
    prefill.add_argument("--no-stock", action="store_true", help="leave stock transformers out")

    memory = commands.add_parser("memory", help="peaks, bytes and throughput against the batch until memory ends")
    memory.add_argument("--contexts", nargs="+", type=tokens, default=["4k"], metavar="N")
    memory.add_argument(
        "--batches", nargs="+", type=number, metavar="B", help="default: 1, 2, 4, ... until memory ends"
    )
    memory.add_argument("--max-batch", type=number, default=4096, help="where that ends all the same")
    memory.add_argument(
        "--bisect", type=count, default=0, help="batches tried between the last that fitted and the first"
    )
    memory.add_argument("--new-tokens", type=several, default=128, help="for each sequence (default: 128)")
    memory.add_argument("--repeats", type=number, default=1, help="prefills timed (default: 1)")
    memory.add_argument(
        "--graphs", choices=["always", "never"], default="always", help="captured steps, where they serve"
    )
    memory.add_argument("--compile", action="store_true", help="torch.compile of what lies around attention")

    for command in (tpot, prefill, memory):
        command.add_argument("--settings", nargs="+", default=["fp16"], metavar="SETTING", help=SYNTAX)
        command.add_argument(
            "--model", default="llama2-7b", help="a preset, OWNER/NAME of the hub, or a folder (default: llama2-7b)"
        )
        command.add_argument("--weights", choices=["random", "pretrained"], default="random")
        command.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
        command.add_argument(
            "--device", type=device, default="cuda", help="cuda, cuda:N; cpu: to try a command, its figures say little"
        )
        command.add_argument("--seed", type=count, default=0)
        command.add_argument("--prefill-chunk", type=number, metavar="N", help="prompt tokens a forward pass")
        command.add_argument(
            "--prefill-rows",
            type=rows,
            default="auto",
            metavar="N",
            help="prompts a forward pass: auto (as many as make 16k tokens), all or a number",
        )
        command.add_argument(
            "--memory-limit-gb", type=positive, metavar="GiB", help="most memory that the process may take"
        )
        command.add_argument("--kernels", choices=["auto", "cuda", "triton", "reference"], default="auto")
        command.add_argument("--out", type=Path, help="folder of the JSON file (default: results/<device>)")
        command.add_argument("--name", help="name of the JSON file (default: the command and the model)")


def run(args: argparse.Namespace) -> int:
    """One of :data:`COMMANDS`; 2 where there is no GPU and the CPU was not asked for, or several processes."""
    import torch

    if launch.size() > 1:
        said = f"torchrun started {launch.size()} processes, and kvbench.bench measures one"
        print(f"{said}; several: python -m experiments.multigpu", file=sys.stderr)
        return 2
    if args.device != "cpu" and not torch.cuda.is_available():
        print("kvbench.bench needs a CUDA device; torch sees none (--device cpu tries a command)", file=sys.stderr)
        return 2
    from kvbench.bench import whole

    return whole.run(args)
