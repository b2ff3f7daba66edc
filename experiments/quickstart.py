"""``make readme``: one run of ``make run``, kept in results/quickstart, and README.md's first table from its records.

    python -m experiments.quickstart SWEEP            # show the table of the runs of a sweep's folder
    python -m experiments.quickstart SWEEP --write    # ... keep these runs, and write the documents

README.md shows the table that such a run prints, turned: a line per column, a column per run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments import check
from experiments.checks.methods import PRESETS, QUICKSTART, readme_block
from experiments.stored import ROOT, as_json, content


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
        folder = root / QUICKSTART / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("metrics.json", "samples.jsonl"):
            shutil.copyfile(found[name] / file, folder / file)
    created = datetime.fromisoformat(manifest["created"])
    seconds = max(path.stat().st_mtime for path in jobs) - created.timestamp()
    about = {"command": "make readme", "date": f"{created:%Y-%m-%d}", "seconds": round(seconds, 1)}
    (root / QUICKSTART / "about.json").write_text(as_json(about), encoding="utf-8")
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Show the table of a run of ``make run``, or keep it and write the documents; 1 if it cannot be kept."""
    parser = argparse.ArgumentParser(prog="python -m experiments.quickstart", description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--write", action="store_true", help=f"keep the runs in {QUICKSTART}, and write the documents")
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
                f"not written: --write keeps these runs in {QUICKSTART}, and writes the documents",
                sep="\n",
            )
            return 0
    return check.main(["--write"])


if __name__ == "__main__":
    raise SystemExit(main())
