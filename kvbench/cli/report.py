"""``python -m kvbench.report``: lists, shows and compares stored runs. Only reads files; does not import torch."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.cli import report_page
from kvbench.cli.report_positions import add_position_options, base_run, check_position_options, show_positions
from kvbench.cli.report_runs import RUNS, Code, begun, find_run, marked
from kvbench.cli.report_turns import add_turn_option, show_turns
from kvbench.errors import ConfigError, KvbenchError
from kvbench.metrics import mrcr, ruler
from kvbench.page.data import FollowedSweep
from kvbench.results import code as codes
from kvbench.results import compare, ranking, record, sweeps, tables
from kvbench.results.columns import LIST, RunLine, shown_columns
from kvbench.results.store import RunStore, find_runs
from kvbench.results.sweeps import Progress, Sweep
from kvbench.runner import sources
from kvbench.util import table
from kvbench.util.door import reporting
from kvbench.util.requirements import exists
from kvbench.util.table import Cell, Grid, printable

#: maximum number of samples of older code that --show lists
SHOWN = 8
#: parts of a run's metrics that no column of the list shows, without which thousands of runs need little memory
_UNLISTED: dict[str, Any] = {"timings": {}, "errors": [], "inter_token": {}, "sources": {}}


@reporting()
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.report`` and return the exit status; print errors to standard error."""
    return _main(_report_parser().parse_args(argv))


def _main(arguments: argparse.Namespace) -> int:
    exists(str(arguments.results), "--results")
    check_position_options(arguments)
    wanted = report_page.wanted(arguments)
    if arguments.watch and (arguments.sweep is None or wanted or arguments.show or arguments.compare):
        raise ConfigError("--watch", None, "needs --sweep ID, and no other choice", hint="--sweep ID --watch")
    if wanted:
        return report_page.main(arguments)
    if arguments.sweep is not None and not (arguments.show or arguments.compare):
        return show(report_page.sweep_of(arguments), watch=arguments.watch)
    stores = find_runs(arguments.results)
    if not stores:
        raise KvbenchError(
            f"there are no runs in {arguments.results}.\n  hint: name another folder with --results "
            "DIR, or start a run: python -m kvbench method=kivi"
        )
    if arguments.compare:
        comparison = compare.compare_runs(*(_undamaged_run(find_run(stores, name)) for name in arguments.compare))
        if arguments.format == "screen":
            print(table.render_text(compare.comparison_screen(comparison)))
        else:
            print(
                compare.comparison_markdown(comparison)
                if arguments.format == "markdown"
                else compare.comparison_csv(comparison),
                end="",
            )
        return 0
    if arguments.by_position:
        chosen = [_undamaged_run(find_run(stores, name)) for name in arguments.by_position]
        base = None if arguments.base is None else _undamaged_run(base_run(stores, arguments.base))
        return show_positions(arguments, chosen, base)
    if arguments.by_turn:
        return show_turns(arguments, [_undamaged_run(find_run(stores, name)) for name in arguments.by_turn])
    if not arguments.show:
        if arguments.format != "screen":
            raise ConfigError(
                "--format",
                arguments.format,
                "needs --show or --compare, --by-position or --by-turn",
                hint="add --show RUN, or leave out --format",
            )
        return _list(stores)
    chosen = [_undamaged_run(find_run(stores, name)) for name in arguments.show]
    runs = []
    for store in chosen:
        metrics = store.metrics()
        if metrics is None:
            print(f"{store.run_id}: not finished yet, {len(store.samples().rows)} samples so far", file=sys.stderr)
        else:
            runs.append(marked(store, metrics))
    if not runs:
        return 1
    if arguments.format == "markdown":
        print(tables.runs_markdown(runs), end="")
    elif arguments.format == "csv":
        print(tables.runs_csv(runs), end="")
    else:
        print(tables.table_text(runs))
        for store in chosen:
            _details(store)
    return 0


