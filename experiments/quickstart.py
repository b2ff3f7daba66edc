"""``make readme``: one run of ``make run``, kept in results/quickstart, and README.md's first table from its records.

    python -m experiments.quickstart SWEEP            # show the table of the runs of a sweep's folder
    python -m experiments.quickstart SWEEP --write    # ... keep these runs, and write the documents

README.md shows the table that such a run prints, turned: a line per column, a column per run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from experiments.stored import ROOT, as_json, content, markdown_table
from kvbench.results import record
from kvbench.results.columns import COLUMNS
from kvbench.results.load import SIDE_BY_SIDE
from kvbench.results.notes import notes
from kvbench.results.tables import table_grid

FOLDER = "results/quickstart"
#: presets of conf/experiment/quickstart, as the Makefile names them
PRESETS = ("fp16", "kivi4", "kivi2", "atom4")
#: columns of a table of runs that README.md shows, beside those of the tasks
SHOWN = ("", "mean", "KV", "ratio", "peak", "TTFT", "TPOT")
#: headings of the table that README.md says in other words
NAMES = {"mean": "**mean**", "ratio": "KV bytes, fp16's to them"}


def kept(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return the kept records by preset, with today's defaults for keys that were added later."""
    return {name: record.fill_defaults(content(root / FOLDER / name / "metrics.json")) for name in PRESETS}


def machine(runs: Sequence[Mapping[str, Any]], root: Path = ROOT) -> str:
    """Return when, where and with which code and packages the kept runs were made, in one sentence."""
    about = content(root / FOLDER / "about.json")
    env = runs[0]["env"]
    return (
        f"One run of `make run` on {about['date']}, {about['seconds']:.0f} s: {env['cpu_count']} processors "
        f"({env['cpu']}), Python {env['python']}, torch {env['torch']}, transformers {env['transformers']}, commit "
        f"{env['commit'][:8]}; its records are in [{FOLDER}]({FOLDER}/README.md)."
    )


def readme_block(root: Path = ROOT) -> str:
    """Return what stands between the marks of README.md's first table."""
    runs = list(kept(root).values())
    header, body = table_grid(runs)
    lines: list[list[str]] = []
    kv: list[str] = []
    others = {column.name for column in COLUMNS}.difference(SHOWN)
    for number, name in enumerate(header[1:], start=1):
        if name in others:
            continue
        shown = [row[number] for row in body]
        texts = [cell.main + (f" ({cell.detail})" if cell.detail else "") for cell in shown]
        label = NAMES.get(name, name)
        if name == "ratio":  # beside the bytes
            lines[-1] = [label, *map(", ".join, zip(kv, texts, strict=True))]
            continue
        kv = texts
        if name == "mean":
            label += f" (n = {runs[0]['mean']['n']})"
        lines.append([label, *texts])
    with mock.patch.dict(os.environ, {SIDE_BY_SIDE: "1"}):  # the others were the jobs beside each
        said = [line for line in notes(runs) if line.startswith("±") or "other jobs" in line or "code" in line]
    below = " ".join([machine(runs, root), *(f"{line.partition('; set ')[0]}." for line in said)])
    return (
        "\n".join(
            [
                *markdown_table(["", *(row[0].main for row in body)], lines),
                "",
                textwrap.fill(below, 120, break_long_words=False, break_on_hyphens=False),
            ]
        )
        + "\n"
    )


def problems(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why these records are no run that README.md may show: each must be whole, and of the same clean commit."""
    commits = {run["env"]["commit"] for run in runs.values()}
    found = [f"{name}: its status is {run['status']}" for name, run in runs.items() if run["status"] != "ok"]
    if len(commits) > 1 or any(not commit or commit.endswith("+") for commit in commits):
        found.append(f"made at {', '.join(sorted(map(str, commits)))}: commit all changes first, and run all anew")
    return found


def keep_quickstart(sweep: Path, root: Path = ROOT) -> list[str]:
    """Copy records and rows of a sweep's runs to results/quickstart; return why they cannot be kept, else nothing."""
    manifest = content(sweep / "manifest.json")
    jobs = sorted(sweep.glob("job-*.json"))
    found: dict[str, Path] = {}
    for job in map(content, jobs):
        preset = next((text.rpartition("/")[2] for text in job["overrides"] if text.startswith("experiment=")), "")
        if job["metrics"]:
            found[preset] = Path(manifest["results_dir"]) / job["metrics"]["run_id"]
    missing = [f"{name}: {sweep} has no run of it" for name in PRESETS if name not in found]
    if missing:
        return missing
    read = {name: content(found[name] / "metrics.json") for name in PRESETS}
    if refused := problems(read):
        return refused
    for name in PRESETS:
        folder = root / FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("metrics.json", "samples.jsonl"):
            shutil.copyfile(found[name] / file, folder / file)
    created = datetime.fromisoformat(manifest["created"])
    seconds = max(path.stat().st_mtime for path in jobs) - created.timestamp()
    about = {"command": "make readme", "date": f"{created:%Y-%m-%d}", "seconds": round(seconds, 1)}
    (root / FOLDER / "about.json").write_text(as_json(about), encoding="utf-8")
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Show the table of a run of ``make run``, or keep it and write the documents; 1 if it cannot be kept."""
    parser = argparse.ArgumentParser(prog="python -m experiments.quickstart", description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--write", action="store_true", help=f"keep the runs in {FOLDER}, and write the documents")
    arguments = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        root = ROOT if arguments.write else Path(folder)
        refused = keep_quickstart(arguments.sweep, root)
        if refused:
            print("nothing kept:", *refused, sep="\n  ", file=sys.stderr)
            return 1
        if not arguments.write:
            print(
                readme_block(root),
                f"not written: --write keeps these runs in {FOLDER}, and writes the documents",
                sep="\n",
            )
            return 0
    from experiments import check

    return check.main(["--write"])


if __name__ == "__main__":
    raise SystemExit(main())
