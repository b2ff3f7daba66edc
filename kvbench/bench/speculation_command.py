"""The command line of ``python -m kvbench.bench speculation``. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.bench.choices import count, device, number, share, token_count
from kvbench.bench.speculation_grid import Point
from kvbench.util.table import table

#: cases that can be measured, in the order of their worth
CASES = ("plain", "quantspec", "kv", "weights", "streamingllm", "snapkv")


def point(text: str) -> Point:
    """Parse a point such as ``llama2-7b:1:32k`` (an argparse ``type``)."""
    model, *rest = text.rsplit(":", 2)
    if len(rest) != 2 or not model or not rest[0].isdecimal() or not int(rest[0]):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:BATCH:TOKENS, such as llama2-7b:1:32k")
    try:
        return Point(model, int(rest[0]), token_count(rest[1]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def drafts(text: str) -> int:
    """Parse a number of drafts per round, 1 to 8 (an argparse ``type``)."""
    gamma = number(text)
    if gamma > 8:
        raise argparse.ArgumentTypeError(f"{text!r}: at most 8 drafts per round can be measured")
    return gamma


def add(commands: Any) -> None:
    """Add the subcommand ``speculation`` to the bench's command line."""
    parser = commands.add_parser("speculation", help="measure QuantSpec's speed-up at forced acceptance rates")
    add = parser.add_argument
    default = [Point("llama2-7b", 1, 32768), Point("llama2-7b", 1, 131072), Point("llama3.1-8b", 1, 131072)]
    add(
        "--points",
        nargs="+",
        type=point,
        default=default,
        metavar="MODEL:B:N",
        help="model, batch, tokens in the cache",
    )
    about = "points at which the cases after quantspec are measured (default: all)"
    add("--side-points", nargs="*", type=point, metavar="MODEL:B:N", help=about)
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
    add("--blocks", type=number, default=5, help="blocks of tokens whose median counts (default: 5)")
    add("--tokens", type=number, default=64, help="tokens of a block (default: 64)")
    add("--no-compile", action="store_false", dest="compile", help="do not compile what surrounds attention")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--device", type=device, default="cuda", help="cuda, or cpu to try out a command (its times mean little)")
    add("--seed", type=count, default=0)
    add("--out", type=Path, help="folder for the JSON file (default: results/<device>)")
    add("--name", help="name of the JSON file (default: speculation)")
    parser.set_defaults(contexts=[])


def run(args: argparse.Namespace) -> int:
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

    return speculation.run(args)


Row = Mapping[str, Any]

HEAD = (
    "model",
    "B",
    "context",
    "case",
    "gamma",
    "ms",
    "x",
    "expected x",
    "draft ms",
    "verify ms",
    "rest ms",
    "peak GiB",
    "steps",
)


def plain_ms(rows: Sequence[Row], row: Row) -> float | None:
    """Return the milliseconds per token of plain decoding at the same point as `row`; None if not measured."""
    place = [row[key] for key in ("model", "batch", "context")]
    mine = [r for r in rows if r["case"] == "plain" and [r[key] for key in ("model", "batch", "context")] == place]
    return mine[0].get("ms") if mine else None


def cells(rows: Sequence[Row], row: Row, at: float) -> list[object]:
    """Return a line of the table: the case at its best gamma and the acceptance `at`.

    The speed-up is measured over blocks of tokens; the expected one follows from the times of the parts
    (:func:`kvbench.bench.speculation_grid.cell`).
    """
    peak = row.get("peak")
    start: list[object] = [row["model"], row["batch"], row["context"], row["case"]]
    end: list[object] = [None if peak is None else peak / 2**30, row.get("stepping") or row.get("message")]
    base = plain_ms(rows, row)
    if row["case"] == "plain":
        return [*start, None, row.get("ms"), None if "ms" not in row else 1.0, None, None, None, None, *end]
    measured = next((one for one in row.get("measured", ()) if one["acceptance"] == at), None)
    if measured is None:
        return [*start, *[None] * 7, *end]
    expected = next(
        (c["ms"] for c in row["grid"] if (c["acceptance"], c["gamma"]) == (at, measured["gamma"])),
        None,
    )
    return [
        *start,
        measured["gamma"],
        measured["ms"],
        base / measured["ms"] if base else None,
        base / expected if base and expected else None,
        measured.get("draft_ms"),
        measured.get("verify_ms"),
        measured.get("sampling_ms"),
        *end,
    ]


def grid(rows: Sequence[Row], row: Row) -> str:
    """Return the grid of a case as a table: a line per acceptance with the speed-up at each gamma, computed."""
    base = plain_ms(rows, row)
    gammas = sorted({cell["gamma"] for cell in row["grid"]})
    lines = []
    for acceptance in sorted({cell["acceptance"] for cell in row["grid"]}):
        times = {cell["gamma"]: cell["ms"] for cell in row["grid"] if cell["acceptance"] == acceptance}
        measured = [one for one in row["measured"] if one["acceptance"] == acceptance]
        values = [base / times[gamma] if base else times[gamma] for gamma in gammas]
        seen = [f"{base / one['ms'] if base else one['ms']:.2f} (gamma {one['gamma']})" for one in measured]
        lines.append([acceptance, *values, ", ".join(seen) or None])
    unit = "speed-up" if base else "ms a token"
    title = f"{row['model']}, batch {row['batch']}, {row['context']} tokens, {row['case']}: {unit} by gamma, computed"
    return f"{title}\n{table(('acceptance', *map(str, gammas), 'measured'), lines, 1)}"


def text(rows: Sequence[Row], at: float) -> str:
    """Return all tables as text; the cases are compared at the acceptance `at`."""
    parts = [
        f"acceptance forced to {at:g} (the text is meaningless); x: speed-up over plain captured steps, measured; "
        "expected x: from the times of the parts and the geometric model",
        table(HEAD, [cells(rows, row, at) for row in rows], HEAD.index("gamma")),
    ]
    parts += [grid(rows, row) for row in rows if row["case"] == "quantspec" and row.get("grid")]
    return "\n\n".join(parts)


def line(row: Row) -> str:
    """Return the beginning of a line of progress: model, batch, context and case."""
    return f"{row['model']} B{row['batch']} {row['context']} {row['case']}"


def shown(figures: Row) -> str:
    """Return the times of a round as text."""
    names = [name for name in ("draft_ms", "verify_ms", "sampling_ms", "flush_ms", "round_ms") if name in figures]
    return ", ".join(f"{name.removesuffix('_ms')} {figures[name]:.3f}" for name in names) + " ms"