def _undamaged_run(store: RunStore) -> RunStore:
    """Return `store`, a run that the user named; raise KvbenchError if its `metrics.json` is damaged."""
    problem = store.problem()
    if problem:
        raise KvbenchError(problem)
    return store


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.report", description="Show the runs on disk as tables.")
    parser.add_argument("--results", type=Path, default=RUNS, help="folder of the runs (default: %(default)s)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show one line per run (the default)")
    what.add_argument(
        "--show", metavar="RUN", nargs="+", help="show the named runs in one table; RUN is a run id or its beginning"
    )
    what.add_argument(
        "--compare", metavar=("A", "B"), nargs=2, help="compare two runs sample by sample; differences are B - A"
    )
    parser.add_argument(
        "--format",
        choices=("screen", "markdown", "csv"),
        default="screen",
        help="output format of --show, --compare, --by-position and --by-turn (default: %(default)s)",
    )
    report_page.add_page_options(parser, what)
    add_position_options(parser, what)
    add_turn_option(what)
    parser.add_argument(
        "--watch", action="store_true", help="with --sweep ID: show the table again whenever a job starts or ends"
    )
    return parser


def _list(stores: Sequence[RunStore]) -> int:
    """Print a line per run, and a message per run that cannot be read; return the exit status."""
    code = Code()
    named: list[dict[str, Any]] = []
    runs: list[record.Metrics] = []
    for store in stores:
        metrics, problem = store.read_metrics()
        if problem:
            print(f"skipped: {problem}", file=sys.stderr)
            continue
        run = marked(store, metrics, code=code) if metrics else begun(store, code)
        named.append({key: run.get(key) for key in ("label", "config", "env", "data")})
        runs.append(record.read_metrics({**run, **_UNLISTED}))
    if not runs:
        raise KvbenchError(
            "none of the runs can be read.\n  hint: run their commands again, or name other --results DIR"
        )
    lines = [
        RunLine(name, run) for name, run in zip(tables.labels(named, beside=("model", "dataset")), runs, strict=True)
    ]
    chosen = [column for column in shown_columns(lines, LIST) if column.cell is not None]
    body = [[Cell(column.cell(line).main) for column in chosen if column.cell is not None] for line in lines]
    wraps = [i for i, column in enumerate(chosen) if column.wraps]  # on a narrow terminal, only texts wrap
    grid = Grid([column.name for column in chosen], body, left=range(len(chosen)), wraps=wraps)
    print(table.render_text(grid.drawn(gap=1)))
    return 0


def _show(line: str) -> None:
    """Print a line about a run, made safe for a terminal: names of runs may contain any characters."""
    print(printable(line))


def _details(store: RunStore) -> None:
    """Print the details of one run below its table."""
    metrics: dict[str, Any] = store.metrics() or {}
    damaged = store.samples().damaged
    print()
    _show(f"{store.run_id}  {metrics.get('label', '')}  {metrics.get('status', 'unfinished')}")
    if not metrics:
        return
    environment, attention = metrics["env"], metrics["attention"]
    packed = "packed codes" if attention["reads_packed"] else "full precision"
    _show(f"  directory   {store.path}")
    _show(f"  attention   {attention['path']}, reads {packed}")
    for kind in ("used", "reserved"):
        parts = metrics["kv_bytes"][kind]
        _show(f"  KV {kind:<8} " + "  ".join(f"{name} {tables.size(count)}" for name, count in parts.items()))
    for key, entry in metrics["scores"].items():
        if entry.get("perplexity"):
            text = entry["perplexity"]
            bits = "" if text["bits_per_byte"] is None else f", {text['bits_per_byte']:.4f} bits per byte"
            _show(f"  perplexity  {key}: {text['ppl']:.4f}{bits}, {text['windows']} windows, mode {text['mode']}")
        elif entry["nll"]:
            pair = entry["nll"]["vs_fp16"]
            beside = f", {pair['diff']:+.4f} compared with fp16" if pair else ""
            _show(f"  answer NLL  {key}: {entry['nll']['mean']:.4f} nats per token{beside}")
    if ((metrics["data"] or {}).get("identity") or {}).get("target") == "ruler" and (
        means := ruler.lengths(metrics["scores"])
    ):
        _show(f"  RULER       {means.text()}")
    for task, areas in mrcr.areas(metrics["scores"]):
        for area in areas:
            _show(f"  AUC         {task} {area.text()}")
        if not areas:
            _show(f"  AUC         {task}: needs the bins 8192 and 16384")
    for key, names in ((metrics.get("samples") or {}).get("too_long") or {}).items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        _show(f"  left out    {key}: {len(names)} do not fit with their answers: {', '.join(names[:SHOWN])}{more}")
    _code_details(store, metrics)
    _show(f"  made with   kvbench {environment.get('kvbench')} ({environment.get('commit') or 'no commit'})")
    _show(f"              torch {environment.get('torch')}, transformers {environment.get('transformers')}")
    if damaged:
        _show(
            f"  damaged     {len(damaged)} lines of samples.jsonl; run the same command again to repeat their samples"
        )
    if metrics["error"]:
        print(printable(f"  error       {metrics['error']}", keep="\n"))


