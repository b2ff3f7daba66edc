"""``python -m experiments.mini``: run the grid, fold it into results/mini.

Every setting is a run of kvbench, so an interrupted comparison goes on where it stopped. With ``--jobs`` settings run
side by side: times are then not comparable and stay out of the table; scores and bytes do not depend on it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.mini.fold import fold
from experiments.mini.grid import GRID, Setting


def overrides(setting: Setting, arguments: argparse.Namespace) -> list[str]:
    """One run as it would be typed after ``python -m kvbench``."""
    tasks = [f"dataset.tasks=[{','.join(arguments.tasks)}]"] if arguments.tasks else []
    return [
        *setting.overrides,
        "model=tiny",
        "dataset=mini/full",
        f"dataset.lengths=[{','.join(map(str, arguments.lengths))}]",
        f"dataset.limit={arguments.limit}",
        *tasks,
        f"runtime.results_dir={arguments.runs}",
        "logger=none",
    ]


def composed(setting: Setting, arguments: argparse.Namespace) -> dict[str, Any]:
    """The setting's configuration as plain data."""
    from hydra import compose, initialize_config_dir

    from kvbench.cli.compose import run_config
    from kvbench.confdir import conf_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return run_config(compose("config", overrides=overrides(setting, arguments)))


def run_one(setting: Setting, arguments: argparse.Namespace) -> int:
    """Run one setting in this process."""
    from kvbench.run import run

    return 0 if run(composed(setting, arguments))["status"] == "ok" else 1


def run_apart(setting: Setting, arguments: argparse.Namespace) -> bool:
    """Run one setting in a process of its own, its output in a log; whether it went well."""
    log = Path(arguments.runs) / "logs" / f"{setting.slug}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "experiments.mini", "--one", setting.name, *sys.argv[1:]]
        good = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode == 0
    print(f"{setting.name}: {'done' if good else f'failed, see {log}'}", flush=True)
    return good


def main() -> int:
    """Run and fold; 1 where a setting failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.mini", description=__doc__)
    parser.add_argument("--limit", type=int, default=100, help="samples a task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--tasks", nargs="*", default=[], help="tasks of mini (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="settings that run side by side")
    parser.add_argument("--only", nargs="*", default=[], help="names of settings (default: all)")
    parser.add_argument("--runs", default="results/runs/mini", help="where the runs lie")
    parser.add_argument("--out", default="results/mini", help="where table, scores and plot go")
    parser.add_argument("--fold-only", action="store_true", help="make the tables of what has run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return run_one(next(s for s in GRID if s.name == arguments.one), arguments)
    settings = [s for s in GRID if not arguments.only or s.name in arguments.only]
    good = [True]
    if not arguments.fold_only:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            good = list(pool.map(lambda s: run_apart(s, arguments), settings))
    configs = {setting.name: composed(setting, arguments) for setting in settings}
    print(fold(Path(arguments.runs), Path(arguments.out), settings, configs))
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
