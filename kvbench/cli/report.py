"""``python -m kvbench.report``: what runs are there, and what they gave. Reads files only; needs no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench.errors import KvbenchError, nearest
from kvbench.results import code as codes
from kvbench.results import compare, ranking, tables
from kvbench.results.points import has_points
from kvbench.results.store import DONE, RunStore, find_runs
from kvbench.runner import sources
from kvbench.util.requirements import exists

#: status of a run that has no `metrics.json`
UNFINISHED = "unfinished"
#: samples of older code that --show names
SHOWN = 8
#: groups of a configuration that a line of the list is made of
GROUPS = ("model", "method", "quantizer", "dataset", "decoding", "runtime")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return _main(arguments)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(arguments: argparse.Namespace) -> int:
    exists(str(arguments.results), "--results")
    stores = [store for store in find_runs(arguments.results) if not _said(store)]
    if not stores:
        raise KvbenchError(
            f"no runs under {arguments.results}.\n  hint: --results DIR, or make one: python -m kvbench method=kivi"
        )
    if arguments.compare:
        found = compare.compare(*(_find(stores, name) for name in arguments.compare))
        if arguments.format == "screen":
            Console(highlight=False).print(compare.screen(found))
        else:
            print(compare.markdown(found) if arguments.format == "markdown" else compare.to_csv(found), end="")
        return 0
    if not arguments.show:
        _list(stores)
        return 0
    chosen = [_find(stores, name) for name in arguments.show]
    runs = []
    for store in chosen:
        metrics = store.metrics()
        if metrics is None:
            print(f"{store.run_id}: {len(store.samples().rows)} samples, not finished yet", file=sys.stderr)
        else:
            runs.append(marked(store, metrics))
    if not runs:
        return 1
    if arguments.format == "markdown":
        print(tables.markdown(runs), end="")
    elif arguments.format == "csv":
        print(tables.to_csv(runs), end="")
    else:
        print(tables.summary(runs))
        for store in chosen:
            _details(store)
    return 0


def _said(store: RunStore) -> bool:
    """Whether a run cannot be shown; the reason is printed."""
    problem = store.problem()
    if problem:
        print(f"skipped: {problem}", file=sys.stderr)
    return problem is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.report", description="Runs on disk, as tables.")
    parser.add_argument("--results", type=Path, default=Path("results/runs"), help="directory of runs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="one line per run (what is done without arguments)")
    what.add_argument("--show", metavar="RUN", nargs="+", help="runs by id or its beginning: one table of them")
    what.add_argument("--compare", metavar=("A", "B"), nargs=2, help="two runs sample by sample: B less A")
    parser.add_argument(
        "--format", choices=("screen", "markdown", "csv"), default="screen", help="of --show, --compare"
    )
    return parser


def _find(stores: Sequence[RunStore], name: str) -> RunStore:
    """The run whose id is `name` or begins with it (or whose second half does)."""
    found = [s for s in stores if s.run_id.startswith(name) or s.run_id.partition("-")[2].startswith(name)]
    exact = [s for s in found if s.run_id == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    ids = [store.run_id for store in (found or stores)]
    if found:
        raise KvbenchError(f"{name} is the beginning of {len(found)} runs: {', '.join(ids)}")
    near = nearest(name, ids)
    raise KvbenchError(f"no run {name}." + (f"\n  hint: did you mean {near}?" if near else "\n  hint: --list"))


def _list(stores: Sequence[RunStore]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("run", "method", "model", "data", "status", "samples", "score", "KV", "code"):
        words = name in ("method", "model", "data")  # these take another line where the screen is narrow; figures never
        table.add_column(name, no_wrap=not words, overflow="fold")
    shown = [(store, marked(store, run) if (run := store.metrics()) else _begun(store)) for store in stores]
    names = tables.labels([run for _, run in shown], beside=("model", "dataset"))
    for (store, run), name in zip(shown, names, strict=True):
        count, score = run["samples"], run["mean"]["score"]
        told = (name, *(str(run["config"][key] or "?") for key in ("model", "dataset")), run["status"])
        if run["status"] == UNFINISHED:
            table.add_row(store.run_id, *told, str(count["done"]), "-", "-", _codes(run))
            continue
        table.add_row(
            store.run_id,
            *told,
            f"{count['done']}/{count['requested']}",
            _unscored(run) if score is None else f"{score:.3f}",
            tables.size(run["kv_bytes"]["used"]["total"]),
            _codes(run),
        )
    Console(highlight=False).print(table)


def marked(store: RunStore, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a run with ``status`` and ``older`` as they are for the code of now.

    A run whose method or data set is not on this machine stays as it was stored.
    """
    config = store.config()
    if config is None or any(not isinstance(config.get(group), dict) for group in GROUPS):
        return metrics
    older = codes.older(metrics.get("code") or {}, metrics.get("sources") or {}, sources.code(config))
    status = metrics["status"]
    if status in DONE:
        status = "older" if older else "ok"
    return {**metrics, "status": status, "older": older}


