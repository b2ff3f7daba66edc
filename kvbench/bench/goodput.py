"""``python -m kvbench.bench goodput``: requests per second within stated limits, simulated over recorded steps.

Reads files of ``bench memory`` or ``bench tpot`` with several batch sizes and measures nothing; imports no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvbench.bench.choices import positive, short_count
from kvbench.errors import ConfigError, DataError, KvbenchError
from kvbench.results.goodput import Limits, Server, arrivals, goodput, simulate
from kvbench.util import atomic
from kvbench.util.table import render_table

SCHEMA = 1
_HEAD = ("setting (simulated)", "prompt", "most", "rate", "goodput", "good %", "TTFT s", "TPOT ms")
NOTE = (
    "Simulated, not measured: arrivals are drawn at random, prefills and steps take the times recorded in the files;"
    " rate: requests per second that arrive; goodput: those per second that keep all limits; TTFT, TPOT: medians"
)


def add_goodput(commands: Any, tokens: Callable[[str], int], number: Callable[[str], int]) -> None:
    """Add the subcommand ``goodput`` to the command line; see :func:`kvbench.bench.command.add_whole_models`."""
    parser = commands.add_parser(
        "goodput",
        help="simulate requests over recorded step times: how many keep limits on TTFT and TPOT; needs no GPU",
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="JSON files of bench memory, with several batch sizes")
    add("--rates", nargs="+", type=positive, default=[0.5, 1.0, 2.0, 4.0], metavar="R", help="requests per second")
    add("--ttft-ms", type=positive, help="limit of the time to the first token, the wait in the queue included")
    add("--tpot-ms", type=positive, help="limit of the mean time per token after the first")
    add("--e2el-ms", type=positive, help="limit of the time from arrival to the last token")
    add("--output-tokens", type=tokens, default=128, metavar="N", help="tokens of every answer (default: 128)")
    add("--requests", type=number, default=500, metavar="N", help="number of requests (default: 500)")
    add("--burstiness", type=positive, default=1.0, help="shape of the gaps' gamma distribution; 1: Poisson")
    add("--seed", type=int, default=0)
    add("--out", type=Path, required=True, metavar="FILE", help="JSON file to write, or its folder")
    parser.set_defaults(contexts=[])


def run_goodput(args: argparse.Namespace) -> int:
    """Run the command and return the process's exit status: 0, or that of the error that ended it."""
    try:
        if args.ttft_ms is None and args.tpot_ms is None and args.e2el_ms is None:
            raise ConfigError(
                "--ttft-ms", None, "or another limit is needed, because goodput counts the requests within limits",
                hint="--ttft-ms 2000 --tpot-ms 20",
            )  # fmt: skip
        rows = [row for path in args.files for row in _goodput_rows(path, args)]
        content = {
            "schema": SCHEMA,
            "what": "python -m kvbench.bench goodput: simulated arrivals over recorded step times",
            "simulated": True,
            "command": " ".join(args.argv),
            "rows": rows,
        }
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            atomic.replace_file(args.out, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            reason = f"{args.out} cannot be written: {error}\n  hint: name another file with --out FILE"
            raise KvbenchError(reason) from error
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(render_table(_HEAD, [_goodput_cells(row) for row in rows], 2))
    print(f"{NOTE}\n{args.out}")
    return 0


def servers(content: Mapping[str, Any]) -> Iterator[tuple[str, int, Server]]:
    """Yield setting, prompt length and recorded times for each setting and prompt length of a ``bench memory`` file.

    The prefill of a request is that of the smallest batch divided by its size; the largest batch that fitted is the
    most that run at a time.

    Raises:
        ValueError: a time is not a number above 0, or a batch size was measured twice, such as with captured and with
            eager steps.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row.get("ttft_s") is not None:
            prompt = row["prompt"] if "prompt" in row else row["context"]
            groups.setdefault((row["setting"], prompt), []).append(row)
    for (setting, prompt), group in groups.items():
        smallest = min(group, key=lambda row: int(row["batch"]))
        steps: dict[int, float] = {}
        for row in group:
            batch, step, prefill = int(row["batch"]), float(row["tpot_s"]["median"]), float(row["ttft_s"])
            if not (math.isfinite(step) and step > 0 and math.isfinite(prefill) and prefill > 0):
                raise ValueError(
                    f"{setting} at {prompt} tokens, batch {batch}: {step} s a step, {prefill} s of prefill"
                )
            if batch in steps:
                raise ValueError(f"{setting} at {prompt} tokens has two points with batch {batch}")
            steps[batch] = step
        yield setting, prompt, Server(smallest["ttft_s"] / smallest["batch"], steps, max(steps))


def _goodput_rows(path: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the simulated rows of one file, one for each setting, prompt length and rate."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        recorded = list(servers(content))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        hint = "measure it again, with one kind of steps"
        raise DataError(f"{path} is not a file of bench memory: {reason}\n  hint: {hint}") from None
    if not recorded:
        raise DataError(
            f"{path} has no point with a TTFT\n  hint: name files of bench memory, measured with --fill prefill"
        )
    limits = Limits(*(None if ms is None else ms / 1e3 for ms in (args.ttft_ms, args.tpot_ms, args.e2el_ms)))
    for setting, prompt, server in recorded:
        for rate in args.rates:
            times = arrivals(args.requests, rate, args.burstiness, args.seed)
            served = simulate(times, args.output_tokens, server)
            yield {
                "simulated": True,
                "file": path.name,
                "model": content.get("model"),
                "device": content.get("device"),
                "setting": setting,
                "prompt": prompt,
                "most": server.most,
                "prefill_s": server.prefill_s,
                "rate": rate,
                "burstiness": args.burstiness,
                "requests": args.requests,
                "output_tokens": args.output_tokens,
                "limits_ms": {"ttft": args.ttft_ms, "tpot": args.tpot_ms, "e2el": args.e2el_ms},
                "goodput": goodput(served, limits),
                "good": sum(map(limits.kept, served)) / len(served),
                "ttft_s": median(request.ttft_s for request in served),
                "tpot_s": median(request.tpot_s for request in served),
            }


def _goodput_cells(row: Mapping[str, Any]) -> Sequence[Any]:
    cells = (row[key] for key in ("setting", "prompt", "most", "rate", "goodput"))
    setting, prompt, *others = cells
    return [setting, short_count(prompt), *others, 100 * row["good"], row["ttft_s"], 1e3 * row["tpot_s"]]
