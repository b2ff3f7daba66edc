"""``python -m experiments.cells``: the papers' cells of time and memory, and a worker that fills the missing ones.

python -m experiments.cells                                       # the counts, by item and kind of cell
python -m experiments.cells jobs --out build/cells/jobs.json      # what is missing, in order of cells a second
python -m experiments.cells measure build/cells/jobs.json --out LOGS --seconds 480 [--part 1/2]
python -m experiments.cells keep LOGS                             # the logs' rows into results/h200
python -m experiments.cells --write                               # the counts into results/h200/papers/README.md

``jobs`` and ``measure`` need no Hydra, ``measure`` no more than kvbench.bench does; for Cocktail's rows bm25s.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import stored
from experiments.cells.states import PAGE, cells_block
from experiments.checks.rules import write_blocks
from experiments.stored import ROOT
from kvbench.bench.choices import positive
from kvbench.errors import ConfigError, KvbenchError
from kvbench.util import atomic
from kvbench.util.door import enter


def part(text: str) -> tuple[int, int]:
    """Parse ``2/3`` as the second of three parts, and return (1, 3)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/2")
    return int(found[1]) - 1, int(found[2])


def cells_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m experiments.cells", description=(__doc__ or "").split("\n")[0])
    top.add_argument("--write", action="store_true", help=f"write the counts into {PAGE}")
    commands = top.add_subparsers(dest="command")
    jobs = commands.add_parser("jobs", help="write the jobs that fill the missing cells")
    jobs.add_argument("--out", type=Path, default=Path("build/cells/jobs.json"))
    measure = commands.add_parser("measure", help="measure jobs until a deadline, in one process")
    measure.add_argument("jobs", type=Path, help="file of ``jobs``")
    measure.add_argument("--out", type=Path, required=True, help="folder of logs, whose jobs are not repeated")
    measure.add_argument("--seconds", type=positive, required=True, help="time until the deadline")
    measure.add_argument("--part", type=part, default=(0, 1), metavar="I/N", help="this worker's share of the models")
    measure.add_argument("--device", default="cuda", help="device (default: %(default)s)")
    keep = commands.add_parser("keep", help="write the rows of logs into results/h200")
    keep.add_argument("logs", type=Path)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status."""
    args = cells_parser().parse_args(argv)
    try:
        return {"jobs": _write_jobs, "measure": _measure, "keep": _keep, None: _counts}[args.command](args)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _counts(args: argparse.Namespace) -> int:
    if args.write:
        return write_blocks([cells_block()], ROOT)
    print(cells_block().text)
    return 0


def _write_jobs(args: argparse.Namespace) -> int:
    from experiments.cells.jobs import all_jobs

    jobs = all_jobs()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_file(args.out, (json.dumps([job.as_dict() for job in jobs], indent=1) + "\n").encode())
    hours = sum(job.seconds for job in jobs) / 3600
    cells, again = sum(job.cells for job in jobs), sum(job.again for job in jobs)
    print(f"{args.out}: {len(jobs)} jobs for {cells} cells, and {again} again, {hours:.2f} h on one GPU")
    return 0


def _measure(args: argparse.Namespace) -> int:
    from experiments.cells.worker import Worker, part_of
    from kvbench.models.load import resolve_device

    if not args.jobs.is_file():
        raise ConfigError("measure", args.jobs, "there is no such file", hint="python -m experiments.cells jobs")
    resolve_device(args.device)  # an error here, not one of each job
    jobs = part_of(stored.content(args.jobs), *args.part)
    worker = Worker(args.out, f"part{args.part[0] + 1}", args.seconds, args.device)
    print(f"{worker.measure(jobs)} jobs measured -> {worker.log}", flush=True)
    return 0


def _keep(args: argparse.Namespace) -> int:
    from experiments.cells.keep import keep
    from experiments.cells.states import timed_items
    from experiments.cells.worker import logged

    if not args.logs.is_dir():
        raise ConfigError("keep", args.logs, "is not a folder of logs")
    for path in keep(logged(args.logs)):
        print(f"-> {path}")
    names = " ".join(item.id for item in timed_items())
    print(f"next: python -m experiments {names} --fold-only --write")
    print("      python -m experiments.cells --write; python -m experiments --check --write")
    return 0


if __name__ == "__main__":
    sys.exit(enter(main))
