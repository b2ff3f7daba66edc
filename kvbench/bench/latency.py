"""``python -m kvbench.bench latency``: points that several processes measured, folded. Imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.bench.choices import short_count
from kvbench.errors import KvbenchError
from kvbench.results.replicates import fold_replicates, load_replicates
from kvbench.util import atomic
from kvbench.util.table import render_table

#: version of the JSON file's format
SCHEMA = 1
_POINTS = ("setting", "prompt", "B", "TPOT ms", "CV %", "S", "S_cache", "r_nom", "r_alloc", "MB/step", "GB/s", "% read")
_FITS = ("setting", "B", "ns/token", "from ms", "R2", "break-even", "GB/s of KV", "c0 ms")


def add_latency(commands: Any) -> None:
    """Add the subcommand ``latency`` to the bench's command line."""
    parser = commands.add_parser(
        "latency", help="fold points of several processes: medians, spread, time as a line over length; needs no GPU"
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON files of tpot, one for each process")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write, or its folder")
    parser.set_defaults(contexts=[])


def run_latency(args: argparse.Namespace) -> int:
    """Run the command and return the process's exit status: that of the error if there is one, else 0."""
    try:
        return write_fold(args.files, args.out, " ".join(args.argv))
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def write_fold(files: Sequence[Path], out: Path, command: str) -> int:
    """Fold the files of several processes, write the result, print its tables and return the exit status, 0.

    `files` are those of ``kvbench.bench tpot``, one for each process; `command` is the command line to record.

    Raises:
        KvbenchError: a file cannot be read or written, or the files do not belong together.
    """
    contents = load_replicates(files)
    about = {key: contents[0].get(key) for key in contents[0] if key not in ("rows", "machine", "shuffle", "command")}
    result = fold_replicates(contents)
    content: dict[str, Any] = {
        **about,
        "schema": SCHEMA,
        "what": "python -m kvbench.bench latency: points of several processes, folded",
        "command": command,
        "measured_by": contents[0].get("command"),
        "files": [path.name for path in files],
        "machines": [one.get("machine") for one in contents],
        **result,
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(out, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise KvbenchError(f"{out} cannot be written: {error}\n  hint: name another file with --out FILE") from error
    print(fold_tables(result))
    print(f"{out} ({len(files)} processes)")
    return 0


def fold_tables(result: dict[str, Any]) -> str:
    """Return the tables of folded points and of the lines fitted to them as text."""
    points = [_latency_cells(point) for point in result["points"]]
    fits = [_fit(row) for row in result["fits"]]
    return "\n".join([render_table(_POINTS, points, 3), *([render_table(_FITS, fits, 2)] if fits else []), NOTE])


NOTE = (
    "TPOT: median of the processes' medians; CV: over processes, * above 3 %; S: fp16's TPOT divided by this one;"
    " S_cache: S if the cache's bytes were read at the ceiling's rate; r_nom, r_alloc: compression by the formats,"
    " and by all memory beyond the weights; GB/s of KV, c0: TPOT = c0 + bytes of the cache / (GB/s of KV)"
)


def _latency_cells(point: dict[str, Any]) -> list[Any]:
    start = [point["setting"], short_count(point["prompt"]), point["batch"]]
    if point["status"] != "ok":
        return [*start, "oom", *[None] * (len(_POINTS) - 4)]
    cv = "-" if point["cv"] is None else f"{100 * point['cv']:.2f}{'*' if point['unstable'] else ''}"
    share = point.get("read_share")
    return [
        *start,
        1e3 * point["tpot_s"],
        cv,
        *(point.get(key) for key in ("S", "S_cache", "r_nom", "r_alloc")),
        None if point["read_bytes"] is None else point["read_bytes"] / 1e6,
        point.get("GB_s"),
        None if share is None else 100 * share,
    ]


def _fit(row: dict[str, Any]) -> list[Any]:
    length = "-"
    if "break_even" in row:
        length = "never" if row["break_even"] is None else f"{row['break_even']:,.0f}"
    return [
        row["setting"],
        row["batch"],
        1e9 * row["slope_s"],
        1e3 * row["intercept_s"],
        f"{row['r2']:.5f}",
        length,
        row["BW_eff_GB_s"],
        1e3 * row["c0_s"],
    ]
