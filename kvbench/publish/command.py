"""The command line of ``python -m kvbench.publish``; it only reads files of runs, and does not import torch."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.report_runs import RUNS, find_run, results_above, runs_of
from kvbench.config.logger_config import WandbLogger, logger_of
from kvbench.errors import KvbenchError
from kvbench.loggers.wandb_service import Service, has_key
from kvbench.publish import runs, sweeps
from kvbench.results.store import RunStore, find_runs
from kvbench.results.sweeps import Sweep, named_sweep
from kvbench.util.door import reporting
from kvbench.util.requirements import exists, installed


@reporting("interrupted; run the same command again to send the rest")
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.publish`` and return the exit status; print errors to standard error.

    The status is 1 if anything that was asked for could not be sent.
    """
    return _main(_publish_parser().parse_args(argv))


def _publish_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.publish",
        description="Send finished runs to Weights & Biases, whatever their logger was. What W&B has already is not "
        "sent again. Without an API key, everything is written to a local folder for `wandb sync`.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="id of a run, or its beginning")
    parser.add_argument(
        "--sweep",
        metavar="ID",
        help="send all finished runs of a sweep, and a run of its own with their table and plots; ID is the name of a "
        "folder in results/sweeps, its beginning, or the path of a folder elsewhere",
    )
    parser.add_argument("--results", type=Path, default=RUNS, help="folder of the runs (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="also send what W&B has already")
    parser.add_argument(
        "--prompts",
        action="store_true",
        help="also send the ends of each prompt and a reference answer, for which the data set is read again",
    )
    parser.add_argument("--project", default=WandbLogger.project, help="project in W&B (default: %(default)s)")
    parser.add_argument("--entity", metavar="NAME", help="team or user in W&B (default: the key's own)")
    parser.add_argument(
        "--group", metavar="NAME", help="group in W&B (default: the sweep, or else the model and the data set)"
    )
    parser.add_argument("--tag", metavar="TAG", action="append", default=[], help="a further tag; may be repeated")
    parser.add_argument(
        "--mode",
        choices=("auto", "online", "offline"),
        default="auto",
        help="auto: online if an API key is configured and the service answers, else offline (default: %(default)s)",
    )
    parser.add_argument(
        "--dir", default=WandbLogger.dir, help="folder in which wandb/ is created (default: %(default)s)"
    )
    return parser


def _main(arguments: argparse.Namespace) -> int:
    if not arguments.runs and arguments.sweep is None:
        raise KvbenchError(
            "name the runs to send.\n  hint: python -m kvbench.publish RUN..., or --sweep ID; python -m kvbench.report "
            "lists all runs"
        )
    exists(str(arguments.results), "--results")
    sweep: Sweep | None = None
    ours: list[RunStore] = []
    if arguments.sweep is not None:
        sweep = Sweep.open(named_sweep(results_above(arguments.results) / "sweeps", arguments.sweep))
    folder = arguments.results if sweep is None else runs_of(sweep, arguments.results)
    known = find_runs(folder)
    if arguments.runs and not known:
        raise KvbenchError(f"there are no runs in {folder}.\n  hint: name another folder with --results DIR")
    stores = [find_run(known, name) for name in arguments.runs]
    service = _service(arguments)
    outcomes: Counter[str] = Counter()
    if sweep is not None:
        by_id = {store.run_id: store for store in known}
        ids = dict.fromkeys(entry.run_id for entry in sweep.progress() if entry.run_id and entry.status is not None)
        absent = [run_id for run_id in ids if run_id not in by_id]
        for run_id in absent:
            print(f"error: run {run_id} of the sweep is not in {folder}", file=sys.stderr)
            print("  hint: name the folder of its runs with --results DIR", file=sys.stderr)
        outcomes["failed"] += len(absent)
        ours = [by_id[run_id] for run_id in ids if run_id in by_id]
    for store in {store.run_id: store for store in [*stores, *ours]}.values():
        name = sweep.manifest.id if sweep is not None and store in ours else None
        outcomes[runs.send_run(store, service, name, again=arguments.again, prompts=arguments.prompts)] += 1
    if sweep is not None:
        outcomes[sweeps.send_sweep(sweep, ours, folder, service, again=arguments.again)] += 1
    _conclude(outcomes, service)
    return 1 if outcomes["failed"] else 0


def _service(arguments: argparse.Namespace) -> Service:
    """Return the connection to W&B that the options describe; raise KvbenchError if W&B cannot be used."""
    if not installed("wandb"):
        raise KvbenchError("this needs the package wandb, which is not installed.\n  hint: run pip install wandb")
    settings = logger_of(
        {
            "name": "wandb",
            "mode": arguments.mode,
            "tags": arguments.tag,
            **{key: getattr(arguments, key) for key in ("project", "entity", "group", "dir")},
        }
    )
    if arguments.mode == "online" and not has_key():
        raise KvbenchError(
            "W&B needs an API key for --mode online, and none is configured.\n"
            "  hint: run wandb login, or set WANDB_API_KEY; --mode offline needs neither"
        )
    service = Service(settings, lambda line: print(line, file=sys.stderr))
    if service.mode() == "disabled":
        raise KvbenchError("WANDB_MODE=disabled keeps everything from being sent.\n  hint: unset WANDB_MODE")
    return service


def _conclude(outcomes: Counter[str], service: Service) -> None:
    """Print how many runs were sent, and where they are."""
    words = {"sent": "sent", "known": "already sent", "failed": "not sent"}
    counts = ", ".join(f"{outcomes[key]} {text}" for key, text in words.items() if outcomes[key])
    print(f"{service.destination().removeprefix('wandb ')}: {counts or 'nothing to send'}")
    if service.mode() == "offline" and outcomes["sent"]:
        print(f"to upload them: wandb sync {service.settings.dir}/wandb/offline-run-*")
