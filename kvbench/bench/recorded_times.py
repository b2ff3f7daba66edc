"""Commands that read recorded points, ``python -m kvbench.bench latency | goodput``, and the option ``--processes``.

``tpot``, ``prefill`` and ``memory`` with ``--processes K`` measure the same points in K new processes, one after the
other, each in a random order of its own: a block of a randomised complete block design. ``latency`` combines the files
of such processes: medians, spread, and a straight line of time over length. ``goodput`` takes step times from files of
``memory`` or ``tpot`` with several batch sizes, and simulates how many requests per second stay within given limits.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvbench.bench.choices import fixed_batches, point_file, positive, positive_number, short_count, tokens
from kvbench.bench.report import json_file, write_json
from kvbench.errors import ConfigError, DataError
from kvbench.results.goodput import Limits, Server, arrivals, goodput, simulate
from kvbench.results.replicates import fold_replicates, load_replicates
from kvbench.util.table import render_table

Row = dict[str, Any]
#: version of both commands' JSON files
SCHEMA = 1


def _add_files(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=f"JSON files of {about}")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write, or its folder")


def measure_in_processes(args: argparse.Namespace) -> int:
    """Measure in several processes, one after another, and combine their files; return the exit status.

    Option ``--processes`` gives their number. If a process fails, the others are not run, and the status is that of the
    failed one, or 1 if a signal ended it.

    Raises:
        KvbenchError: an option does not go with ``--processes``.
    """
    fixed_batches(args, "--processes", ", because processes measure the same points")
    whole = json_file(args, point_file(args))
    first = 0 if args.shuffle is None else args.shuffle
    files = []
    for process in range(args.processes):
        files.append(whole.with_name(f"{whole.stem}.{process + 1}.json"))
        own = ["--shuffle", str(first + process), "--out", str(whole.parent), "--name", files[-1].stem]
        command = [sys.executable, "-m", "kvbench.bench", *args.argv, "--processes", "1", *own]
        print(f"process {process + 1} of {args.processes}", flush=True)
        status = subprocess.run(command, check=False).returncode
        if status:
            return max(status, 1)
    return fold_files(files, whole, " ".join(args.argv))


def add_latency_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``latency``."""
    _add_files(parser, "tpot, one for each process")


def fold_latency(args: argparse.Namespace) -> int:
    """Run ``latency``: combine the files of several processes as :func:`fold_files` does; return the exit status, 0."""
    return fold_files(args.files, json_file(args, "latency"), " ".join(args.argv))


def fold_files(files: Sequence[Path], out: Path, command: str) -> int:
    """Combine the files of several processes, write the result, print its tables and return the exit status, 0.

    `files` are those of ``kvbench.bench tpot``, one for each process; `command` is the command line to record.

    Raises:
        KvbenchError: a file cannot be read or written, or the files do not belong together.
    """
    contents = load_replicates(files)
    about = {key: contents[0].get(key) for key in contents[0] if key not in ("rows", "machine", "shuffle", "command")}
    result = fold_replicates(contents)
    content: Row = {
        **about,
        "schema": SCHEMA,
        "what": "python -m kvbench.bench latency: points of several processes, folded",
        "command": command,
        "measured_by": contents[0].get("command"),
        "files": [path.name for path in files],
        "machines": [one.get("machine") for one in contents],
        **result,
    }
    write_json(out, content)
    print(latency_tables(result))
    print(f"{out} ({len(files)} processes)")
    return 0


POINTS = ("setting", "prompt", "B", "TPOT ms", "CV %", "S", "S_cache", "r_nom", "r_alloc", "MB/step", "GB/s", "% read")
FITS = ("setting", "B", "ns/token", "from ms", "R2", "break-even", "GB/s of KV", "c0 ms")

LATENCY_NOTE = (
    "TPOT: median of the processes' medians; CV: over processes, * above 3 %; S: fp16's TPOT divided by this one;"
    " S_cache: S if the cache's bytes were read at the ceiling's rate; r_nom, r_alloc: compression by the formats,"
    " and by all memory beyond the weights; GB/s of KV, c0: TPOT = c0 + bytes of the cache / (GB/s of KV)"
)


def latency_tables(result: Row) -> str:
    """Return two tables as text: the combined points (:func:`fold_files`), and the lines fitted to them."""
    points = [folded_point_cells(point) for point in result["points"]]
    fits = [fitted_line_cells(row) for row in result["fits"]]
    return "\n".join([render_table(POINTS, points, 3), *([render_table(FITS, fits, 2)] if fits else []), LATENCY_NOTE])


