"""Command line of ``python -m kvbench.bench``.

Its commands are ``kernel``, ``quantize``, ``products``, ``tpot``, ``prefill``, ``memory``, ``capacity``,
``speculation``, ``latency``, ``goodput``, ``cpu`` and ``predict``.

``latency``, ``goodput``, ``cpu`` and ``predict`` need no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvbench.bench import command as whole_models
from kvbench.bench import cpu, goodput, latency, predict, speculation_command
from kvbench.bench.choices import number, tokens
from kvbench.util.door import enter


def point(text: str) -> str:
    """Return `text` unchanged if it names a point (``7b:1:32k``); an argparse type.

    Raises:
        argparse.ArgumentTypeError: :func:`kvbench.bench.shapes.point` cannot parse it.
    """
    from kvbench.bench import shapes

    try:
        shapes.point(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parser(measuring: bool = True) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    With ``measuring=False`` it lacks the commands kernel, quantize and products, whose choices come from modules that
    import torch, and is available faster.
    """
    top = argparse.ArgumentParser(
        prog="python -m kvbench.bench",
        description="Measure kernels of one layer or whole models on this GPU, or predict the times on any GPU.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    predict.add_parser(commands)
    if measuring:
        measured(commands)
    whole_models.add(commands, tokens, number)
    speculation_command.add(commands)
    whole_models.add_capacity(commands, tokens, number)
    latency.add(commands)
    goodput.add(commands, tokens, number)
    cpu.add(commands)
    return top


def measured(commands: Any) -> None:
    """Add the subcommands ``kernel``, ``quantize`` and ``products``, each of which times one operation of a layer.

    Their lists of valid models and formats are in a module that imports torch, which is therefore imported only here.
    """
    from kvbench.bench.shapes import FORMATS, MODELS

    kernel = commands.add_parser("kernel", help="time decode attention over packed keys and values")
    kernel.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["7b", "8b"],
        help="models whose head shapes are used (default: 7b 8b)",
    )
    kernel.add_argument("--formats", nargs="+", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    kernel.add_argument("--contexts", nargs="+", type=tokens, default=["4k", "32k", "128k"], metavar="N")
    kernel.add_argument("--batches", nargs="+", type=number, default=[1], metavar="B")
    kernel.add_argument(
        "--q-len",
        nargs="+",
        type=number,
        default=[1],
        metavar="Q",
        help="new tokens per step: 1 for decoding, more for the verification of drafts",
    )
    kernel.add_argument(
        "--points",
        nargs="+",
        type=point,
        metavar="MODEL:B:N[:Q]",
        help="measure these points instead of the whole grid",
    )
    kernel.add_argument(
        "--dtype",
        choices=["float16", "bfloat16"],
        default="float16",
        help="data type of queries and full-precision tokens",
    )
    kernel.add_argument(
        "--production",
        action="store_true",
        help="measure the formats of inference engines, KVarN, TurboQuant and OSCAR at 32k and 128k tokens",
    )
    kernel.add_argument("--path", choices=["auto", "cuda", "triton", "both"], default="auto")
    kernel.add_argument("--no-baselines", action="store_true", help="do not measure torch's SDPA for comparison")
    kernel.add_argument(
        "--check-heads", type=int, default=2, help="number of KV heads per row whose result is checked (0: none)"
    )
    quantize = commands.add_parser(
        "quantize", help="time quantizing and packing of new keys and values, during prefill and decoding"
    )
    quantize.add_argument("--models", nargs="+", choices=MODELS, default=["7b", "8b"])
    quantize.add_argument(
        "--formats",
        nargs="+",
        choices=[f for f in FORMATS if FORMATS[f].single],
        help="formats to measure (default: a selection)",
    )
    quantize.add_argument("--contexts", nargs="+", type=tokens, default=["4k", "32k", "128k"], metavar="N")
    quantize.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    quantize.add_argument("--warps", nargs="+", type=int, help="numbers of warps to try instead of the built-in choice")
    products = commands.add_parser("products", help="time the linear layers of a decode step, and its output head")
    products.add_argument(
        "--models", nargs="+", default=["llama2-7b", "llama3.1-8b"], help="presets, OWNER/NAME of the hub, or folders"
    )
    products.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    products.add_argument(
        "--rows",
        nargs="+",
        type=number,
        default=[1, 2, 5, 8, 16],
        metavar="R",
        help="rows of the input: sequences times new tokens per step (default: 1 2 5 8 16)",
    )
    products.add_argument(
        "--bits", nargs="+", type=int, choices=[4, 16], default=[4, 16], help="bits of a weight (default: 4 16)"
    )
    products.add_argument(
        "--compiled",
        action="store_true",
        help="also measure kernels tuned by torch.compile, which takes some seconds each",
    )
    products.set_defaults(contexts=[])
    for command in (kernel, quantize, products):
        command.add_argument("--quick", action="store_true", help="measure only a few points, in at most three minutes")
        command.add_argument("--out", type=Path, help="folder for the JSON file (default: results/<device>)")
        command.add_argument("--name", help="name of the JSON file (default: the command)")
        command.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
        command.add_argument(
            "--seconds", type=float, default=0.25, help="seconds of measuring per figure (default: %(default)s)"
        )


def _place(top: argparse.ArgumentParser, args: argparse.Namespace) -> Path:
    """Return ``--out`` as the command takes it; on the command line it names a folder, or a file that ends in .json."""
    whole = args.command in ("latency", "goodput", "cpu")
    out: Path = args.out
    if out.suffix != ".json":
        return out / f"{args.command}.json" if whole else out
    if whole:
        return out
    if args.name is not None:
        top.error(f"--out {out} already names the file, so --name {args.name} cannot")
    args.name = out.stem
    return out.parent


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand named on the command line and return the process's exit status.

    The status is 0 on success, 1 if a measurement failed, and 2 if an argument is wrong or the command needs a GPU and
    torch does not find one.
    """
    given = sys.argv[1:] if argv is None else argv
    top = parser(measuring=given[:1] not in (["predict"], ["latency"], ["goodput"], ["cpu"]))
    args, unknown = top.parse_known_args(given)
    if unknown:
        top.error(
            f"unknown arguments of {args.command}: {' '.join(unknown)} "
            f"(python -m kvbench.bench {args.command} --help lists its options)"
        )
    args.argv = given
    if args.out is not None:
        args.out = _place(top, args)
    args.contexts = [tokens(n) if isinstance(n, str) else n for n in args.contexts]
    if args.command == "predict":
        return predict.run(args)
    if args.command == "latency":
        return latency.run(args)
    if args.command == "cpu":
        return cpu.run(args)
    if args.command == "goodput":
        return goodput.run(args)
    if args.command == "capacity" or args.command in whole_models.COMMANDS:
        return whole_models.run(args)
    if args.command == "speculation":
        return speculation_command.run(args)
    import torch

    if not torch.cuda.is_available():
        print("kvbench.bench needs a CUDA device, but torch does not see one", file=sys.stderr)
        return 2
    if args.command == "kernel":
        from kvbench.bench import kernel

        return kernel.run(args)
    if args.command == "products":
        from kvbench.bench import products

        return products.run(args)
    from kvbench.bench import quantize

    return quantize.run(args)


if __name__ == "__main__":
    sys.exit(enter(main))
