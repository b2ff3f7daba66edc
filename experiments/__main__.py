"""``python -m experiments``: every table and figure of the three papers by one command.

Without an item: the list of all, with what each needs and the state of its runs here. With items (``cocktail/table2``,
``cocktail``, ``all``): what is missing is run, and the table is printed and written to results/trials/PAPER/ITEM, with
``--write`` to results/PAPER/ITEM and docs/reproduce.md. The same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.data import Plan
from experiments.place import positive
from kvbench.errors import ConfigError, KvbenchError
from kvbench.util.confdir import group_options
from kvbench.util.door import enter
from kvbench.util.requirements import check_writable


def experiments_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    add = top.add_argument
    add(
        "items",
        nargs="*",
        metavar="ITEM",
        help="ids of items, names of papers, or all; without an argument, all items are listed",
    )
    add("--list", action="store_true", help="list all items, as without an argument")
    add(
        "--models",
        nargs="+",
        default=[],
        help="models to use instead of the paper's: tiny, a preset, OWNER/NAME or ./FOLDER",
    )
    add(
        "--data",
        choices=("paper", "real", "mini", "standin"),
        default="paper",
        help="the paper's data sets (default); real: the same for another trained model, without columns of time and "
        "memory; the bundled tasks; or generated records (format only)",
    )
    add(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="folder with the paper's data in its authors' layouts (longbench/, gsm8k/, pg19/, ...), for what --path "
        "does not name (default with --data real: KVBENCH_DATA); what is in neither comes from the hub",
    )
    add(
        "--path",
        nargs="+",
        default=[],
        metavar="DATASET=FOLDER",
        help="local files of the paper's data, by name of conf/dataset",
    )
    add("--limit", type=positive, metavar="N", help="samples per data set (with --data mini: per task)")
    add("--max-new-tokens", type=positive, metavar="N", help="maximum number of tokens of an answer")
    add(
        "--lengths",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="prompt lengths to use instead of the item's",
    )
    add("--batch", type=positive, default=1, metavar="N", help="prompts at a time, where nothing is timed or drafted")
    add("--device", default="auto", help="device: auto, cpu, cuda or cuda:N")
    add(
        "--launcher",
        choices=("local", "joblib"),
        default="local",
        help="how to start the runs; joblib: in several processes",
    )
    add("--jobs", type=positive, metavar="N", help="number of joblib's processes (default: one per processor)")
    add(
        "--dry-run",
        action="store_true",
        help="print the runs, their expected time and memory, and the downloads, without running anything",
    )
    add("--gpu", default="h200", metavar="NAME", help="with --dry-run: the GPU to predict for (default: %(default)s)")
    add("--fold-only", action="store_true", help="write the tables from existing runs, without running anything")
    add("--check", action="store_true", help="hold the numbers of README, docs and results to the files they come from")
    add("--reproduce", action="store_true", help="print docs/reproduce.md's table of all items and their claims")
    add("--write", action="store_true", help="write below results/ and docs/ (default: tables go to results/trials)")
    add("--replace", action="store_true", help="with --write: replace tables of more samples, too")
    add("--expect", action="store_true", help="with --reproduce: predict the time of every item anew (minutes)")
    add("--uncovered", action="store_true", help="with --check: list the numbers of tables that no rule covers")
    add("--rerun", action="store_true", help="make samples of older code anew (runtime.rerun)")
    add("--runs", type=Path, default=Path("results/runs"), help="folder of the runs (default: results/runs)")
    add("--out", type=Path, default=Path("results"), help="folder for tables and figures (default: results)")
    return top


def check_models(names: Sequence[str]) -> None:
    """Raise ConfigError for a model that is no preset, no repository of the hub and no folder."""
    presets = group_options("model")
    for name in names:
        if name not in presets and "/" not in name and not Path(name).exists():
            raise ConfigError("--models", name, "no such model", allowed=[*presets, "OWNER/NAME", "./FOLDER"])


def paths_of(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse ``DATASET=FOLDER`` texts.

    Raises:
        ConfigError: a text has another form, names no choice of ``conf/dataset``, or its folder or file is missing.
    """
    known = group_options("dataset")
    pairs = []
    for text in texts:
        name, _, place = text.partition("=")
        if not place:
            raise ConfigError("--path", text, "has no folder", allowed="DATASET=FOLDER")
        if name not in known:
            raise ConfigError("--path", name, "no such data set", allowed=known)
        if not Path(place).exists():
            raise ConfigError("--path", text, f"there is no folder or file {place}")
        pairs.append((name, place))
    return tuple(pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; 1 if a run failed, 2 if the command line is wrong."""
    arguments = experiments_parser().parse_args(argv)
    apart = arguments.check or arguments.reproduce
    if not apart and (arguments.uncovered or arguments.expect or (arguments.write and not arguments.items)):
        experiments_parser().error(
            "--write needs an item, --check or --reproduce, --uncovered --check, and --expect --reproduce"
        )
    if arguments.replace and not (arguments.write and arguments.items):
        experiments_parser().error("--replace needs an item and --write")
    try:
        return _do(arguments)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    except BrokenPipeError:  # for example `... | head`; results are on disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that cannot be written, or a full disk
        print(f"error: {error}", file=sys.stderr)
        return 1


def _do(arguments: argparse.Namespace) -> int:
    from experiments import check, reproduce, session
    from experiments.real.files import default_folder, paths_in
    from experiments.registry import chosen_items, items

    if arguments.check:
        return check.main([f"--{name}" for name in ("write", "uncovered") if getattr(arguments, name)])
    if arguments.reproduce:
        return reproduce.main(list(items().values()), arguments.write, arguments.expect)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", arguments.device):
        raise ConfigError("--device", arguments.device, "is not a device", allowed="auto, cpu, cuda or cuda:N")
    check_writable(str(arguments.out), "--out")
    if arguments.runs != Path("results/runs"):
        check_writable(str(arguments.runs), "--runs")
        if (arguments.fold_only or not arguments.items) and not arguments.runs.is_dir():
            raise ConfigError("--runs", arguments.runs, "is not a folder of runs", hint="--runs results/runs")
    folder = arguments.data_dir or (default_folder() if arguments.data == "real" else None)
    plan = Plan(
        models=tuple(arguments.models),
        data=arguments.data,
        limit=arguments.limit,
        max_new_tokens=arguments.max_new_tokens,
        paths=tuple(((paths_in(folder) if folder else {}) | dict(paths_of(arguments.path))).items()),
        lengths=tuple(arguments.lengths),
        device=arguments.device,
        batch=arguments.batch,
        fold_only=arguments.fold_only,
        rerun=arguments.rerun,
        runs=arguments.runs,
        out=arguments.out,
        write=arguments.write,
        replace=arguments.replace,
    )
    check_models(plan.models)
    if arguments.list or not arguments.items:
        print(session.listing(list(items().values()), plan), flush=True)
        return 0
    picked = session.measurable(chosen_items(arguments.items), plan)
    if arguments.dry_run:
        from experiments.predict import prediction_report
        from kvbench.profiling.roofline import gpu_named

        gpu_named(arguments.gpu)
        print(prediction_report(picked, plan, arguments.gpu))
        return 0
    status = session.make_items(picked, plan, arguments.launcher, arguments.jobs or -1, arguments.fold_only)
    reproduce.follow_results(plan)
    return status


if __name__ == "__main__":
    raise SystemExit(enter(main))
