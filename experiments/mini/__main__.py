"""``python -m experiments.mini``: run a comparison and fold it into results/mini.

``--grid all`` is every method at comparable bytes, ``--grid search`` Cocktail's chunk search against random chunks.
Every setting is a run of kvbench, so an interrupted comparison goes on where it stopped, and ``--fold-only`` makes the
tables of what is there. With ``--jobs`` settings run side by side: times are then not comparable and stay out of the
table; scores and bytes do not depend on it. On one GPU: ``--device cuda --batch 16 --jobs 4``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.mini.fold import fold
from experiments.mini.grid import COMPARISONS, PAIRS, Setting
from experiments.place import add_options, choice


def overrides(setting: Setting, arguments: argparse.Namespace) -> list[str]:
    """Return one run as it would be typed after ``python -m kvbench``."""
    tasks = [f"dataset.tasks=[{','.join(arguments.tasks)}]"] if arguments.tasks else []
    return [
        *setting.overrides,
        "model=tiny",
        "dataset=mini/full",
        f"dataset.lengths=[{','.join(map(str, arguments.lengths))}]",
        f"dataset.limit={arguments.limit_for.get(setting.name, arguments.limit)}",
        *tasks,
        f"runtime.device={arguments.device}",
        f"runtime.batch_size={arguments.batch}",
        f"runtime.results_dir={arguments.runs}",
        "logger=none",
    ]


def composed(setting: Setting, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the setting's configuration as plain data."""
    from hydra import compose, initialize_config_dir

    from kvbench.cli.compose import run_config
    from kvbench.util.confdir import conf_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return run_config(compose("config", overrides=overrides(setting, arguments)))


def run_one(setting: Setting, arguments: argparse.Namespace) -> int:
    """Run one setting in this process."""
    from kvbench.runner.run import run

    return 0 if run(composed(setting, arguments))["status"] == "ok" else 1


def run_apart(setting: Setting, arguments: argparse.Namespace, given: Sequence[str]) -> bool:
    """Run one setting in a process of its own, its output in a log; whether it went well."""
    log = Path(arguments.runs) / "logs" / f"{setting.slug}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "experiments.mini", "--one", setting.name, *given]
        good = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode == 0
    print(f"{setting.name}: {'done' if good else f'failed, see {log}'}", flush=True)
    return good


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, with the comparison's defaults."""
    parser = argparse.ArgumentParser(prog="python -m experiments.mini", description=__doc__)
    parser.add_argument(
        "--grid", choices=tuple(COMPARISONS), default="all", help="comparison to run (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=int, help="samples per task and length (default: 100, or 200 with --grid search)"
    )
    parser.add_argument(
        "--limit-for",
        nargs="+",
        default=[],
        metavar="NAME=N",
        help="different limits for single settings, such as slow ones",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument(
        "--tasks",
        nargs="*",
        help="tasks of mini (default: all; with --grid search, those that distinguish the settings)",
    )
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda or cuda:N")
    parser.add_argument("--batch", type=int, default=1, help="prompts per batch")
    parser.add_argument("--jobs", type=int, default=1, help="number of settings to run in parallel")
    parser.add_argument("--only", nargs="*", default=[], help="names of the settings to run (default: all)")
    parser.add_argument("--runs", default="results/runs/mini", help="folder of the runs (default: %(default)s)")
    parser.add_argument(
        "--out", help="folder for table, scores and plot (default: results/mini or results/mini/search)"
    )
    parser.add_argument(
        "--fold-only", action="store_true", help="write the tables from existing runs, without running anything"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    add_options(parser)
    arguments = parser.parse_args(given)
    grid = COMPARISONS[arguments.grid]
    names = [setting.name for setting in grid.settings]
    limits = dict(text.rsplit("=", 1) for text in arguments.limit_for if "=" in text)
    for name in (*arguments.only, *limits, *(text for text in arguments.limit_for if "=" not in text)):
        if name not in names:
            parser.error(f"no setting {name!r} (NAME=N for --limit-for) in --grid {arguments.grid}: {', '.join(names)}")
    arguments.limit_for = {name: int(count) for name, count in limits.items()}
    arguments.limit = arguments.limit or grid.limit
    arguments.tasks = grid.tasks if arguments.tasks is None else arguments.tasks
    arguments.out = arguments.out or grid.out
    return arguments


def main() -> int:
    """Run and fold; 1 where a setting failed."""
    given = sys.argv[1:]
    arguments = parse(given)
    settings = COMPARISONS[arguments.grid].settings
    if arguments.one:
        return run_one(next(s for s in settings if s.name == arguments.one), arguments)
    settings = tuple(s for s in settings if not arguments.only or s.name in arguments.only)
    good = [True]
    if not arguments.fold_only:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            good = list(pool.map(lambda s: run_apart(s, arguments, given), settings))
    configs = {setting.name: composed(setting, arguments) for setting in settings}
    text, where = fold(Path(arguments.runs), Path(arguments.out), settings, configs, PAIRS, choice(arguments))
    print(text)
    status = where.say() if where is not None else 1
    return status if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