def _code_details(store: RunStore, metrics: Mapping[str, Any]) -> None:
    """Print the versions of the code that made a run's samples, and the samples made by older code."""
    counts = metrics.get("code")
    if not counts:
        return
    _show(f"  code        {', '.join(f'{version} ({count} samples)' for version, count in counts.items())}")
    config = store.config()
    if config is None:
        return
    now = sources.code(config)
    by_parts: dict[str, list[str]] = {}
    for name, row in store.samples().rows.items():
        parts = codes.changed(codes.of(row), now)
        if parts:
            by_parts.setdefault(", ".join(parts), []).append(name)
    for changed, names in by_parts.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        _show(f"  older code  {changed}: {', '.join(names[:SHOWN])}{more}")


#: seconds between two looks at the files of the sweep
EVERY_S = 2.0
#: maximum number of lines about jobs that are not in the table
MOST = 20
#: moves the cursor of a terminal to its upper left corner and clears what is below
_CLEAR = "\x1b[H\x1b[J"


def show(sweep: Sweep, *, watch: bool = False) -> int:
    """Print the table of a sweep and a line per job that has not ended well; return 0 if all jobs are done, else 1.

    `watch` prints again whenever something has changed, until no process works on the sweep.
    """
    followed = FollowedSweep(sweep)
    seen = None
    with suppress(KeyboardInterrupt):
        while True:
            signature, driven = followed.signature(), sweep.driven()
            if signature != seen:
                seen = signature
                entries = followed.progress()
                if watch and sys.stdout.isatty():
                    print(_CLEAR, end="")
                print("\n".join(_sweep_lines(sweep, entries, driven)), flush=True)
            if not watch or not (driven or any(entry.state == "running" for entry in followed.progress())):
                break
            time.sleep(EVERY_S)
    return 0 if all(entry.state == "done" for entry in followed.progress()) else 1


def _sweep_lines(sweep: Sweep, entries: Sequence[Progress], driven: bool) -> list[str]:
    """Return the lines about a sweep: its table, its counts, and the jobs that are not done."""
    rows = ranking.best_first([entry.metrics for entry in entries if entry.metrics is not None])
    states = {"done": "done", "running": "running", "failed": "failed", "missing": "not started"}
    counts = {text: sum(entry.state == state for entry in entries) for state, text in states.items()}
    lines = [tables.table_text(rows)] if rows else []
    lines.append(
        f"sweep {sweep.manifest.id}: {sweeps.in_words(len(entries))}, "
        + ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    )
    others = [entry for entry in entries if entry.state in ("running", "failed")]
    for entry in others[:MOST]:
        first = (entry.message.splitlines() or [""])[0]
        lines.append(
            printable(
                f"job {entry.job.number + 1} {states[entry.state]}: {entry.job.label}" + (f": {first}" if first else "")
            )
        )
    if len(others) > MOST:
        lines.append(
            f"and {len(others) - MOST} more; python -m kvbench.report --html --sweep {shlex.quote(sweep.name)} has all"
        )
    if not driven and any(entry.state in ("missing", "failed") for entry in entries):
        lines.append(f"to run what is missing: python -m kvbench --resume {shlex.quote(sweep.name)}")
    return lines