def folded_point_cells(point: Row) -> list[Any]:
    """Return the table cells of a point that several processes measured."""
    start = [point["setting"], short_count(point["prompt"]), point["batch"]]
    if point["status"] != "ok":
        return [*start, "oom", *[None] * (len(POINTS) - 4)]
    cv = "-" if point["cv"] is None else f"{100 * point['cv']:.2f}{'*' if point['unstable'] else ''}"
    ratios = [point.get(key) for key in ("S", "S_cache", "r_nom", "r_alloc")]
    read, share = point["read_bytes"], point.get("read_share")
    end = [None if read is None else read / 1e6, point.get("GB_s"), None if share is None else 100 * share]
    return [*start, 1e3 * point["tpot_s"], cv, *ratios, *end]


def fitted_line_cells(row: Row) -> list[Any]:
    """Return the cells of a line that is fitted to a setting's times."""
    length = "-"
    if "break_even" in row:
        length = "never" if row["break_even"] is None else f"{row['break_even']:,.0f}"
    line = [1e9 * row["slope_s"], 1e3 * row["intercept_s"], f"{row['r2']:.5f}", length]
    return [row["setting"], row["batch"], *line, row["BW_eff_GB_s"], 1e3 * row["c0_s"]]


GOODPUT = ("setting (simulated)", "prompt", "most", "rate", "goodput", "good %", "TTFT s", "TPOT ms")
GOODPUT_NOTE = (
    "Simulated, not measured: arrivals are drawn at random, prefills and steps take the times recorded in the files;"
    " rate: requests per second that arrive; goodput: those per second that keep all limits; TTFT, TPOT: medians"
)


def add_goodput_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``goodput``."""
    _add_files(parser, "bench memory, with several batch sizes")
    add = parser.add_argument
    add("--rates", nargs="+", type=positive, default=[0.5, 1.0, 2.0, 4.0], metavar="R", help="requests per second")
    add("--ttft-ms", type=positive, help="limit of the time to the first token, the wait in the queue included")
    add("--tpot-ms", type=positive, help="limit of the mean time per token after the first")
    add("--e2el-ms", type=positive, help="limit of the time from arrival to the last token")
    add("--output-tokens", type=tokens, default=128, metavar="N", help="tokens of every answer (default: 128)")
    add("--requests", type=positive_number, default=500, metavar="N", help="number of requests (default: 500)")
    add("--burstiness", type=positive, default=1.0, help="shape of the gaps' gamma distribution; 1: Poisson")
    add("--seed", type=int, default=0)


def simulate_goodput(args: argparse.Namespace) -> int:
    """Simulate requests over the files, write the JSON file, print the table and return the exit status, 0.

    Raises:
        ConfigError: there is no limit.
        KvbenchError: a file cannot be read or written.
    """
    if args.ttft_ms is None and args.tpot_ms is None and args.e2el_ms is None:
        raise ConfigError(
            "--ttft-ms", None, "or another limit is needed, because goodput counts the requests within limits",
            hint="--ttft-ms 2000 --tpot-ms 20",
        )  # fmt: skip
    rows, out = [row for path in args.files for row in goodput_rows(path, args)], json_file(args, "goodput")
    what = "python -m kvbench.bench goodput: simulated arrivals over recorded step times"
    command = " ".join(args.argv)
    write_json(out, {"schema": SCHEMA, "what": what, "simulated": True, "command": command, "rows": rows})
    print(render_table(GOODPUT, [goodput_cells(row) for row in rows], 2))
    print(f"{GOODPUT_NOTE}\n{out}")
    return 0


def recorded_servers(content: Mapping[str, Any]) -> Iterator[tuple[str, int, Server]]:
    """Yield setting, prompt length and recorded times for each setting and prompt length of a ``bench memory`` file.

    A request's prefill takes the TTFT of the smallest recorded batch divided by the size of that batch. At most as many
    requests as the largest recorded batch run at a time.

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


def goodput_rows(path: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the simulated rows of one file, one for each setting, prompt length and rate."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        recorded = list(recorded_servers(content))
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


def goodput_cells(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return the cells of a simulated row."""
    others = (row[key] for key in ("most", "rate", "goodput"))
    return [row["setting"], short_count(row["prompt"]), *others, 100 * row["good"], row["ttft_s"], 1e3 * row["tpot_s"]]