def _begun(store: RunStore) -> dict[str, Any]:
    """Return a row of the list for a run without `metrics.json`."""
    written = store.config() or {}
    config = {group: value if isinstance(value := written.get(group), dict) else {} for group in GROUPS}
    try:
        rows = list(store.samples().rows.values())
    except KvbenchError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        rows = []
    counts, parts = codes.kinds(rows)
    samples = {"done": len(rows), "requested": None, "truncated": 0}
    older = codes.older(counts, parts, sources.code(config))
    return {
        **ranking.failed(config, ""),
        "status": UNFINISHED,
        "samples": samples,
        "code": counts,
        "sources": parts,
        "older": older,
    }


def _codes(run: Mapping[str, Any]) -> str:
    """Return the version of the code that made the samples, or how many there are, and a mark for older code."""
    versions = list(run.get("code") or ())
    text = f"{len(versions)} kinds" if len(versions) > 1 else "-"
    if len(versions) == 1:
        text = versions[0] if versions[0] == codes.UNKNOWN else versions[0][:6]
    parts = [part for part in (run.get("older") or {}).get("parts", ()) if part != codes.UNKNOWN]
    return f"{text}, older: {', '.join(parts)}" if parts else text


def _unscored(metrics: dict[str, Any]) -> str:
    """What a run without scores gave: perplexities, or the best throughput of its points."""
    if has_points(metrics):
        return "-" if metrics["tokens_per_s"] is None else f"{metrics['tokens_per_s']:.4g}/s"
    found = [entry["perplexity"] for entry in metrics["scores"].values() if entry.get("perplexity")]
    return ", ".join(f"ppl {entry['ppl']:.2f}" for entry in found) or "-"


def _details(store: RunStore) -> None:
    """Where one run was made and how, below its table."""
    metrics: dict[str, Any] = store.metrics() or {}
    found = store.samples()
    print(f"\n{store.run_id}  {metrics.get('label', '')}  {metrics.get('status', 'unfinished')}")
    if not metrics:
        return
    environment, attention = metrics["env"], metrics["attention"]
    packed = "packed codes" if attention["reads_packed"] else "full precision"
    print(f"  directory   {store.path}")
    print(f"  attention   {attention['path']}, reading {packed}")
    for kind in ("used", "reserved"):
        parts = metrics["kv_bytes"][kind]
        print(f"  KV {kind:<8} " + "  ".join(f"{name} {tables.size(count)}" for name, count in parts.items()))
    for key, entry in metrics["scores"].items():
        if entry.get("perplexity"):
            found = entry["perplexity"]
            size = "" if found["bits_per_byte"] is None else f", {found['bits_per_byte']:.4f} bits per byte"
            print(f"  perplexity  {key}: {found['ppl']:.4f}{size}, {found['windows']} windows, mode {found['mode']}")
        elif entry["nll"]:
            pair = entry["nll"]["vs_fp16"]
            beside = f", {pair['diff']:+.4f} to fp16" if pair else ""
            print(f"  answer NLL  {key}: {entry['nll']['mean']:.4f} nats per token{beside}")
    _code_details(store, metrics)
    print(f"  made with   kvbench {environment.get('kvbench')} ({environment.get('commit') or 'no commit'})")
    print(f"              torch {environment.get('torch')}, transformers {environment.get('transformers')}")
    if found.damaged:
        print(f"  damaged     {len(found.damaged)} lines of samples.jsonl; the same command does their samples again")
    if metrics["error"]:
        print(f"  error       {metrics['error']}")


def _code_details(store: RunStore, metrics: Mapping[str, Any]) -> None:
    """Print which code made the samples, and which of them are of older code than now's."""
    counts = metrics.get("code")
    if not counts:
        return
    print(f"  code        {', '.join(f'{version} ({count} samples)' for version, count in counts.items())}")
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
        print(f"  older code  {changed}: {', '.join(names[:SHOWN])}{more}")
