"""``python -m experiments.formats``: run the table of formats on a small model, and fold it into results/formats.

Each line is run twice by kvbench: with answers of its own (``dataset=mini``, which gives scores and bytes), and with
fp16's answers decoded through its cache (``dataset=fidelity/answers``, which gives the KL divergence). The same
command resumes an interrupted one; ``--fold-only`` makes the tables from existing runs. With ``--jobs``, lines run side
by side, which changes nothing in the table. For a model of the hub: ``--model llama3.1-8b-instruct --device cuda``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.formats.fold import fold
from experiments.formats.grid import ROWS, Row
from experiments.formats.tpot import settings
from experiments.place import add_options, choice, known, place
from kvbench.config.setting import parse as parse_setting
from kvbench.results.samples import read as read_samples

TASKS = ("key_value_hex", "multi_value", "copy_long", "repeat")
#: the two data sets of a line
FORCED, FREE = "fidelity", "mini"


def overrides(row: Row, data: str, arguments: argparse.Namespace) -> list[str]:
    """Return a run as it would be typed after ``python -m kvbench``."""
    length = f"lengths: [{arguments.length}]"
    options = f"tasks: [{', '.join(TASKS)}], {length}, limit: {arguments.fidelity_limit}"
    chosen = ["dataset=fidelity/answers", "dataset.over=mini", f"dataset.options={{{options}}}"]
    if data == FREE:
        chosen = ["dataset=mini", f"dataset.tasks=[{','.join(TASKS)}]", f"dataset.lengths=[{arguments.length}]"]
        chosen.append(f"dataset.limit={arguments.limit}")
    return [
        *parse_setting(row.setting).overrides(),
        f"model={arguments.model}",
        *chosen,
        f"runtime.device={arguments.device}",
        f"runtime.batch_size={arguments.batch}",
        f"runtime.results_dir={arguments.runs}",
        "logger=none",
    ]


def composed(row: Row, data: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a run's configuration as plain data."""
    from hydra import compose, initialize_config_dir

    from kvbench.cli.compose import run_config
    from kvbench.util.confdir import conf_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return run_config(compose("config", overrides=overrides(row, data, arguments)))


def stored(row: Row, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the rows of both runs of a line by sample id, and its machine; None if one has not begun."""
    from kvbench.config.run_config import checked_config
    from kvbench.errors import KvbenchError
    from kvbench.results.identity import run_id
    from kvbench.runner import resolve

    parts: dict[str, Any] = {}
    for data in (FORCED, FREE):
        config = composed(row, data, arguments)
        try:
            folder = Path(arguments.runs) / run_id(resolve.material(checked_config(config)))
        except KvbenchError as error:
            # such as a calibration that is missing for a model of the hub: the line cannot have been run
            print(f"{row.key}: {error}", file=sys.stderr)
            return None
        parts[data] = read_samples(folder / "samples.jsonl").rows
        if not parts[data]:
            return None
        parts["env"] = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    return parts


def run_lines(keys: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run lines one after the other in this process, and return the number of runs that failed."""
    from kvbench.errors import KvbenchError
    from kvbench.runner.run import run

    failed = 0
    for key in keys:
        for data in (FORCED, FREE):
            try:
                status = run(composed(ROWS[key], data, arguments))["status"]
            except KvbenchError as error:
                status = f"failed: {error}"
            failed += status != "ok"
            print(f"{key}, {data}: {status}", flush=True)
    return failed


def side_by_side(keys: Sequence[str], arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """Run lines in several processes, each with every n-th line, and return how many processes failed."""
    logs = Path(arguments.runs) / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    def work(number: int) -> int:
        share = keys[number :: arguments.jobs]
        command = [sys.executable, "-m", "experiments.formats", *given, "--jobs", "1", "--run-only", "--only", *share]
        with (logs / f"{number}.txt").open("w", encoding="utf-8") as out:
            return int(subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode != 0) if share else 0

    with ThreadPoolExecutor(arguments.jobs) as pool:
        return sum(pool.map(work, range(arguments.jobs)))


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.formats", description=__doc__)
    parser.add_argument("--model", default="tiny", help="preset, or name on the hub (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=100, help="samples per task for scores (default: %(default)s)")
    parser.add_argument(
        "--fidelity-limit", type=int, default=32, help="samples per task for the KL divergence (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="*", default=list(ROWS), metavar="LINE", help="lines (default: all)")
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda or cuda:N")
    parser.add_argument("--batch", type=int, default=100, help="prompts per batch (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--runs", default="results/runs/formats", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--out", default="results/formats", help="folder of the tables (default: %(default)s)")
    parser.add_argument("--fold-only", action="store_true", help="write the tables from existing runs")
    parser.add_argument("--run-only", action="store_true", help="write no tables")
    parser.add_argument("--settings", action="store_true", help="print the settings for kvbench.bench tpot")
    add_options(parser)
    arguments = parser.parse_args(given)
    unknown = [key for key in arguments.only if key not in ROWS]
    if unknown:
        parser.error(f"no line {unknown[0]!r}: {', '.join(ROWS)}")
    return arguments


def sizes(count: int, prompts: int, lines: Collection[Any]) -> dict[str, int]:
    """Return what a table of formats rests on: scored samples and prompts of a line, and the number of lines."""
    return {"samples": count, "prompts": prompts, "lines": len(lines)}


def main() -> int:
    """Run what is missing, write the tables, and return the exit code."""
    given = sys.argv[1:]
    arguments, failed = parse(given), 0
    if arguments.settings:
        print(*settings().values())
        return 0
    if not arguments.fold_only:
        if arguments.jobs == 1:
            failed = run_lines(arguments.only, arguments)
        else:
            # fp16 first: the others compare with the answers and states that its run stores
            first = [key for key in arguments.only if key == "fp16 | own"]
            failed = run_lines(first, arguments)
            failed += side_by_side([key for key in arguments.only if key not in first], arguments, given)
    if not arguments.run_only:
        lines = {key: parts for key in arguments.only if (parts := stored(ROWS[key], arguments))}
        count, prompts = len(TASKS) * arguments.limit, len(TASKS) * arguments.fidelity_limit
        wanted = Path(arguments.out)
        old = known(wanted / "lines.json", lambda kept: sizes(kept["n"], kept["prompts"], kept["lines"]))
        new = sizes(count, prompts, lines)
        where = place(wanted, choice(arguments), new, old, [wanted / "plot.png"])
        print(fold(lines, where.path, count, prompts))
        failed += where.say()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
