"""The command line of ``python -m kvbench.submit``; it reads files of runs and rows, and does not import torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from kvbench.cli.report_runs import RUNS, Code, find_run
from kvbench.errors import ConfigError, KvbenchError
from kvbench.results.board import FOLDER, BoardRow, disagreement
from kvbench.results.board_file import read_row
from kvbench.results.store import find_runs
from kvbench.submit.build import finished_row, row_content
from kvbench.submit.check import check_bytes
from kvbench.submit.listing import README, agreement, listing_markdown, read_listing
from kvbench.util import atomic
from kvbench.util.door import reporting
from kvbench.util.requirements import check_writable, exists

#: name in a row that is only compared
NOBODY = "(not submitted)"


@reporting()
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.submit`` and return the exit status: 1 if a row is refused, 2 for nonsense."""
    parser = submit_parser()
    arguments = parser.parse_args(argv)
    if arguments.check or arguments.write:
        return _check(arguments)
    if (arguments.again is None) != (arguments.row is None):
        parser.error("--again RUN and --row FILE need each other")
    if bool(arguments.names) == bool(arguments.again):
        parser.error("name the runs to submit, or give --again, --check or --write")
    return _submit(arguments)


def submit_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.submit",
        description="Write finished runs as rows of the leaderboard, one JSON file each, without prompts, answers or "
        "paths; check rows; write the leaderboard's page.",
    )
    add = parser.add_argument
    add("names", metavar="RUN", nargs="*", help="ids of runs, or their beginnings; with --check: files of rows")
    add("--results", type=Path, default=RUNS, help="folder of the runs (default: %(default)s)")
    add("--to", type=Path, default=FOLDER, metavar="DIR", help="folder of the rows (default: %(default)s)")
    add("--who", metavar="NAME", help="name to show with the rows, any that you like")
    add("--link", metavar="URL", help="https address to show with the name")
    add("--again", metavar="RUN", help="compare this run with --row, whose settings it repeats; --who submits it")
    add("--row", type=Path, metavar="FILE", help="file of the row that --again repeats")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="check rows: those named, or all of --to and its page; changes nothing"
    )
    what.add_argument("--write", action="store_true", help=f"check all rows of --to, and write its {README}")
    return parser


def _check(arguments: argparse.Namespace) -> int:
    if arguments.names:
        for name in arguments.names:
            row = read_row(Path(name))
            check_bytes(row)
            print(f"{name}: {row.name} on {row.model}, {row.bytes.bits:.2f} bits an element; the check passes")
        return 0
    check_folder(arguments.to, "--to")
    if arguments.write:
        check_writable(str(arguments.to), "--to")
    listing, page = read_listing(arguments.to), arguments.to / README
    for problem in listing.problems:
        print(f"refused: {problem}", file=sys.stderr)
    if listing.problems:
        return 1
    text = listing_markdown(listing)
    if arguments.write:
        atomic.replace_file(page, text.encode())
    elif not page.is_file() or page.read_text(encoding="utf-8") != text:
        print(f"{page} does not show these rows.\n  hint: {_next(arguments.to)}", file=sys.stderr)
        return 1
    print(f"{arguments.to}: {len(listing.rows)} rows pass the check")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    if not (arguments.who or (arguments.who is None and arguments.again)):
        raise ConfigError("--who", arguments.who, "must be the name to show with the rows", hint="--who 'A Reader'")
    if arguments.who:
        check_writable(str(arguments.to), "--to")
    check_folder(arguments.results, "--results")
    stores = find_runs(arguments.results)
    if not stores:
        raise KvbenchError(f"there are no runs in {arguments.results}.\n  hint: name another folder with --results DIR")
    first = None if arguments.row is None else read_row(arguments.row)
    today, code = date.today().isoformat(), Code()
    made: list[tuple[str, BoardRow]] = []
    chosen = {(store := find_run(stores, name)).run_id: store for name in arguments.names or [arguments.again]}
    for store in chosen.values():
        content = row_content(
            store, arguments.who or NOBODY, arguments.link, today, None if first is None else first.digest, code
        )
        text, row = finished_row(content)
        check_bytes(row)
        if first is not None and (problem := disagreement(row, first)):
            raise KvbenchError(f"run {store.run_id} does not reproduce {arguments.row.name}: {problem}")
        made.append((text, row))
        if first is not None:
            print(f"run {store.run_id} reproduces {first.file}: {agreement(row, first)}")
    if arguments.who is None:
        print("not written: --who NAME submits it as a row that reproduces the other")
        return 0
    arguments.to.mkdir(parents=True, exist_ok=True)
    for text, row in made:
        path = arguments.to / row.file
        atomic.replace_file(path, text.encode())
        print(f"{path}: {row.name} on {row.model}, {row.bytes.bits:.2f} bits an element")
    print(f"next: look at the files, then {_next(arguments.to)}")
    return 0


def check_folder(folder: Path, option: str) -> None:
    """Raise ConfigError unless the folder that an option names is there."""
    if not exists(str(folder), option) or not folder.is_dir():
        raise ConfigError(option, folder, "is no folder", hint=f"{option} DIR, a folder that exists")


def _next(folder: Path) -> str:
    """Return the command that writes the page of a folder of rows."""
    return "python -m kvbench.submit --write" + ("" if folder == FOLDER else f" --to {folder}")
