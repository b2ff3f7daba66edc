"""``python -m experiments.fidelity``: run all settings on tiny, and fold them into results/tiny/fidelity.

Each setting is run twice on the same prompts: once with fp16's own answers decoded through its cache
(``dataset=fidelity/answers``), and once with answers of its own (``dataset=mini``). Both are runs of kvbench, so an
interrupted command goes on where it stopped. ``--fold-only`` makes the tables of what is there; with a smaller
``--limit``, of each task's first samples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.fidelity.fold import fold
from experiments.fidelity.grid import LENGTH, SETTINGS, TASKS
from experiments.place import add_options, choice, place
from kvbench.config.setting import parse as parse_setting
from kvbench.results.samples import Row
from kvbench.results.samples import read as read_samples

#: the two data sets of a setting
FORCED, FREE = "fidelity", "mini"


def overrides(setting: str, data: str, arguments: argparse.Namespace) -> list[str]:
    """Return a run as it would be typed after ``python -m kvbench``."""
    tasks = f"tasks: [{', '.join(TASKS)}], lengths: [{LENGTH}], limit: {arguments.limit}"
    chosen = ["dataset=fidelity/answers", "dataset.over=mini", f"dataset.options={{{tasks}}}"]
    if data == FREE:
        chosen = ["dataset=mini", f"dataset.tasks=[{','.join(TASKS)}]", f"dataset.lengths=[{LENGTH}]"]
        chosen.append(f"dataset.limit={arguments.limit}")
    return [
        *parse_setting(setting).overrides(),
        "model=tiny",
        *chosen,
        f"runtime.device={arguments.device}",
        f"runtime.batch_size={arguments.batch}",
        f"runtime.results_dir={arguments.runs}",
        "logger=none",
    ]


def composed(setting: str, data: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a run's configuration as plain data."""
    from hydra import compose, initialize_config_dir

    from kvbench.cli.compose import run_config
    from kvbench.util.confdir import conf_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return run_config(compose("config", overrides=overrides(setting, data, arguments)))


def rows_of(config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Row]:
    """Return the stored rows of a run by sample id: of each task's first samples, as many as ``--limit`` says."""
    from kvbench.config.run_config import checked_config
    from kvbench.results.identity import run_id
    from kvbench.runner import resolve

    name = run_id(resolve.material(checked_config(config)))
    rows = read_samples(Path(arguments.runs) / name / "samples.jsonl").rows
    return {key: row for key, row in rows.items() if int(key.rpartition("/")[2]) < arguments.limit}


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fidelity", description=__doc__)
    parser.add_argument("--limit", type=int, default=8, help="samples per task (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), help="names of the settings (default: all)")
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda or cuda:N")
    parser.add_argument("--batch", type=int, default=8, help="prompts per batch (default: %(default)s)")
    parser.add_argument("--runs", default="results/runs/fidelity", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--out", default="results/tiny/fidelity", help="folder of the tables (default: %(default)s)")
    parser.add_argument("--fold-only", action="store_true", help="write the tables from existing runs")
    add_options(parser)
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """Run what is missing, write the tables, and return the exit code."""
    arguments = parse(given)
    if not arguments.fold_only:
        from kvbench.runner.run import run

        for name in arguments.only:
            for data in (FORCED, FREE):
                status = run(composed(SETTINGS[name], data, arguments))["status"]
                print(f"{name}, {data}: {status}", flush=True)
    stored = {
        name: {data: rows_of(composed(SETTINGS[name], data, arguments), arguments) for data in (FORCED, FREE)}
        for name in arguments.only
    }
    wanted, count = Path(arguments.out), arguments.limit * len(TASKS)
    where = place(wanted, choice(arguments), {"prompts": count, "settings": len(stored)}, before(wanted))
    print(fold(stored, where.path, count))
    return where.say()


def before(folder: Path) -> dict[str, int] | None:
    """Return the prompts and settings of the stored tables; None without any."""
    if not (folder / "table.md").exists():
        return None
    lines = (folder / "settings.csv").read_text(encoding="utf-8").splitlines()
    return {"prompts": int((folder / "table.md").read_text(encoding="utf-8").split()[0]), "settings": len(lines) - 1}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
