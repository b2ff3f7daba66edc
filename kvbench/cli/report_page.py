"""``python -m kvbench.report --html``, ``--serve`` and ``--figures``: the runs on disk as a page and as plots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.cli.report_runs import RUNS, Code, begun, find_run, marked, results_above, runs_of
from kvbench.config.stored_command import changes, command
from kvbench.errors import ConfigError, KvbenchError
from kvbench.page import papers, server
from kvbench.page.data import FollowedSweep, Report
from kvbench.page.runs import Entry
from kvbench.page.server import html
from kvbench.results import sweeps
from kvbench.results.board import FOLDER
from kvbench.results.store import RunStore, find_runs
from kvbench.util import atomic
from kvbench.util.requirements import Package, check_packages, check_writable

#: file name of the page where --html names none
PAGE = "report.html"

#: the options that need the runs' figures
_PAGE_OPTIONS = "--html, --serve or --figures"


def add_page_options(parser: argparse.ArgumentParser, what: Any) -> None:
    """Add ``--pair`` and ``--add`` to the parser, and those of pages to its exclusive group `what`."""
    what.add_argument(
        "--html",
        metavar="FILE",
        nargs="?",
        const=True,
        type=Path,
        help=f"write all runs as one page for a browser (default: {PAGE} beside the runs: for results/runs "
        f"results/{PAGE}, for another folder {PAGE} in it)",
    )
    what.add_argument(
        "--serve",
        metavar="PORT",
        nargs="?",
        const=server.PORT,
        type=int,
        help=f"show the page at http://{server.HOST}:PORT/ and follow runs as they go (default: {server.PORT})",
    )
    what.add_argument(
        "--figures",
        metavar="DIR",
        type=Path,
        help="write the page's plots of the largest group of comparable runs as PNG and SVG",
    )
    parser.add_argument(
        "--sweep",
        metavar="ID",
        help=f"show one sweep with the state of its jobs, as a table or with {_PAGE_OPTIONS}; ID is the name of a "
        "folder in results/sweeps, its beginning, or the path of a folder elsewhere",
    )
    parser.add_argument(
        "--add",
        metavar="FILE",
        action="append",
        default=[],
        type=Path,
        help="with --html or --serve: also show this recipe of kvbench.tune or answer of kvbench.fit --json; may be "
        "repeated",
    )
    parser.add_argument(
        "--pair",
        metavar=("A", "B"),
        nargs=2,
        action="append",
        default=[],
        help="with --html or --serve: also show the samples on which these two runs differ; may be repeated",
    )


def sweep_of(arguments: argparse.Namespace) -> sweeps.Sweep:
    """Return the sweep that ``--sweep`` names. Raises KvbenchError if there is none, or it has no valid manifest."""
    return sweeps.Sweep.open(sweeps.named_sweep(results_above(arguments.results) / "sweeps", arguments.sweep))


def wanted(arguments: argparse.Namespace) -> bool:
    """Return True if the command line has ``--html``, ``--serve`` or ``--figures``.

    Raises:
        ConfigError: ``--pair`` or ``--add`` is given without ``--html`` or ``--serve``.
    """
    plots = arguments.figures is not None
    page = arguments.html is not None or arguments.serve is not None
    for option, given in (("--pair", [" ".join(pair) for pair in arguments.pair]), ("--add", arguments.add)):
        if given and not page:
            raise ConfigError(option, given[0], "needs --html or --serve", hint="add --html")
    return page or plots


def main(arguments: argparse.Namespace) -> int:
    """Write the HTML page, serve it, or write its plots, as the options say; return the exit status.

    Raises:
        KvbenchError: there are no runs, a run of ``--pair`` does not exist, a file cannot be written, or the port
            cannot be used.
    """
    report = _report(arguments)
    if arguments.serve is not None:
        return _serve(report, arguments.serve)
    if arguments.figures is not None:
        return _draw_figures(report, arguments.figures)
    return _write_page(report, beside(report.folder) if arguments.html is True else arguments.html)


def beside(runs: Path) -> Path:
    """Return the path of the page for a folder of runs: next to the folder if it is called ``runs``, else in it."""
    return (runs.parent if runs.name == RUNS.name else runs) / PAGE


def _report(arguments: argparse.Namespace) -> Report:
    sweep, choose, folder = _chosen_runs(arguments)
    stores = choose()
    above = results_above(folder)
    if not stores and arguments.serve is None and (sweep is None or arguments.figures is not None):
        if arguments.sweep is not None:
            raise KvbenchError(
                f"no finished job of the sweep {arguments.sweep} has a run in {folder}.\n"
                "  hint: name the folder of its runs with --results DIR"
            )
        if arguments.figures is not None or not (papers.items(above, set())[0] or arguments.add):
            raise KvbenchError(
                f"there are no runs in {folder}.\n  hint: name another folder with --results "
                "DIR, or start a run: python -m kvbench method=kivi"
            )
        print(f"note: there are no runs in {folder}; the page shows the papers' items in {above}", file=sys.stderr)
    pairs = [(find_run(stores, a).run_id, find_run(stores, b).run_id) for a, b in arguments.pair]
    for a, b in pairs:
        if a == b:
            raise ConfigError("--pair", f"{a} {b}", "names one run twice", hint="name two runs: --pair A B")
    return Report(
        find=choose,
        read=reader(),
        folder=folder,
        papers=above,
        pairs=pairs,
        say=lambda line: print(f"note: {line}", file=sys.stderr),
        sweep=sweep,
        leaderboard=above.parent / FOLDER,
        added=arguments.add,
    )


def _chosen_runs(arguments: argparse.Namespace) -> tuple[FollowedSweep | None, Callable[[], list[RunStore]], Path]:
    """Return the sweep to show if there is one, a function that returns the runs to show, and their folder.

    A sweep of an older version has no manifest; then only the runs of its finished jobs are known.
    """
    if arguments.sweep is None:
        return None, lambda: find_runs(arguments.results), arguments.results
    place = sweeps.named_sweep(results_above(arguments.results) / "sweeps", arguments.sweep)
    if not (place / sweeps.MANIFEST).exists():
        return None, lambda: _among(arguments.results, sweeps.run_ids(place)), arguments.results
    sweep = sweeps.Sweep.open(place)
    followed, folder = FollowedSweep(sweep), runs_of(sweep, arguments.results)
    return followed, lambda: _among(folder, followed.run_ids()), folder


def _among(folder: Path, ids: set[str]) -> list[RunStore]:
    """Return the runs in a folder that have one of the ids."""
    return [store for store in find_runs(folder) if store.run_id in ids]


def reader() -> Callable[[RunStore], Entry | None]:
    """Return a function that reads a stored run for the page; for a damaged one it prints why and returns None."""
    code = Code()

    def read(store: RunStore) -> Entry | None:
        metrics, problem = store.read_metrics()
        if problem:
            print(f"skipped: {problem}", file=sys.stderr)
            return None
        config = store.config() or {}
        shown = marked(store, metrics, config, code) if metrics else begun(store, code)
        return Entry(store, shown, config, command(config) if config else "", changes(config))

    return read


def _write_page(report: Report, path: Path) -> int:
    check_writable(str(path), "--html", file=True)
    data = report.data()
    text = html(data).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(path, text)
    except OSError as error:
        raise KvbenchError(
            f"{path}: cannot be written: {error.strerror or error}.\n  hint: name another file: --html FILE"
        ) from error
    count = len(data["runs"])
    print(f"{path}: {count} run{'' if count == 1 else 's'}, {len(text) / 1e6:.2f} MB")
    return 0


def _serve(report: Report, port: int) -> int:
    with server.Server(report, port) as web:
        print(f"{web.address} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            web.serve_forever()
    return 0


def _draw_figures(report: Report, folder: Path) -> int:
    check_packages([Package("matplotlib", "--figures", str(folder), "run pip install 'kvbench[plot]'")])
    check_writable(str(folder), "--figures")
    from kvbench.page.figures import write_plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
        title, files = write_plots(report.data(), folder)
    except OSError as error:
        raise KvbenchError(
            f"{folder}: a plot cannot be written: {error.strerror or error}.\n"
            "  hint: name another folder: --figures DIR"
        ) from error
    if not files:
        raise KvbenchError("no run has figures to draw.\n  hint: --list shows the status of the runs")
    print(f"{title}:")
    print("\n".join(f"  {file}" for file in files))
    return 0
